"""A clock for clients' deadlines, which stands still while its process is stopped or too busy to call ``RunningTime.look``."""

from __future__ import annotations

from time import monotonic

#: The most seconds from one call of ``look`` to the next. A process that runs looks at its clients every second.
MOST_SECONDS = 1.5


class RunningTime:
    """A clock, in seconds, that stands still while its process is stopped or too busy to call ``look``.

    Calling the instance returns the time, which never goes back. From one call of ``look`` to the next, the time advances by at
    most ``MOST_SECONDS``.
    """

    __slots__ = ("_left_out", "_until")

    def __init__(self) -> None:
        self._left_out = 0.0
        self._until = monotonic() + MOST_SECONDS

    def look(self) -> float:
        """Returns the time. Call it once a second: ``MOST_SECONDS`` after a call, the clock stops until the next call."""
        now = self()
        self._until = now + MOST_SECONDS
        return now

    def __call__(self) -> float:
        now = monotonic() - self._left_out
        if now <= self._until:
            return now
        self._left_out += now - self._until
        return self._until
