"""Page-locked host memory of one thread, by which the small tensors of a batch cross the bus together.

in    gathered here ─▶ one transfer into the device's staging buffer
out   one queued transfer for each output ─▶ one wait ─▶ copied out, before the next batch is read
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from shm.cuda_regions import Context, CudaError, DeviceLost

#: Inputs, or outputs, of a batch that are larger in sum go straight from and to where they lie: a copy of them by the host costs
#: more than what a few more calls of the driver do.
TOGETHER = 1 << 18


class HostStaging:
    """Made with the first batch. Its memory stays where it is."""

    __slots__ = ("_context", "_locked", "address", "content")

    def __init__(self, context: Context) -> None:
        """Raises DeviceLost."""
        self._context = context
        self.content = np.frombuffer(mmap.mmap(-1, TOGETHER), np.uint8)
        self.address: int = self.content.__array_interface__["data"][0]
        self._locked = False
        # Otherwise the driver copies it by memory of its own, which works as well.
        with contextlib.suppress(CudaError):
            context.pin(self.address, TOGETHER)
            self._locked = True

    def close(self) -> None:
        """When nothing that uses it is queued. Idempotent."""
        if self._locked:
            self._locked = False
            with contextlib.suppress(CudaError, DeviceLost):
                self._context.unpin(self.address)

    def __repr__(self) -> str:
        return f"<HostStaging {TOGETHER} bytes locked={self._locked}>"
