"""So many pieces of long work at a time; one that takes very long does not stand before the others for ever.

``count`` are under way at a time, first come, first served. Whoever has been at one step for ``long_seconds`` is not counted any
more, so the next one begins beside it; but no more than ``_BESIDE`` beyond ``count``, because each takes memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from tensord.workers.threads.cancellation import Cancellation

#: So many may be under way beyond the usual number, while as many take very long.
_BESIDE = 3


class Turns:
    """Used by any number of threads."""

    def __init__(self, count: int, long_seconds: float) -> None:
        """``long_seconds``: 0: nobody begins beside one that takes long."""
        self._count = count
        self._long = long_seconds
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        #: Who is under way -> when its present step began (monotonic seconds).
        self._under_way: dict[object, float] = {}

    @contextlib.contextmanager
    def turn(self, cancellation: Cancellation) -> Iterator[Callable[[], None]]:
        """Waits until it is the caller's turn, which lasts as long as the block. Yields what says that a new step begins.

        Raises Cancelled: it was given up meanwhile.
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
                while (seconds := self._until_free()) != 0 or self._waiting[0] is not mine:
                    self._changed.wait(seconds or None)
                    cancellation.check()
                self._under_way[mine] = time.monotonic()
            finally:
                self._waiting.remove(mine)
                self._changed.notify_all()

    def _until_free(self) -> float | None:
        """Seconds until the next one may begin, if nobody ends before that; None: not before somebody ends."""
        if len(self._under_way) < self._count:
            return 0.0
        if not self._long or len(self._under_way) >= self._count + _BESIDE:
            return None
        now = time.monotonic()
        # Those that have been at it longest are the first that do not count.
        began = sorted(self._under_way.values())[len(self._under_way) - self._count]
        return max(0.0, began + self._long - now)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def __repr__(self) -> str:
        return f"<Turns {len(self._under_way)} of {self._count}, {len(self._waiting)} wait>"
