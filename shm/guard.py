"""Keeps a worker alive when a client truncates a shared-memory object that the worker has mapped.

Each ``Guarded`` protects one mapping. Code that reads or writes a mapping compares ``faults`` before and after. If the number
has changed, some bytes were read as zeros or not written, and the result is not valid. The handler of SIGBUS is in
``shm/_guard.c``. If this C extension is missing, ``available`` is False and an access to a missing page kills the process.

A GPU's driver may fail for good if pages are missing. It may therefore use a ``Guarded`` mapping only while the pages are
locked, and gets a copy otherwise (``may_be_missing``).
"""

from __future__ import annotations

from tensord.shm.extensions import check

try:
    from tensord.shm import _guard

    check(_guard)
except ImportError:  # not built, or not from these sources
    available = False
else:
    available = True


def any_faults() -> bool:
    """Returns whether this process has used a ``Guarded`` mapping whose file a client had made too short."""
    return available and _guard.any()


def may_be_missing(address: int) -> bool:
    """Returns whether the page at ``address`` can vanish because a client truncates a file that this process has mapped.

    This is so if the page is in a ``Guarded`` mapping and is not page-locked.
    """
    return available and _guard.may_be_missing(address)


def install() -> None:
    """Installs this process's handler of SIGBUS, the signal for a missing page. Idempotent.

    Without the C extension, it does nothing.
    """
    if available:
        _guard.install()


class Guarded:
    """Keeps this process alive if pages of a client's mapping are missing, until ``release``. Call ``install`` before.

    A read of a missing page gives zeros, and a write to one has no effect. ``faults`` counts both.
    """

    __slots__ = ("_slot",)

    def __init__(self, mapping: memoryview) -> None:
        self._slot: int | None = _guard.add(mapping)

    @property
    def faults(self) -> int:
        """Returns how often a missing page of the mapping was read or written. It is 0 after ``release``."""
        return 0 if self._slot is None else _guard.faults(self._slot)

    def hold(self, held: bool) -> None:
        """Stores whether a GPU's driver has page-locked the memory. Call it with False before the driver unlocks the memory.

        Any thread may call it.
        """
        if self._slot is not None:
            _guard.hold(self._slot, held)

    def release(self) -> None:
        """Ends the protection against clients that truncate the mapped file. Do not use the mapping afterwards. Idempotent."""
        slot, self._slot = self._slot, None
        if slot is not None:
            _guard.remove(slot)
