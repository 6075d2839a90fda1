"""Frames as they come, cut anywhere, and how many of them at a time.

    chunk ─▶ | frame | frame | ...     | rest |     the rest: in the next turn of the loop; meanwhile the client is not read
             ╰── so many in a turn ───╯

Whoever sends much does not keep others waiting: of each connection so many frames are looked at in one turn (``floods``). What
clients send most, whole DATA frames, header blocks of one frame and window updates, is taken before any other frame.
Source: RFC 9113, section 4.
"""

from __future__ import annotations

from abc import abstractmethod

from tensord.daemon.front.body_reader import DIRECT_BYTE_SIZE
from tensord.daemon.grpc import frames
from tensord.daemon.grpc.floods import CALL_COST, FRAMES_A_TURN, Floods
from tensord.daemon.grpc.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEAD_SIZE,
    HEADERS,
    STREAM_ID,
    UPDATE,
    UPDATE_SIZE,
    Violation,
    read_head,
    read_update,
)
from tensord.daemon.grpc.header_frames import HeaderFrames
from tensord.daemon.grpc.outgoing import CLOSED, ENDING, OPENING, Phase
from tensord.daemon.grpc.serving import Serving

#: Frames we take; larger than the default, so that large tensors come in fewer pieces.
FRAME_SIZE = 4 << 20
#: What a read of the transport may bring at most, or nearly: there is probably more, which the transport reads in the same turn.
_FULL_READ = 128 << 10
_TURN = range(FRAMES_A_TURN)


class FrameReader(HeaderFrames):
    """The part of an incoming half that takes chunks apart."""

    def __init__(self, serving: Serving) -> None:
        super().__init__(serving)
        #: The beginning of a frame, or what is left for the next turn; and since when the frame is incomplete, loop time.
        self._buffer = b""
        self._half_since = 0.0
        self._floods = Floods()
        #: Frames that came so far.
        self._frames = 0

    @abstractmethod
    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> int:
        """Any frame. Returns what it costs beyond one that costs next to nothing, in such."""

    @abstractmethod
    def _fail(self, violation: Violation) -> None:
        """Ends the connection over what its client did."""

    def data_received(self, data: bytes) -> None:
        if self.phase is CLOSED:
            return
        self._flushing = True
        self._heard_at = self.loop.time()
        try:
            self._read(self._buffer + data if self._buffer else data)
        except Violation as violation:
            self._fail(violation)
        finally:
            self._flushing = False
        if self._out or self.phase is ENDING:
            self._flush()
        if self._data_left >= DIRECT_BYTE_SIZE or self._reader is not None:
            self._read_directly()

    def _read(self, data: bytes) -> None:
        at, end = 0, len(data)
        if self._data_left:
            at = self._data_arrives(data, 0)
        elif self.phase is OPENING and not (at := self._preface(data)):
            self._buffer = data
            return
        # What frames cost beyond their number, and whether no header block is to be interrupted.
        more, free = 0, self._continued is None
        for count in _TURN:
            if end - at < HEAD_SIZE:
                break
            if free and data.startswith(UPDATE, at) and end - at >= UPDATE_SIZE:
                number, increment = read_update(data, at)
                self._window_update(number, increment)
                at += UPDATE_SIZE
                continue
            high, low, kind, flags, number = read_head(data, at)
            start = at + HEAD_SIZE
            at = start + low
            if free and not high and at <= end:
                if kind == DATA and flags <= END_STREAM:
                    self._data(number & STREAM_ID, flags, data, start, at)
                    continue
                if kind == HEADERS and flags | END_STREAM == END_HEADERS | END_STREAM:
                    more += CALL_COST + self._head(number & STREAM_ID, flags, data[start:at])
                    if count + more >= FRAMES_A_TURN:
                        break
                    continue
            size = high << 16 | low
            at = start + size
            if size > FRAME_SIZE:
                raise Violation(frames.FRAME_SIZE_ERROR, f"a frame of {size} bytes, at most {FRAME_SIZE} are allowed")
            if self._continued is not None and kind != frames.CONTINUATION:
                raise Violation(frames.PROTOCOL_ERROR, "a header block was interrupted")
            if kind == DATA and at > end and not flags & frames.PADDED:
                self._data_begins(number & STREAM_ID, flags, size)
                at = self._data_arrives(data, start)
                continue
            if at > end:
                if size > self.serving.options.max_head_byte_size:
                    raise Violation(
                        frames.ENHANCE_YOUR_CALM, f"a frame of {size} bytes that is neither data nor headers"
                    )
                # What is longer than what is read for it comes in few pieces: it is put together again.
                at = start - HEAD_SIZE
                break
            more += self._frame(kind, flags, number & STREAM_ID, data[start:at])
            if count + more >= FRAMES_A_TURN:
                break
            free = self._continued is None
        else:
            count, more = FRAMES_A_TURN, more + 1
        self._frames += count
        if at < end or self._buffer:
            if at or not self._buffer:
                self._half_since = self._heard_at
            self._buffer = data[at:]
        if (more or end >= _FULL_READ) and count + more >= (FRAMES_A_TURN if end < _FULL_READ else FRAMES_A_TURN // 2):
            self._rest()

    def _rest(self) -> None:
        """Has looked at enough for this turn of the loop: others come first now."""
        self._look_for_floods()
        assert self._transport is not None
        self._resting = True
        self._transport.pause_reading()
        self.loop.call_soon(self._go_on)

    def _look_for_floods(self) -> None:
        self._floods.look(self._frames, self.answered, self._granted + self._ungranted + self.sent)

    def _go_on(self) -> None:
        """With what was left; once nothing is, the client is read again."""
        if self.phase is CLOSED or self._paused_since:
            return
        self._resting = False
        self.data_received(b"")
        if self.phase is not CLOSED and not self._resting and not self._paused_since:
            assert self._transport is not None
            self._transport.resume_reading()

    def _read_again(self) -> None:
        if self.phase is CLOSED:
            return
        if self._resting:
            self.loop.call_soon(self._go_on)
        else:
            super()._read_again()

    def _preface(self, data: bytes) -> int:
        """Where the first frame after it begins; 0: more is to come first."""
        size = min(len(data), len(frames.PREFACE))
        if data[:size] != frames.PREFACE[:size]:
            raise Violation(frames.PROTOCOL_ERROR, "no HTTP/2 connection preface")
        if size < len(frames.PREFACE) or len(data) < size + HEAD_SIZE:
            return 0
        if data[size + 3] != frames.SETTINGS or data[size + 4] & frames.ACK:
            raise Violation(frames.PROTOCOL_ERROR, "the preface ends with SETTINGS")
        self.phase = Phase.OPEN
        return size

    def _check_frames(self, now: float, seconds: float) -> None:
        """Looks at what the client has sent in the last seconds, and what it has begun. Raises Violation."""
        self._floods.second(seconds)
        self._look_for_floods()
        if self._paused_since or self._resting:
            # It is not read: what it has sent meanwhile is not late.
            self._half_since = self._continued_since = self._data_since = now
            return
        options = self.serving.options
        if (self._buffer and now - self._half_since > options.head_timeout) or (
            self._continued is not None and now - self._continued_since > options.head_timeout
        ):
            raise Violation(
                frames.ENHANCE_YOUR_CALM,
                f"a frame, or a header block, was not whole within head_timeout, {options.head_timeout:g} s",
            )
        if self._data_left and now - self._data_since > options.body_timeout:
            raise Violation(
                frames.ENHANCE_YOUR_CALM, f"DATA was not whole within body_timeout, {options.body_timeout:g} s"
            )
