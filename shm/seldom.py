"""Limits how often a failure is logged that may come with every request."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds between two lines about the same failure (``Seldom``).
_SELDOM_SECONDS = 60.0


class Seldom:
    """Limits log lines about a failure, which may come with every request, to one a minute. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: Subject of a failure -> the time (of the clock) from which it may be logged again.
        self._next: dict[str, float] = {}

    def is_due(self, what: str = "") -> bool:
        """Returns whether to log the failure ``what`` now: True at most once a minute for the same text."""
        now = self._clock()
        if now < self._next.get(what, now):
            return False
        self._next = {each: due for each, due in list(self._next.items()) if now < due}
        self._next[what] = now + _SELDOM_SECONDS
        return True
