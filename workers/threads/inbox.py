"""Lets other threads call functions in the worker's loop. An eventfd wakes the loop, which calls the functions in order."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable


class Inbox:
    """A queue of functions for the worker's loop. Any thread adds functions (``post``), and the loop calls them (``drain``)."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        #: True if the loop was woken, and has not looked since.
        self._woken = False
        #: True if the loop is about to look by itself.
        self._looks = False
        #: Held while a thread wakes the loop, so that it is not closed meanwhile.
        self._waking = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def post(self, call: Callable[[], None], soon: bool = True) -> None:
        """Queues a function, which the worker's event loop calls in its own thread. Wakes the event loop if it sleeps.

        If ``soon`` is False, does not wake an event loop that promised, by ``look(True)``, to call queued functions unasked.
        """
        self._calls.append(call)
        # Who drains says so before it looks.
        if self._fd >= 0 and not self._woken and (soon or not self._looks):
            self._woken = True
            with self._waking:
                # It may have been closed a moment ago, and its number be another file's.
                if self._fd >= 0:
                    os.eventfd_write(self._fd, 1)

    def look(self, comes: bool) -> bool:
        """Stores whether the worker's loop will soon call ``run`` by itself (``comes``), so that ``post`` need not wake it.

        Returns True if the loop must call ``run`` now: ``comes`` is False, and functions are in the queue.
        """
        self._looks = comes
        # Who posts reads ``_looks`` after it has queued its call: either the call is found here, or it wakes the loop.
        return bool(self._calls) and not comes

    def drain(self) -> None:
        """Resets the inbox's eventfd, and calls the functions that were queued so far."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        self._woken = False
        self.run()

    def run(self) -> None:
        """Calls the functions that were queued so far. Unlike ``drain``, does not reset the inbox's eventfd."""
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def close(self) -> None:
        """Closes the eventfd. From then on, ``post`` wakes nobody. May be called again."""
        with self._waking:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
