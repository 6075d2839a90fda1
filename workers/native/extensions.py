"""The parts of a worker that are written in C: which of them are missing here, and what is done without them.

Where no compiler was at hand the package installs all the same (``setup.py``). Each module says by ``available`` whether its part
is there; this one says it to the operator, with the reason that the import gives.
"""

from __future__ import annotations

import importlib

#: Module -> what is so without it.
_PARTS = {
    "shm._guard": "clients' shared memory is copied with system calls (access = snapshot), never mapped",
    "workers.native._fast_path": "small requests are received and answered in Python",
    "workers.native._large_copy": "large tensors are copied through the processor's caches",
    "workers.native._output_memory": "outputs are copied to their places",
}


def missing() -> tuple[str, ...]:
    """A sentence for each part that is off; the last one says what to do. Nothing where all are there."""
    found = [f"{what} ({name}: {reason})" for name, what in _PARTS.items() if (reason := _reason(name))]
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
