"""Limits how often a process logs lines that every request may cause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: Seconds between two lines about the same failure (``Seldom``).
_SELDOM_SECONDS = 60.0


class Seldom:
    """Limits the log lines about the same failure to one a minute. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: Subject of a failure -> the time (of the clock) from which it may be logged again.
        self._next: dict[str, float] = {}

    def is_due(self, what: str = "") -> bool:
        """Returns whether to log the failure ``what`` now. The result is True at most once a minute for the same text."""
        now = self._clock()
        if now < self._next.get(what, now):
            return False
        self._next = {each: due for each, due in list(self._next.items()) if now < due}
        self._next[what] = now + _SELDOM_SECONDS
        return True


class LineRate:
    """Limits the log lines that clients can cause to ``lines`` a second. Thread-safe."""

    def __init__(self, lines: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Starts with no line counted. ``lines`` is the limit of log lines a second. ``clock`` returns a time in ns."""
        self._most = lines
        self._clock = clock
        self._lock = threading.Lock()
        self._window_ns = self._lines = self._left_out = 0

    def admits(self) -> bool:
        """Counts a line. Returns whether the line may be logged."""
        with self._lock:
            now_ns = self._clock()
            if now_ns - self._window_ns >= 10**9:
                self._window_ns, self._lines = now_ns, 0
            self._lines += 1
            self._left_out += self._lines > self._most
            return self._lines <= self._most

    def take_left_out(self) -> int:
        """Returns for how many lines ``admits`` has returned False since the last call of this method."""
        if not self._left_out:
            return 0  # one that is left out at this moment is counted by the next call
        with self._lock:
            left_out, self._left_out = self._left_out, 0
        return left_out

    def say_left_out(self) -> str:
        """Returns a text for a log line: for how many lines ``admits`` has returned False since the last call of this method.

        If there are no such lines, the text is "".
        """
        left_out = self.take_left_out()
        return f" ({left_out} such lines before it were left out)" if left_out else ""
