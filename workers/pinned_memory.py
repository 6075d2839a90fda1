"""Host memory that the GPU reaches by itself: locked once, so that what travels to and from it is a transfer and nothing else.

    arenas           each segment when it is made or opened, until it is closed
    system regions   when they are registered, if their pages exist: locking a sparse object would allocate what nobody asked for

Bounded by ``workers.pinned_byte_size`` and by what the process may lock (RLIMIT_MEMLOCK). Memory that is not locked works as
well: the driver copies it through its own. If a client truncates an object whose pages are locked, the GPU goes on seeing the old
pages, and the fault guard sees the rest.
"""

from __future__ import annotations

import logging
import resource

import numpy as np

from shm.cuda_regions import Context, CudaError
from shm.segment import Segment

_log = logging.getLogger(__name__)


class PinnedMemory:
    """One per GPU worker; belongs to its loop."""

    def __init__(self, context: Context, byte_size: int) -> None:
        """``byte_size``: the most that is locked at a time."""
        self._context = context
        allowed, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        self._limit = byte_size if allowed == resource.RLIM_INFINITY else min(byte_size, allowed)
        self._bound = "workers.pinned_byte_size" if self._limit == byte_size else "RLIMIT_MEMLOCK"
        #: Address -> byte size.
        self._locked: dict[int, int] = {}
        self._told: set[str] = set()

    @property
    def byte_size(self) -> int:
        """What is locked now."""
        return sum(self._locked.values())

    def pin(self, view: memoryview, what: str) -> bool:
        """Locks memory that stays mapped until ``unpin``. False: it stays as it is; the log says why, once a kind of reason.

        Raises: DeviceLost.
        """
        address, byte_size = _address(view), view.nbytes
        if self.byte_size + byte_size > self._limit:
            return self._refuse(
                self._bound, "%s of %d bytes is not page-locked: %d are, and %s allows %d", what, byte_size, self.byte_size,
                self._bound, self._limit,
            )  # fmt: skip
        try:
            self._context.pin(address, byte_size, writable=not view.readonly)
        except CudaError as error:
            return self._refuse(error.name, "%s of %d bytes is not page-locked: %s", what, byte_size, error.name)
        self._locked[address] = byte_size
        return True

    def unpin(self, view: memoryview) -> None:
        """Before it is unmapped; memory that was not locked is no error. Raises DeviceLost."""
        address = _address(view)
        if self._locked.pop(address, None) is None:
            return
        try:
            self._context.unpin(address)
        except CudaError as error:
            _log.warning("page-locked memory could not be unlocked: %s", error.name)

    def pin_segment(self, segment: Segment) -> None:
        """Locks a segment of an arena until it is closed."""
        if self.pin(segment.view, "an arena's segment"):
            segment.before_close = lambda: self.unpin(segment.view)

    def _refuse(self, kind: str, text: str, *arguments: object) -> bool:
        if kind not in self._told:
            self._told.add(kind)
            _log.warning(text + "; transfers to and from it are slower, and no more is said of this", *arguments)
        return False

    def __repr__(self) -> str:
        return f"<PinnedMemory {self.byte_size}/{self._limit} bytes>"


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
