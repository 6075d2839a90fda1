"""What a connection waits for, since when, and what is too long. Sans-I/O: times are passed in, in monotonic seconds."""

from __future__ import annotations

import enum

from config.options import Http

#: After a refusal the rest of what the client sends is thrown away for that long, so that it can read the answer.
LINGER_SECONDS = 2.0


class Late(enum.Enum):
    """What took too long."""

    #: The client was refused and goes on sending, or does not close.
    LINGER = "linger"
    #: It takes nothing of its answer.
    ANSWER = "answer"
    #: Its request line and headers are not whole.
    HEAD = "head"
    #: Its body is not whole.
    BODY = "body"
    #: It asks nothing.
    IDLE = "idle"


class Deadlines:
    """One connection's. Each time is since when it waits for that; 0: it does not."""

    __slots__ = ("_unsent", "body_since", "head_since", "idle_since", "linger_since", "stalled_since")

    def __init__(self, now: float) -> None:
        self.idle_since = now
        self.head_since = 0.0
        self.body_since = 0.0
        self.stalled_since = 0.0
        self.linger_since = 0.0
        #: What the client had still to take when that was last looked at.
        self._unsent = 0

    def late(self, http: Http, now: float, unsent: int, refused: bool) -> Late | None:
        """The first that took too long.

        Args:
          unsent: bytes of answers that the client has still to take; as long as they change it is taking them.
          refused: nothing more is expected from the client.
        """
        if self.stalled_since and unsent != self._unsent:
            self._unsent, self.stalled_since = unsent, now
        if _over(self.linger_since, LINGER_SECONDS, now):
            return Late.LINGER
        if _over(self.stalled_since, http.write_timeout, now):
            return Late.ANSWER
        if refused:
            return None
        if _over(self.head_since, http.head_timeout, now):
            return Late.HEAD
        if _over(self.body_since, http.body_timeout, now):
            return Late.BODY
        return Late.IDLE if _over(self.idle_since, http.keep_alive_timeout, now) else None


def _over(since: float, limit: float, now: float) -> bool:
    return since > 0 and now - since > limit
