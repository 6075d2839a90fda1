"""Lets threads do long work one after the other. If a step of the work takes too long, the next thread does not wait for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from tensord.workers.threads.cancellation import Cancellation

#: Jobs that may run beyond the one, while as many take very long.
_BESIDE = 3


class Turns:
    """Lets threads work one at a time, in the order in which they asked.

    If a step of a thread's work takes too long, the next thread may work at the same time. At most four threads do.
    """

    def __init__(self, long_seconds: float) -> None:
        """``long_seconds`` is how long a step of a thread's work may take until the next thread begins. 0 means no limit."""
        self._long = long_seconds
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        #: Running job -> when its present step began (monotonic seconds).
        self._under_way: dict[object, float] = {}

    @contextlib.contextmanager
    def turn(self, cancellation: Cancellation) -> Iterator[Callable[[], None]]:
        """Waits until the calling thread may work. It may work until the end of the ``with`` block.

        Yields a function. The thread must call it when a step of its work begins, because the time of each step is limited.
        Raises Cancelled if ``cancellation`` is cancelled during the wait.
        """
        mine = object()
        self._wait(mine, cancellation)

        def renew() -> None:
            self._under_way[mine] = time.monotonic()

        try:
            yield renew
        finally:
            with self._changed:
                del self._under_way[mine]
                self._changed.notify_all()

    def _wait(self, mine: object, cancellation: Cancellation) -> None:
        with cancellation.interrupting(self._wake), self._changed:
            self._waiting.append(mine)
            try:
                while True:
                    # Before each wait: ``_wake`` may have been called when nobody waited.
                    cancellation.check()
                    seconds = self._until_free()
                    if seconds == 0 and self._waiting[0] is mine:
                        break
                    self._changed.wait(seconds or None)
                self._under_way[mine] = time.monotonic()
            finally:
                self._waiting.remove(mine)
                self._changed.notify_all()

    def _until_free(self) -> float | None:
        if not self._under_way:
            return 0.0
        if not self._long or len(self._under_way) > _BESIDE:
            return None
        now = time.monotonic()
        # Those that have been at it longest are the first that do not count.
        return max(0.0, max(self._under_way.values()) + self._long - now)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def __repr__(self) -> str:
        return f"<Turns {len(self._under_way)} run, {len(self._waiting)} wait>"
