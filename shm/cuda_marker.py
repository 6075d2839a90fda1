"""A marker in a CUDA stream, which tells without waiting whether the GPU still makes progress."""

from __future__ import annotations

import contextlib

from tensord.shm.cuda_regions import Context, CudaError, DeviceLost


class Marker:
    """A CUDA event that is recorded in the calling thread's stream and polled."""

    def __init__(self, context: Context) -> None:
        """Creates the event. Raises CudaError, DeviceLost."""
        self._context, self._driver = context, context.driver
        context.enter()
        self._event = context.call(self._driver.cuEventCreate, self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def set(self) -> None:
        """Records the event behind what the calling thread has queued. Raises CudaError, DeviceLost."""
        self._context.enter()
        self._context.call(self._driver.cuEventRecord, self._event, self._context.stream())

    @property
    def reached(self) -> bool:
        """Returns whether the device has passed the event.

        Raises: CudaError; DeviceLost: it failed, be it under somebody else's work.
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
        """Destroys the event; call it once."""
        with contextlib.suppress(CudaError, DeviceLost):
            self._context.call(self._driver.cuEventDestroy, self._event)
