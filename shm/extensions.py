"""Finds out which of the package's C extensions this process cannot use, and why.

An extension cannot be used if it was not built, or if its source files have changed since it was built. setup.py stores a hash
of the source files in each extension. ``check`` compares this hash with the source files that are there now.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

#: The reason for not using an extension that exists.
STALE = "it was built from other sources than those that lie beside it"


def sources(folder: Path, names: Sequence[str]) -> str:
    """Returns the names of an extension's source files and a hash of their contents, with spaces between them.

    ``names`` are paths in ``folder``.
    """
    found = hashlib.sha256(b"\0".join((folder / name).read_bytes() for name in names))
    return " ".join([*names, found.hexdigest()])


def check(module: ModuleType) -> None:
    """Raises ImportError if a C extension was not built from the sources beside it, or if these cannot be read.

    Missing sources are not an error.
    """
    assert module.__file__ is not None
    folder, built = Path(module.__file__).parent, getattr(module, "SOURCES", "")
    names = built.split()[:-1]
    try:
        there = [(folder / name).exists() for name in names]
        is_stale = not built or (any(there) and not (all(there) and sources(folder, names) == built))
    except OSError as error:
        raise ImportError(f"a source beside it cannot be read: {error.strerror}") from error
    if is_stale:
        raise ImportError(STALE)


def missing(parts: Mapping[str, str]) -> tuple[str, ...]:
    """Returns a sentence for each C extension that cannot be used, then a sentence on how to build C extensions.

    Returns () if all can be used. ``parts`` maps an extension's module name to what the process lacks without the extension.
    """
    found = [f"{what} ({name}: {reason})" for name, what in parts.items() if (reason := _reason(name))]
    if not found:
        return ()
    advice = "to build them, install a C compiler and Python's headers, then install tensord again"
    return (*found, f"{advice} (in a checkout: make serve, or pip install -e .)")


def _reason(name: str) -> str:
    try:
        check(importlib.import_module(name))
    except ModuleNotFoundError:
        return "it was not built"
    except ImportError as error:
        return str(error)
    return ""
