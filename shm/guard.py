"""Keeps a worker alive when a client truncates a shared-memory object that the worker has mapped.

Each ``Guarded`` protects one mapping. Code that has read or written a mapping looks at ``faults``. If it is not 0, some bytes
were read as zeros or not written, and the result is not valid. The handler of SIGBUS is in ``shm/_guard.c``. If this C
extension is missing, ``available`` is False and an access to a missing page kills the process.

A GPU's driver may fail for good if it reads or writes a missing page. If ``may_be_missing`` returns True for some memory, the
driver must use a copy of the memory.
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
    """Returns whether this process has used a missing page of a ``Guarded`` mapping that is not released yet."""
    return available and _guard.any()


def may_be_missing(address: int) -> bool:
    """Returns whether a client can take away the memory at ``address``, by truncating a file that is mapped there.

    Returns False for memory that no ``Guarded`` of this module protects, and for memory that a GPU's driver has page-locked.
    """
    return available and _guard.may_be_missing(address)


def install() -> None:
    """Installs the SIGBUS handler that every ``Guarded`` needs. Idempotent. Does nothing if the C extension is missing."""
    if available:
        _guard.install()


class Guarded:
    """Protects this process from SIGBUS when it uses a mapped file that a client has truncated, until ``release`` is called.

    When a missing page is read or written, the mapping gets zeros from this page to its end, and what is written there no
    longer reaches the file. Call ``guard.install`` first. Protects from nothing if the C extension is missing.
    """

    __slots__ = ("_slot",)

    def __init__(self, mapping: memoryview) -> None:
        self._slot: int | None = _guard.add(mapping) if available else None

    @property
    def faults(self) -> int:
        """Returns how often a missing page of the mapping was read or written. It is 0 after ``release``."""
        return 0 if self._slot is None else _guard.faults(self._slot)

    def hold(self, held: bool) -> None:
        """Records whether a GPU's driver has page-locked the protected mapping. Any thread may call this method.

        Call it with True after the driver locks the pages, and with False before the driver unlocks the pages.
        """
        if self._slot is not None:
            _guard.hold(self._slot, held)

    def release(self) -> None:
        """Ends the protection against clients that truncate the mapped file. Do not use the mapping afterwards. Idempotent."""
        slot, self._slot = self._slot, None
        if slot is not None:
            _guard.remove(slot)
