"""Gives threads page-locked buffers in host memory, through which small tensors are copied to and from a GPU.

One transfer copies all inputs in a buffer to the GPU. Outputs are copied in one transfer if the program has packed them
(``packed_outputs.py``), otherwise one by one.
Each thread that runs programs on the GPU has a buffer of its own. When the thread ends, another thread may get this buffer.
A buffer is page-locked when it is created, unless the driver refuses this or ``PinnedBudget`` allows no more locked bytes.
Transfers also work with a buffer that is not page-locked, but they are slower.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from tensord.shm.cuda_regions import Context, CudaError, DeviceLost
from tensord.workers.devices.pinned_memory import PinnedBudget

#: Bytes of a piece. Inputs or outputs that are larger in sum are transferred one by one: a copy by the host would cost more than
#: a few more calls of the driver.
TOGETHER = 1 << 18


class HostStaging:
    """A buffer in host memory for copies of small tensors to and from a GPU, page-locked if possible."""

    __slots__ = ("address", "content", "locked")

    def __init__(self) -> None:
        self.content = np.frombuffer(mmap.mmap(-1, TOGETHER), np.uint8)
        self.address: int = self.content.__array_interface__["data"][0]
        self.locked = False

    def __repr__(self) -> str:
        return f"<HostStaging {TOGETHER} bytes locked={self.locked}>"


class StagingPool:
    """Gives each thread of a worker a buffer in host memory for small tensors on their way to or from a GPU."""

    def __init__(self, context: Context, budget: PinnedBudget) -> None:
        self._context = context
        self._budget = budget
        self._free: list[HostStaging] = []
        self._closed = False

    def prepare(self) -> None:
        """Adds a page-locked buffer to the pool, so that the first call of ``take`` need not wait for one."""
        self._free.append(self._made())

    def take(self) -> HostStaging:
        """Returns a buffer that no other thread gets until the caller gives it back. Raises DeviceLost if the GPU failed."""
        with contextlib.suppress(IndexError):
            return self._free.pop()
        return self._made()

    def give_back(self, piece: HostStaging) -> None:
        """Returns a thread's buffer to the pool. No queued copy may still use the buffer."""
        if self._closed:
            self._let_go(piece)
        else:
            self._free.append(piece)

    def close(self) -> None:
        """Unlocks the pool's page-locked memory. A buffer that a thread still uses is unlocked when the thread returns it."""
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
                pass  # a refusal is logged where it matters: for arenas and regions
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
