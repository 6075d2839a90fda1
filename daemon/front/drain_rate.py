"""Measures how fast clients receive bytes, so that the server need not wait for slow clients. Sans-I/O."""

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
        """Returns whether the client is too slow. The caller must call this method regularly while bytes wait for the client.

        A client is too slow if it received at most ``rate * seconds`` bytes in a period longer than ``seconds`` seconds.
        Args:
          since: when bytes began to wait for the client, in seconds on the clock of ``now``. 0 means that no bytes wait.
          left: the number of bytes that wait, or minus the number of bytes that the client has received so far.
          now: the present time in seconds.
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
