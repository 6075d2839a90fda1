"""Measures whether a client reads too slowly. Sans-I/O: the caller passes times, in seconds, about once a second."""

from __future__ import annotations

#: Seconds for which a client may send as slowly as it likes.
GRACE_SECONDS = 2.0
#: The seconds that a client which sends nothing is waited for while the server stops.
SILENCE_SECONDS = 2.0


class DrainRate:
    """Measures how fast a client receives the bytes that wait for it."""

    __slots__ = ("_left", "_since")

    def __init__(self) -> None:
        #: The time since which the rate is measured, and the bytes that were waiting then.
        self._since = 0.0
        self._left = 0

    def is_slow(self, since: float, left: int, now: float, seconds: float, rate: int) -> bool:
        """Returns True if the client has received at most ``rate * seconds`` bytes in the last ``seconds`` seconds or longer.

        Returns False if no bytes wait for the client, and at the first call while they wait. Call it regularly while bytes wait.
        Args:
          since: the time at which bytes began to wait for the client, in seconds like ``now``. It is 0 if no bytes wait.
          left: a number that falls by one with each byte that the client receives, such as the number of bytes that wait.
        """
        if not since:
            return False
        if since > self._since:
            self._since, self._left = since, left
            return False
        if now - self._since <= seconds:
            return False
        if self._left - left <= rate * seconds:
            return True
        self._since, self._left = now, left
        return False
