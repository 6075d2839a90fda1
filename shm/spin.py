"""When it pays to look again instead of sleeping.

Waking a process costs tens of microseconds, more in a virtual machine; a small request costs about as much. So both ends of a
lane look for the next record for a moment before they sleep, but only while records have lately followed each other within that
moment, and they give the processor away between looks. An idle end, and one whose peer takes its time, sleeps at once.

The C part of a worker's loop asks it too, once for each wait (``workers/native/_fast_path.c``).
"""

from __future__ import annotations

import os
from time import monotonic_ns


class Spin:
    """Decides: it is told the time. ``limit_ns`` 0: never."""

    __slots__ = ("_limit_ns", "_since_ns", "_worth")

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = limit_ns
        self._since_ns = 0
        self._worth = False

    def begin(self, now_ns: int, worked_ns: int = 0) -> int:
        """The wait for the next record begins. Returns until when to look for it; 0: sleep.

        ``worked_ns``: how long was worked since the last one. Beside much work a wake-up is little, and whoever has sent much, or
        reads it, wants the processor.
        """
        self._since_ns = now_ns
        return now_ns + self._limit_ns if self._worth and 2 * worked_ns <= self._limit_ns else 0

    @staticmethod
    def give_way() -> int:
        """Gives the processor away between two looks. Returns what time it is then."""
        os.sched_yield()
        return monotonic_ns()

    def end(self, now_ns: int) -> None:
        """A record came, or the time was up without one: the next wait learns from this one."""
        self._worth = now_ns - self._since_ns < self._limit_ns

    def __repr__(self) -> str:
        return f"<Spin {self._limit_ns} ns, {'worth' if self._worth else 'not worth'} it>"
