"""Checks regularly whether an idle worker's GPU still works, so that a failure is found before a request needs the GPU.

A thread makes the worker's event loop call ``IdleLook.look`` at intervals. While the worker is busy, this call does nothing.
If the GPU has failed, or does not answer in time, the call raises DeviceLost, and the worker ends and is replaced.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from tensord.shm.cuda_regions import Context, CudaError, DeviceLost

#: Seconds between two looks.
INTERVAL = 1.0


class Marker:
    """A CUDA event, by which a thread finds out whether the GPU has done the work that the thread has queued."""

    def __init__(self, context: Context) -> None:
        """Creates a CUDA event in ``context``. Raises CudaError if the driver refuses, and DeviceLost if the GPU failed."""
        self._context, self._driver = context, context.driver
        context.enter()
        self._event = context.call(self._driver.cuEventCreate, self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def set(self) -> None:
        """Records the event after all work that the calling thread has queued.

        Raises CudaError: the driver returned an error. Raises DeviceLost: the GPU has failed.
        """
        self._context.enter()
        self._context.call(self._driver.cuEventRecord, self._event, self._context.stream())

    @property
    def reached(self) -> bool:
        """Returns whether the GPU has done all work that was queued before the last call of ``set``.

        Raises DeviceLost if some of the work failed.
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
        """Destroys the CUDA event. Call it only once."""
        with contextlib.suppress(CudaError, DeviceLost):
            self._context.call(self._driver.cuEventDestroy, self._event)


class IdleLook:
    """Checks at intervals whether an idle worker's GPU still works."""

    def __init__(
        self,
        context: Context,
        idle: Callable[[], bool],
        post: Callable[[Callable[[], None]], None],
        patience: float,
        interval: float = INTERVAL,
    ) -> None:
        """Starts to check the GPU of ``context`` at intervals. Raises DeviceLost if the GPU has failed already.

        Args:
          idle: returns True if the worker is idle. The GPU is checked only then.
          post: makes the worker's event loop call a function. Any thread may call ``post``.
          patience: seconds after which a GPU that has not answered a check counts as failed. 0: no limit.
          interval: seconds between two checks.
        """
        self._idle, self._post, self._patience_ns = idle, post, int(patience * 1e9)
        try:
            self._marker = Marker(context)
        except CudaError as error:
            raise _lost(error) from error
        self._interval = interval
        #: When the current mark was set; 0: there is none.
        self._since_ns = 0
        #: True if a look was posted to the loop and is not done.
        self._asked = False
        self._ends = threading.Event()
        threading.Thread(target=self._keep_time, name="idle look", daemon=True).start()

    def _keep_time(self) -> None:
        while not self._ends.wait(self._interval):
            if not self._asked:
                self._asked = True
                self._post(self.look)

    def look(self) -> None:
        """Checks the GPU if the worker is idle. Raises DeviceLost if the GPU has failed or does not answer in time."""
        self._asked = False
        if self._ends.is_set() or not self._idle():
            self._since_ns = 0
            return
        now_ns = time.monotonic_ns()
        try:
            if not self._since_ns or self._marker.reached:
                self._since_ns = now_ns
                self._marker.set()
        except CudaError as error:
            raise _lost(error) from error
        if self._patience_ns and now_ns - self._since_ns > self._patience_ns:
            raise DeviceLost(
                f"the GPU failed: it has done nothing for {self._patience_ns / 1e9:g} s, not even told the time"
            )

    def close(self) -> None:
        """Stops checking the GPU. A second call does nothing."""
        if not self._ends.is_set():
            self._ends.set()
            self._marker.close()

    def __repr__(self) -> str:
        return f"<IdleLook waits={bool(self._since_ns)}>"


def _lost(error: CudaError) -> DeviceLost:
    # Errors that pass have no place in calls like these.
    return DeviceLost(f"the GPU failed ({error.name}), though nobody asked it anything")
