"""Decides when an HTTP connection has waited too long for its client. Sans-I/O: times are passed in, in seconds."""

from __future__ import annotations

import enum

from tensord.config.options import Http
from tensord.daemon.front.drain_rate import GRACE_SECONDS, SILENCE_SECONDS, DrainRate


class Late(enum.Enum):
    """Names the deadline that the client of an HTTP connection has missed."""

    #: The client does not read its answer.
    ANSWER = "answer"
    #: The request line and headers are not complete.
    HEAD = "head"
    #: The body is not complete.
    BODY = "body"
    #: The body comes too slowly.
    SLOW = "slow"
    #: The client sends no request.
    IDLE = "idle"


class ClientDeadlines:
    """Notes when a connection began to wait for its client, and finds the deadlines that the client has missed.

    Each attribute is the time at which a wait began, or 0 if the connection is not in this wait. Times are in seconds of the
    front's clock. ``idle_since``: the wait for the next request. ``head_since``: the wait for the rest of a request's head.
    ``body_since``: the wait for the rest of a request's body. ``stalled_since``: the wait until the client reads answers.
    The argument ``now`` is the time at which the wait for the first request begins.
    """

    __slots__ = ("_came", "_pace", "_silent_since", "body_since", "head_since", "idle_since", "stalled_since")

    def __init__(self, now: float) -> None:
        self.idle_since = now
        self.head_since = 0.0
        self.body_since = 0.0
        self.stalled_since = 0.0
        self._pace = DrainRate()
        #: While the server stops: the received bytes of an incomplete request, and since when their number has not changed.
        self._came, self._silent_since = -1, 0.0

    def stopped(self, now: float, came: int) -> bool:
        """Returns whether a client has stopped sending its request: no byte came for more than ``SILENCE_SECONDS``.

        Call this method repeatedly while the request arrives. ``came``: how many bytes of the request have arrived so far.
        A negative number means that no request is arriving. Then the result is False.
        """
        if came != self._came:
            self._came, self._silent_since = came, now
        return came >= 0 and now - self._silent_since > SILENCE_SECONDS

    def held_up(self, now: float, since: float = 0.0) -> None:
        """Postpones the deadlines of the arriving head and body, because the server delayed it from ``since`` to ``now``.

        If ``since`` is 0, the deadlines begin anew at ``now``.
        """
        if self.head_since:
            self.head_since += now - max(since, self.head_since)
        if self.body_since:
            self.body_since += now - max(since, self.body_since)

    def late(self, http: Http, now: float, unsent: int, received: int, refused: bool) -> Late | None:
        """Returns the deadline that the client has missed, or None if it has missed none.

        Args:
          http: the options that have the time limits.
          now: seconds of the front's clock.
          unsent: how many bytes of answers the client has not read yet.
          received: how many bytes of the request's body have arrived, or -1 if the client is not expected to send a body now.
          refused: whether the server has refused the client's request. Then only reading the answer has a deadline.
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
