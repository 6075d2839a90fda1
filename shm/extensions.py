"""C extensions of the package: which of them are missing or stale in this process, and what it does without them.

Where no compiler was at hand the package installs all the same (``setup.py``). Each module says by ``available``, or by what it
offers, whether its part is there; this one says it to the operator, with the reason that the import gives.

    setup.py ─▶ SOURCES: names of the sources, and a hash of them, compiled into the module ─▶ check, where it is imported

A checkout that was updated and not built again would otherwise run C code that takes other records than Python's: it answers
slowly, or wrongly. Such a part counts as missing.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

#: The reason for not using an extension that exists.
STALE = "it was built from other sources than those that lie beside it"


def sources(files: Sequence[Path]) -> str:
    """Returns the names of source files and a hash of their contents, as they are compiled into the extension built from them."""
    found = hashlib.sha256(b"\0".join(file.read_bytes() for file in files))
    return " ".join([*(file.name for file in files), found.hexdigest()])


def check(module: ModuleType) -> None:
    """Raises ImportError if the module was not built from the sources beside it. (No sources lie beside an installed one.)"""
    assert module.__file__ is not None
    folder, built = Path(module.__file__).parent, getattr(module, "SOURCES", "")
    files = [folder / name for name in built.split()[:-1]]
    if not built or (any(file.exists() for file in files) and not _are(files, built)):
        raise ImportError(STALE)


def _are(files: Sequence[Path], built: str) -> bool:
    return all(file.exists() for file in files) and sources(files) == built


def missing(parts: Mapping[str, str]) -> tuple[str, ...]:
    """Returns a sentence for each extension that cannot be used, and one of advice; nothing where all can be used.

    ``parts``: module -> what the process does without it.
    """
    found = [f"{what} ({name}: {reason})" for name, what in parts.items() if (reason := _reason(name))]
    if not found:
        return ()
    advice = "to build them, install a C compiler and Python's headers, then install tensord again"
    return (*found, f"{advice} (in a checkout: make serve, or pip install -e .)")


def _reason(name: str) -> str:
    """Returns why that module cannot be used; "" if it can."""
    try:
        check(importlib.import_module(name))
    except ModuleNotFoundError:
        return "it was not built"
    except ImportError as error:
        return str(error)
    return ""
