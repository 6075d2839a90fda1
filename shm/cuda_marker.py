"""A marker in a CUDA stream, by which a process finds out, without waiting, whether the GPU still makes progress."""

from __future__ import annotations

import contextlib

from tensord.shm.cuda_regions import Context, CudaError, DeviceLost


class Marker:
    """A CUDA event that ``set`` records in the calling thread's stream, and that ``reached`` asks about without waiting."""

    def __init__(self, context: Context) -> None:
        """Creates the event. Raises CudaError: the driver refused the call; DeviceLost: the device failed."""
        self._context, self._driver = context, context.driver
        context.enter()
        self._event = context.call(self._driver.cuEventCreate, self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def set(self) -> None:
        """Records the event behind all work that the calling thread has queued.

        Raises CudaError: the driver refused the call; DeviceLost: the device failed.
        """
        self._context.enter()
        self._context.call(self._driver.cuEventRecord, self._event, self._context.stream())

    @property
    def reached(self) -> bool:
        """Returns whether the device has done all work that was queued before the last ``set``.

        Raises: CudaError: the driver refused the call.  DeviceLost: the device failed, in this thread's work or in any other.
        """
        self._context.enter()
        try:
            self._context.call(self._driver.cuEventQuery, self._event)
        except CudaError as error:
            if error.name == "CUDA_ERROR_NOT_READY":
                return False
            raise
        return True

    def close(self) -> None:
        """Destroys the event; call this once."""
        with contextlib.suppress(CudaError, DeviceLost):
            self._context.call(self._driver.cuEventDestroy, self._event)
