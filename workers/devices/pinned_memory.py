"""Page-locks host memory, so that the GPU can access tensors in this memory directly.

    segments of arenas   locked from when they are made or mapped until they are closed
    regions              POSIX regions and clients' segments: locked when they are mapped, if all their pages exist

A separate thread locks and unlocks memory, because locking gigabytes takes seconds. If memory is not locked, transfers are
slower. The GPU's driver may access a region in host memory only while it is locked. ``PinnedBudget`` limits the locked bytes.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable

from tensord.shm.arrays import address_of
from tensord.shm.cuda_regions import Context, CudaError
from tensord.shm.segment import Segment
from tensord.workers.threads.work_thread import WorkThread

_log = logging.getLogger(__name__)


class PinnedBudget:
    """Limits how many bytes a GPU worker page-locks: ``workers.pinned_byte_size``. Any thread may use it."""

    def __init__(self, limit: int) -> None:
        """Starts with no bytes locked. ``limit`` is how many bytes may be locked at a time."""
        self.limit = limit
        #: Bytes that are locked now, or about to be.
        self.byte_size = 0
        self._lock = threading.Lock()

    def take(self, byte_size: int) -> bool:
        """Reserves bytes that are about to be locked. Returns False, and reserves none, if the limit does not allow them."""
        with self._lock:
            fits = self.byte_size + byte_size <= self.limit
            self.byte_size += byte_size if fits else 0
        return fits

    def give_back(self, byte_size: int) -> None:
        """Ends the reservation of ``byte_size`` bytes."""
        with self._lock:
            self.byte_size -= byte_size

    def __repr__(self) -> str:
        return f"<PinnedBudget {self.byte_size}/{self.limit} bytes>"


class _PinnedMapping:
    """Host memory that is to be page-locked, or is locked already."""

    __slots__ = ("address", "byte_size", "hold", "locked", "unwanted", "view", "what")

    def __init__(self, view: memoryview, what: str, hold: Callable[[bool], None] | None) -> None:
        self.address = address_of(view)
        self.byte_size = view.nbytes
        self.what = what
        self.hold = hold
        #: Keeps the mapping; used on the loop only.
        self.view = view
        #: True if the driver has it locked; used in the thread only.
        self.locked = False
        #: Set by the loop and read by the thread, which need not begin then.
        self.unwanted = False


class PinnedMemory:
    """Page-locks and unlocks host memory for the GPU of one worker. Only the thread of the worker's loop may use it."""

    def __init__(self, context: Context, budget: PinnedBudget, thread: WorkThread) -> None:
        """Locks nothing yet. ``budget`` limits how much is locked. ``thread`` must do nothing but lock and unlock memory."""
        self._context = context
        #: Memory that is about to be unlocked is given back already: it is unlocked before other memory is locked.
        self._budget = budget
        self._thread = thread
        self._wanted: dict[int, _PinnedMapping] = {}
        #: Reasons that were logged.
        self._logged: set[str] = set()

    def pin(self, view: memoryview, what: str, hold: Callable[[bool], None] | None = None) -> None:
        """Makes another thread page-lock ``view``, and returns at once. ``unpin`` unlocks it. A failure is only logged.

        Args:
          what: names the memory in the log.
          hold: if not None, the thread calls it with True once the memory is locked, and with False before it is unlocked.
        """
        memory, budget = _PinnedMapping(view[:], what, hold), self._budget
        if not budget.take(memory.byte_size):
            bound = "workers.pinned_byte_size"
            self._refuse(
                bound, "%s of %d bytes is not page-locked: %d are, and %s allows %d", what, memory.byte_size, budget.byte_size,
                bound, budget.limit,
            )  # fmt: skip
            return
        self._wanted[memory.address] = memory
        self._thread.do(functools.partial(self._lock, memory), functools.partial(self._tried, memory))

    def unpin(self, view: memoryview) -> None:
        """Makes another thread unlock ``view``. Does nothing if ``pin`` was not called for ``view``.

        The caller may close the memory immediately, because the pages stay mapped until they are unlocked.
        """
        memory = self._wanted.pop(address_of(view), None)
        if memory is None:
            return
        memory.unwanted = True
        self._budget.give_back(memory.byte_size)
        self._thread.do(functools.partial(self._unlock, memory), functools.partial(self._let_go, memory))

    def pin_segment(self, segment: Segment) -> None:
        """Makes another thread page-lock an arena's segment, and returns at once. The segment is unlocked when it is closed."""
        self.pin(segment.view, "an arena's segment")
        segment.before_close = lambda: self.unpin(segment.view)

    def close(self) -> None:
        """Unlocks all memory, and waits until all is unlocked."""
        for memory in list(self._wanted.values()):
            self.unpin(memory.view)
        self._thread.finish()

    # ------------------------------------------------------------------------------------------------ in the thread

    def _lock(self, memory: _PinnedMapping) -> None:
        if not memory.unwanted:
            self._context.pin(memory.address, memory.byte_size)
            memory.locked = True
            if memory.hold is not None:
                memory.hold(True)

    def _unlock(self, memory: _PinnedMapping) -> None:
        if memory.locked:
            # An instance's thread may be copying for a front that is gone: its memory stays mapped, and now locked, as long.
            self._context.check()
            if memory.hold is not None:
                memory.hold(False)
            self._context.unpin(memory.address)

    # --------------------------------------------------------------------------------------------------- on the loop

    def _tried(self, memory: _PinnedMapping, outcome: Exception | None) -> None:
        # The loop finds out by itself that a device is lost.
        if not isinstance(outcome, CudaError):
            return
        self._refuse(outcome.name, "%s of %d bytes is not page-locked: %s", memory.what, memory.byte_size, outcome.name)
        if self._wanted.get(memory.address) is memory:
            del self._wanted[memory.address]
            self._budget.give_back(memory.byte_size)
            memory.view.release()

    def _let_go(self, memory: _PinnedMapping, outcome: Exception | None) -> None:
        if isinstance(outcome, CudaError):
            _log.warning("page-locked memory could not be unlocked: %s", outcome.name)
        memory.view.release()

    def _refuse(self, kind: str, text: str, *arguments: object) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning(text + "; transfers to and from it are slower, and no more is said of this", *arguments)

    def __repr__(self) -> str:
        return f"<PinnedMemory {len(self._wanted)} pieces, {self._budget}>"
