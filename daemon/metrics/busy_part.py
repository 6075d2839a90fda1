"""Measures for which part of the last seconds workers were running something, for load balancers. Does no I/O.

    busy time of all runs so far, read again and again ─▶ growth over the last seconds / (seconds * workers)

A run is counted when it ends; so the caller also says how many workers have a run that lasts longer than the window.
"""

from __future__ import annotations

from collections import deque

#: The part is that of about so many ns.
WINDOW_NS = 5 * 10**9


class BusyPart:
    """Measures which part of the last seconds workers were running something, from how long their runs took so far.

    Times are CLOCK_MONOTONIC ns.
    """

    def __init__(self) -> None:
        #: When it was looked, and the busy time of all workers so far, in ns.
        self._looks: deque[tuple[int, int]] = deque()
        self._workers = self._running = 0

    def look(self, now_ns: int, busy_ns: int, workers: int, running: int = 0) -> None:
        """Stores how long the workers have run until ``now_ns``; ``value`` compares that with the same a few seconds before.

        Args:
          busy_ns: how long all runs of all workers took that have ended so far.
          workers: how many workers there are.
          running: how many workers have a run that has lasted longer than ``WINDOW_NS``.
        """
        while len(self._looks) > 1 and now_ns - self._looks[1][0] >= WINDOW_NS:
            self._looks.popleft()
        self._looks.append((now_ns, busy_ns))
        self._workers, self._running = workers, running

    @property
    def value(self) -> float:
        """Returns the part of the last seconds in which the workers were busy, from 0 to 1; 1 if there is no worker."""
        if not self._workers:
            return 1.0
        (began_ns, before_ns), (now_ns, busy_ns) = self._looks[0], self._looks[-1]
        whole = (now_ns - began_ns) * self._workers
        part = max(0, busy_ns - before_ns) / whole if whole else 0.0
        return min(1.0, max(part, self._running / self._workers))

    def __repr__(self) -> str:
        return f"<BusyPart {self.value:.2f} of {self._workers} workers>"
