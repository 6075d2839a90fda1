"""Limits how many frames, pings and stream resets one client connection may send. Does no I/O.

    frames          a fixed number a second, more for each answer to the client, and more for the bytes of requests and answers
    stream resets   a fixed number a second, and one more for each answer to the client
    pings           ``max_ping_strikes`` in a row that come too early: less than ``min_ping_interval`` after the last ping,
                    while no call is open, and with no answer sent since the last ping

A client that sends frames of unknown types, PRIORITY, SETTINGS, PING, empty DATA or window updates without end exceeds a limit.
Source: RFC 9113, section 10.5; Envoy's limits (max_inbound_priority_frames_per_stream and its neighbours).
For pings: gRPC's proposal A8, "Client-side Keepalive".
"""

from __future__ import annotations

from tensord.config.options import Grpc
from tensord.daemon.grpc.frames import ENHANCE_YOUR_CALM, Violation

#: Frames of a connection that are looked at in one turn of the loop: many calls' worth, and well below a millisecond's if empty.
FRAMES_A_TURN = 256
#: The cost of beginning a call, in such frames: two dozen calls of a connection that sends many at once are begun in a turn.
CALL_COST = 8
#: Bytes of a header block that cost as much as a frame.
HEADER_BYTES_A_FRAME = 16

#: Credit, in frames: to begin with, each second, for each answer, for how many bytes of DATA one, and at most.
_FRAMES_AT_FIRST = 10_000
_FRAMES_A_SECOND = 1_000
_FRAMES_AN_ANSWER = 32
_BYTES_A_FRAME = 256
_MAX_FRAMES = 100_000
#: Credit in resets: to begin with, each second, and at most.
_RESETS_AT_FIRST = 1_000
_RESETS_A_SECOND = 200
_MAX_RESETS = 10_000


class Floods:
    """Limits how many frames, resets and pings one client connection may send.

    Its methods raise ``Violation`` if the client exceeds a limit.
    """

    __slots__ = ("_answers_at_ping", "_frames_given", "_options", "_pinged_at", "_resets", "_resets_given", "_strikes")

    def __init__(self, options: Grpc) -> None:
        self._options = options
        self._frames_given = _FRAMES_AT_FIRST
        self._resets_given = _RESETS_AT_FIRST
        self._resets = 0
        #: Pings that came too early, one after the other; when the last ping came, and what had been answered then.
        self._strikes = 0
        self._pinged_at = 0.0
        self._answers_at_ping = 0

    def second(self, seconds: float) -> None:
        """Lets the client send more frames and stream resets: as many as it may send in ``seconds`` seconds."""
        self._frames_given += int(_FRAMES_A_SECOND * seconds)
        self._resets_given += int(_RESETS_A_SECOND * seconds)

    def look(self, frames: int, answers: int, byte_size: int) -> None:
        """Checks how many frames the client has sent. All arguments are totals since the connection began.

        Args:
          frames: the number of frames that the client has sent. Each setting in a SETTINGS frame counts as one frame more.
          answers: the number of messages that the server has sent to the client, plus the number of calls that it has ended.
          byte_size: the number of bytes of received DATA frames, plus the number of bytes of large answers.
        Raises Violation if ``frames`` exceeds a limit. This limit grows with time, with ``answers`` and with ``byte_size``.
        """
        left = self._frames_given + answers * _FRAMES_AN_ANSWER + byte_size // _BYTES_A_FRAME - frames
        if left < 0:
            raise Violation(ENHANCE_YOUR_CALM, f"{frames} frames came, which asked for {answers} answers")
        # What an eager client has earned does not let it do as it likes for hours.
        self._frames_given -= max(0, left - _MAX_FRAMES)

    def reset(self, answers: int) -> None:
        """Counts one stream reset by the client. Raises Violation if the client has sent more stream resets than are allowed.

        A fixed number is allowed at first, a fixed number more each second, and one more for each answer to the client.
        ``answers``: the number of answers to the client since the connection began, counted as for ``look``.
        """
        self._resets += 1
        left = self._resets_given + answers - self._resets
        if left < 0:
            raise Violation(ENHANCE_YOUR_CALM, f"{self._resets} calls were taken back, {answers} answers were sent")
        self._resets_given -= max(0, left - _MAX_RESETS)

    def ping(self, now: float, busy: bool, answers: int) -> None:
        """Counts a ping that came at ``now``, in seconds. Raises Violation if too many pings in a row came too early.

        A ping came too early if it came less than ``min_ping_interval`` seconds after the last one, no answer was sent since the
        last one, and no call is open. ``busy``: whether a call is open. ``answers``: answers sent since the connection began.
        """
        options = self._options
        answered, self._answers_at_ping = answers != self._answers_at_ping, answers
        if answered or busy or now - self._pinged_at >= options.min_ping_interval:
            self._strikes = 0
        else:
            self._strikes += 1
            if options.max_ping_strikes and self._strikes > options.max_ping_strikes:
                raise Violation(ENHANCE_YOUR_CALM, "too_many_pings")
        self._pinged_at = now
