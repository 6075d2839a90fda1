"""Decides whether a process polls for its next record for a short time, or sleeps at once until the record comes.

Waking a process takes tens of microseconds, about as long as a small request. So a process at an end of a lane polls before it
sleeps, if the last record came quickly. Between two polls the process yields the processor. After the process has polled in
vain, it sleeps at once in some later waits.
"""

from __future__ import annotations

import os
from time import monotonic_ns

#: The most waits that would be worth a poll, and sleep after one in vain.
_LONGEST_PAUSE = 63


class Spin:
    """Decides in each wait whether a loop polls before it sleeps, for at most ``limit_ns`` ns. 0 means that it never polls.

    The loop polls only if its last wait was shorter than ``limit_ns``. After polling in vain, the loop sleeps at once in some
    later waits, at most 63 of those that come after a short wait.
    """

    __slots__ = ("_limit_ns", "_pause", "_paused", "_polls", "_since_ns", "_worth")

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = limit_ns
        self._since_ns = 0
        self._worth = False
        #: True: the wait that has begun polls.
        self._polls = False
        #: The waits to sleep in before the next poll, and those that there were since the last one.
        self._pause = self._paused = 0

    def begin(self, now_ns: int, worked_ns: int = 0) -> int:
        """Starts a wait. Returns the time until which the caller should poll for a record, or 0 if the caller should sleep.

        ``now_ns`` and the returned time are CLOCK_MONOTONIC ns. ``worked_ns`` is how long the caller has worked since its last
        wait. If ``worked_ns`` is more than half of the instance's ``limit_ns``, the result is 0.
        """
        self._since_ns = now_ns
        self._polls = False
        if self._worth and 2 * worked_ns <= self._limit_ns:
            self._paused += 1
            self._polls = self._paused > self._pause
        return now_ns + self._limit_ns if self._polls else 0

    @staticmethod
    def give_way() -> int:
        """Yields the processor between two polls. Returns the time afterwards (CLOCK_MONOTONIC ns)."""
        os.sched_yield()
        return monotonic_ns()

    def end(self, now_ns: int) -> None:
        """Ends a wait at the time ``now_ns``. Call it after each wait, even if no record came."""
        self._worth = now_ns - self._since_ns < self._limit_ns
        if self._polls:
            self._polls, self._paused = False, 0
            self._pause = 0 if self._worth else min(2 * self._pause + 1, _LONGEST_PAUSE)

    def __repr__(self) -> str:
        return f"<Spin {self._limit_ns} ns, {'worth' if self._worth else 'not worth'} it>"
