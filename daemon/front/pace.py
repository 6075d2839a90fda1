"""Whether a client takes what waits for it, looked at about once a second. Sans-I/O: times come in, in monotonic seconds."""

from __future__ import annotations

#: What a client sends may come as slowly as it likes for that long.
GRACE_SECONDS = 2.0
#: While the server stops, whoever does not go on with what it sends is waited for that long.
SILENCE_SECONDS = 2.0


class Pace:
    """Of what waits for one client. Times and bytes begin anew whenever enough of it was taken."""

    __slots__ = ("_left", "_since")

    def __init__(self) -> None:
        #: Since when it is looked at, and what was to be taken then.
        self._since = 0.0
        self._left = 0

    def is_slow(self, since: float, left: int, now: float, seconds: float, rate: int) -> bool:
        """Whether less than ``rate`` bytes a second were taken for ``seconds``.

        Args:
          since: when the wait began; 0: nothing waits.
          left: bytes still to be taken; only differences count.
        """
        if not since:
            return False
        if since > self._since:
            self._since, self._left = since, left
        if now - self._since <= seconds:
            return False
        if self._left - left <= rate * seconds:
            return True
        self._since, self._left = now, left
        return False
