"""Tells the time by which clients are late: a process that is stopped for a minute has not been kept waiting by anybody."""

from __future__ import annotations

from time import monotonic

#: The most seconds from one call of ``look`` to the next. A process that runs looks at its clients every second.
MOST_SECONDS = 1.5


class RunningTime:
    """A clock, in seconds, that stands still while its process does not run: stopped, swapped out, or busy with something else.

    Calling the instance returns the time, which never goes back. From one call of ``look`` to the next it goes on by at most
    ``MOST_SECONDS``: the rest is left out, because what clients sent or received then has not been seen.
    """

    __slots__ = ("_left_out", "_until")

    def __init__(self) -> None:
        self._left_out = 0.0
        self._until = monotonic() + MOST_SECONDS

    def look(self) -> float:
        """Returns the time, and lets it go on. Call it once a second."""
        now = self()
        self._until = now + MOST_SECONDS
        return now

    def __call__(self) -> float:
        now = monotonic() - self._left_out
        if now <= self._until:
            return now
        self._left_out += now - self._until
        return self._until
