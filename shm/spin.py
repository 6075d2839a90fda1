"""Decides when a process polls for its next record instead of sleeping.

Waking a process costs tens of microseconds, more in a virtual machine; a small request costs about as much. So both ends of a
lane look for the next record for a moment before they sleep, but only while records have lately followed each other within that
moment, and they give the processor away between looks. An idle end, and one whose peer takes its time, sleeps at once.

The C part of a worker's loop asks it too, once for each wait (``workers/native/_fast_path.c``).
"""

from __future__ import annotations

import os
from time import monotonic_ns


class Spin:
    """Decides whether to poll, from the times it is given. ``limit_ns`` 0: never."""

    __slots__ = ("_limit_ns", "_since_ns", "_worth")

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = limit_ns
        self._since_ns = 0
        self._worth = False

    def begin(self, now_ns: int, worked_ns: int = 0) -> int:
        """Begins the wait for the next record. Returns until when to poll for it; 0: sleep at once.

        ``worked_ns``: time spent on work since the last record. Beside much work a wake-up costs little, and whoever has sent
        much, or reads it, wants the processor.
        """
        self._since_ns = now_ns
        return now_ns + self._limit_ns if self._worth and 2 * worked_ns <= self._limit_ns else 0

    @staticmethod
    def give_way() -> int:
        """Yields the processor between two polls. Returns the time afterwards."""
        os.sched_yield()
        return monotonic_ns()

    def end(self, now_ns: int) -> None:
        """Ends a wait, with a record or without: the next one learns from its length."""
        self._worth = now_ns - self._since_ns < self._limit_ns

    def __repr__(self) -> str:
        return f"<Spin {self._limit_ns} ns, {'worth' if self._worth else 'not worth'} it>"
