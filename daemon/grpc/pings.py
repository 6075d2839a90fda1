"""PING both ways: a client's, which may be too many, and ours, which find out whether a silent client is still there. Pure.

Source: gRPC's keepalive guide and its proposal A8, "Client-side Keepalive".
"""

from __future__ import annotations

import enum

from tensord.config.options import Grpc
from tensord.daemon.grpc.frames import ENHANCE_YOUR_CALM, Violation


class Sign(enum.Enum):
    """What a look at a connection's silence says."""

    #: Nothing is to be done.
    FINE = "fine"
    #: It has been silent for long: ask it.
    ASK = "ask"
    #: It was asked and did not answer in time.
    DEAD = "dead"


class Pings:
    """Of one connection. Times are the loop's, in seconds."""

    __slots__ = ("_asked_at", "_client_pinged_at", "_options", "_strikes")

    def __init__(self, options: Grpc) -> None:
        self._options = options
        self._strikes = 0
        self._client_pinged_at = 0.0
        #: When our unanswered PING left; 0: none did.
        self._asked_at = 0.0

    def answered(self) -> None:
        """The client answered a PING of ours."""
        self._asked_at = 0.0

    def pinged(self, now: float, busy: bool, answered: bool) -> None:
        """The client sent one.

        Args:
          busy: it has calls under way.
          answered: something of a call was sent since its last one: clients measure the connection with a ping then.
        Raises: Violation: it does so too often.
        """
        options = self._options
        if not answered and not busy and now - self._client_pinged_at < options.min_ping_interval:
            self._strikes += 1
            if options.max_ping_strikes and self._strikes > options.max_ping_strikes:
                raise Violation(ENHANCE_YOUR_CALM, "too_many_pings")
        else:
            self._strikes = 0
        self._client_pinged_at = now

    def look(self, now: float, heard_at: float, busy: bool) -> Sign:
        """About once a second. ``heard_at``: when anything last came from the client."""
        options = self._options
        if self._asked_at:
            if heard_at > self._asked_at:
                self._asked_at = 0.0
            elif now - self._asked_at > options.keepalive_timeout:
                return Sign.DEAD
        elif now - heard_at > options.keepalive_time and (busy or options.keepalive_permit_without_calls):
            self._asked_at = now
            return Sign.ASK
        return Sign.FINE
