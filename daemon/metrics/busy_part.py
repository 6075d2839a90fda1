"""Measures which part of the last seconds workers were running something, for balancers. Pure.

    busy time of all runs so far, looked at again and again ─▶ growth over the last seconds / (seconds * workers)

A run that is under way for longer is not counted before its end, so whoever looks says how many workers have such a one.
"""

from __future__ import annotations

from collections import deque

#: The part is that of about so many ns.
WINDOW_NS = 5 * 10**9


class BusyPart:
    """Keeps the looks of the last seconds. Times are CLOCK_MONOTONIC ns."""

    def __init__(self) -> None:
        #: When it was looked, and the busy time of all workers so far, in ns.
        self._looks: deque[tuple[int, int]] = deque()
        self._workers = self._running = 0

    def look(self, now_ns: int, busy_ns: int, workers: int, running: int = 0) -> None:
        """Notes a look.

        Args:
          busy_ns: what the runs that have ended took, of all workers, ever.
          workers: how many there are.
          running: how many have a run that is longer under way than the window.
        """
        while len(self._looks) > 1 and now_ns - self._looks[1][0] >= WINDOW_NS:
            self._looks.popleft()
        self._looks.append((now_ns, busy_ns))
        self._workers, self._running = workers, running

    @property
    def value(self) -> float:
        """Returns the part, from 0 to 1; 1 where no worker is there."""
        if not self._workers:
            return 1.0
        (began_ns, before_ns), (now_ns, busy_ns) = self._looks[0], self._looks[-1]
        whole = (now_ns - began_ns) * self._workers
        part = max(0, busy_ns - before_ns) / whole if whole else 0.0
        return min(1.0, max(part, self._running / self._workers))

    def __repr__(self) -> str:
        return f"<BusyPart {self.value:.2f} of {self._workers} workers>"
