"""Finds out which C extensions a worker cannot use, and describes what the worker does without each of these extensions."""

from __future__ import annotations

from tensord.shm import extensions

try:
    from tensord.workers.native import _native

    extensions.check(_native)
except ImportError:  # not built, or not from these sources
    available = False
else:
    available = True

#: Module -> what is so without it.
PARTS = {
    "tensord.shm._guard": "clients' shared memory is copied with system calls (access = snapshot), never mapped",
    "tensord.shm._strings": "strings are decoded and encoded in Python",
    "tensord.workers.native._native": "requests are received and answered in Python, and outputs are copied to their places",
}


def missing() -> tuple[str, ...]:
    """Returns a sentence for each C extension that is missing: what the worker does instead, and how to get it."""
    return extensions.missing(PARTS)
