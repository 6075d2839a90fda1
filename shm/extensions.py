"""Parts that are written in C: which of a process's own are missing, and what it does without them.

Where no compiler was at hand the package installs all the same (``setup.py``). Each module says by ``available``, or by what it
offers, whether its part is there; this one says it to the operator, with the reason that the import gives.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping


def missing(parts: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for each part that is off; the last one says what to do. Nothing where all are there.

    ``parts``: module -> what is so without it.
    """
    found = [f"{what} ({name}: {reason})" for name, what in parts.items() if (reason := _reason(name))]
    if not found:
        return ()
    return (*found, "install a C compiler and Python's headers, then install tensord again")


def _reason(name: str) -> str:
    """Why that module cannot be imported; "": it can."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return "it was not built"
    except ImportError as error:
        return str(error)
    return ""
