"""What a connection waits for, since when, and what is too long. Sans-I/O: times are passed in, in monotonic seconds."""

from __future__ import annotations

import enum

from tensord.config.options import Http
from tensord.daemon.front.drain_rate import GRACE_SECONDS, SILENCE_SECONDS, DrainRate


class Late(enum.Enum):
    """Names what a connection has taken too long for."""

    #: It takes nothing of its answer.
    ANSWER = "answer"
    #: Its request line and headers are not whole.
    HEAD = "head"
    #: Its body is not whole.
    BODY = "body"
    #: Its body comes too slowly.
    SLOW = "slow"
    #: It asks nothing.
    IDLE = "idle"


class Deadlines:
    """Tracks since when one connection waits for what, in monotonic seconds; 0: it does not wait for that."""

    __slots__ = ("_came", "_pace", "_silent_since", "body_since", "head_since", "idle_since", "stalled_since")

    def __init__(self, now: float) -> None:
        self.idle_since = now
        self.head_since = 0.0
        self.body_since = 0.0
        self.stalled_since = 0.0
        self._pace = DrainRate()
        #: While the server stops: what had come of what is not whole, and since when it is so much.
        self._came, self._silent_since = -1, 0.0

    def stopped(self, now: float, came: int) -> bool:
        """Returns whether an incomplete request has made no progress for too long while the server stops.

        Args:
          came: bytes of it; below 0: nothing is to come.
        """
        if came != self._came:
            self._came, self._silent_since = came, now
        return came >= 0 and now - self._silent_since > SILENCE_SECONDS

    def held_up(self, now: float) -> None:
        """Restarts the deadlines of an incomplete request, because it is the server that does not read."""
        if self.head_since:
            self.head_since = now
        if self.body_since:
            self.body_since = now

    def late(self, http: Http, now: float, unsent: int, received: int, refused: bool) -> Late | None:
        """Returns the first deadline that has passed, or None.

        Args:
          unsent: bytes of answers that the client has still to take.
          received: bytes of the body that is arriving; below 0: none is, or it is not the client who holds it up.
          refused: nothing more is expected from the client.
        """
        if self._pace.is_slow(self.stalled_since, unsent, now, http.write_timeout, http.min_rate):
            return Late.ANSWER
        if refused:
            return None
        if _over(self.head_since, http.head_timeout, now):
            return Late.HEAD
        if _over(self.body_since, http.body_timeout, now):
            return Late.BODY
        if received >= 0 and self.body_since and received < http.min_rate * (now - self.body_since - GRACE_SECONDS):
            return Late.SLOW
        return Late.IDLE if _over(self.idle_since, http.keep_alive_timeout, now) else None


def _over(since: float, limit: float, now: float) -> bool:
    return since > 0 and now - since > limit
