"""Page-locked host memory by which small tensors of a batch cross the bus together: a piece for each thread that runs batches.

in    gathered here ─▶ one transfer into the device's staging buffer
out   one transfer of all outputs ─▶ one wait ─▶ copied out, before the next batch is gathered

A piece is locked when it is first needed, which takes the driver a moment, and stays so: a thread that ends leaves it to the next
one. Where none may be locked (``PinnedBudget``), or the system refuses it, the driver copies by memory of its own, which works as
well.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from tensord.shm.cuda_regions import Context, CudaError, DeviceLost
from tensord.workers.devices.pinned_budget import PinnedBudget

#: Inputs, or outputs, of a batch that are larger in sum go straight from and to where they lie: a copy of them by the host costs
#: more than what a few more calls of the driver do.
TOGETHER = 1 << 18


class HostStaging:
    """One piece. It stays where it is."""

    __slots__ = ("address", "content", "locked")

    def __init__(self) -> None:
        self.content = np.frombuffer(mmap.mmap(-1, TOGETHER), np.uint8)
        self.address: int = self.content.__array_interface__["data"][0]
        self.locked = False

    def __repr__(self) -> str:
        return f"<HostStaging {TOGETHER} bytes locked={self.locked}>"


class StagingPool:
    """Those of a worker, used by several threads."""

    def __init__(self, context: Context, budget: PinnedBudget) -> None:
        self._context = context
        self._budget = budget
        self._free: list[HostStaging] = []
        self._closed = False

    def prepare(self) -> None:
        """Has one piece ready, so that whoever takes it need not wait for the driver. Raises DeviceLost."""
        self._free.append(self._made())

    def take(self) -> HostStaging:
        """A piece for the calling thread. Raises DeviceLost."""
        with contextlib.suppress(IndexError):
            return self._free.pop()
        return self._made()

    def give_back(self, piece: HostStaging) -> None:
        """When nothing that uses it is queued."""
        if self._closed:
            self._let_go(piece)
        else:
            self._free.append(piece)

    def close(self) -> None:
        """Lets go of what is here now, and of what comes back. Idempotent."""
        self._closed = True
        while self._free:
            self._let_go(self._free.pop())

    def _made(self) -> HostStaging:
        made = HostStaging()
        if self._budget.take(TOGETHER):
            try:
                self._context.pin(made.address, TOGETHER)
                made.locked = True
            except CudaError:
                pass  # of what the system refuses the log tells where it matters: arenas and regions
            finally:
                if not made.locked:
                    self._budget.give_back(TOGETHER)
        return made

    def _let_go(self, piece: HostStaging) -> None:
        if piece.locked:
            piece.locked = False
            with contextlib.suppress(CudaError, DeviceLost):
                self._context.unpin(piece.address)
            self._budget.give_back(TOGETHER)

    def __repr__(self) -> str:
        return f"<StagingPool {len(self._free)} free pieces>"
