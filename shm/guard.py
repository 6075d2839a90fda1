"""The guard of client memory keeps a worker alive when a client truncates a region that is mapped here.

``Guarded`` wraps one mapping. Whoever reads or writes it takes ``faults`` before and compares after: a difference means that
some of what was read were zeros and some of what was written went nowhere, so the result is void. The handler is in
``shm/_guard.c``, built with the package; where it could not be built ``available`` is False and a fault stays fatal.

It helps whoever touches memory by a processor. A device's driver that is handed such memory may fail for good where pages are
missing: it is handed only what it has locked before, and copies of the rest (``may_be_missing``).
"""

from __future__ import annotations

import mmap

from tensord.shm.extensions import check

try:
    from tensord.shm import _guard

    check(_guard)
except ImportError:  # not built, or not from these sources
    available = False
else:
    available = True


def any_faults() -> bool:
    """Returns whether a page of any guarded mapping was missing: one cheap question for all of them."""
    return available and _guard.any()


def may_be_missing(address: int) -> bool:
    """Returns whether that memory is guarded and no driver has locked its pages."""
    return available and _guard.may_be_missing(address)


def install() -> None:
    """Installs the signal handler in this process, before the first region is mapped. A no-op where the extension is missing."""
    if available:
        _guard.install()


class Guarded:
    """Guards one mapping until ``release``."""

    __slots__ = ("_slot",)

    def __init__(self, mapping: mmap.mmap) -> None:
        self._slot: int | None = _guard.add(mapping)

    @property
    def faults(self) -> int:
        """Counts how often a page of the mapping was missing so far."""
        return 0 if self._slot is None else _guard.faults(self._slot)

    def hold(self, held: bool) -> None:
        """Notes that a driver has locked the mapping's pages, or is about to unlock them. For any thread."""
        if self._slot is not None:
            _guard.hold(self._slot, held)

    def release(self) -> None:
        """Ends the guard, once nobody touches the memory any more. Idempotent."""
        slot, self._slot = self._slot, None
        if slot is not None:
            _guard.remove(slot)
