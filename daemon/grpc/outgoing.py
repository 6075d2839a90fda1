"""The outgoing half of a connection: what is written, what the client's windows allow, when it leaves, and who hears of it.

Everything written in one turn of the loop leaves in one call of the kernel. While the client does not take it, nothing is read
of it either, and streams with more to send wait in turn.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable

from tensord.daemon.front.each import call_each
from tensord.daemon.front.pace import Pace
from tensord.daemon.grpc import frames
from tensord.daemon.grpc.frames import MAX_WINDOW, STREAM_ID, Violation
from tensord.daemon.grpc.reply import Reply
from tensord.daemon.grpc.serving import Serving
from tensord.daemon.grpc.step_order import StepOrder
from tensord.daemon.grpc.stream import Stream
from tensord.daemon.grpc.stream_numbers import Past, StreamNumbers
from tensord.daemon.submit.accounts import Account
from tensord.shm.messages import Buffer

#: What may be handed to the transport at once; mostly views of the arena. A 1 MiB answer and its end leave in one call.
WRITE_BUFFER = 4 << 20
#: Unsent bytes of a TLS connection in its transport's own buffer.
TLS_BUFFER = 1 << 20
#: Small pieces are cheaper joined; large ones go to the socket as they lie.
_JOINED = 64 << 10


class Phase(enum.Enum):
    """Where a connection is in its life."""

    #: The client's preface is not whole.
    OPENING = "opening"
    #: Streams come and go.
    OPEN = "open"
    #: GOAWAY was sent; what the client sent before it knew of that is still served.
    ANNOUNCED = "announced"
    #: No new streams; the open ones end, then the connection does.
    ENDING = "ending"
    #: Nothing is read or written any more, but what was written and has not left.
    CLOSED = "closed"


# Looked at for every chunk: a member of an enum is found slowly.
OPENING, ENDING, CLOSED = Phase.OPENING, Phase.ENDING, Phase.CLOSED


class Outgoing(asyncio.Protocol):
    """Owns the transport. ``Connection`` is the incoming half."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.loop = asyncio.get_running_loop()
        self.phase = Phase.OPENING
        self.streams: dict[int, Stream] = {}
        self.numbers = StreamNumbers()
        #: Messages and ends of calls that were sent so far, and of larger ones the bytes: what a client may send goes by that.
        self.answered = self.sent = 0
        #: Streams that wait for the connection's window or for the socket, in turn. Those that wait for their own are not in it.
        self.blocked: dict[int, Reply] = {}
        self.send_window = frames.DEFAULT_WINDOW
        self.max_frame_size = frames.DEFAULT_FRAME_SIZE
        #: Whether what is written may lie in memory that is given back once it has left.
        self.is_plain = True
        self._transport: asyncio.Transport | None = None
        self._lost = False
        self._out: list[Buffer] = []
        #: How much a stream may put into it now.
        self.room = WRITE_BUFFER
        #: To be called when everything written so far has left.
        self._on_written: list[Callable[[], None]] = []
        #: What is written now leaves without being asked: at the end of this turn, or when everything that came was looked at.
        self._flushing = False
        self._paused_since = 0.0
        self._pace = Pace()
        #: What it holds of the arenas, while it is open.
        self.account: Account | None = None
        self.steps = StepOrder(self.loop)

    def fileno(self) -> int:
        """The client's connection; -1: it is gone already."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    def pause_writing(self) -> None:
        """The client takes its answers too slowly: it may not ask for more meanwhile."""
        assert self._transport is not None
        self._paused_since = self.loop.time()
        self.room = 0
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        assert self._transport is not None
        self._paused_since = 0.0
        self.room = WRITE_BUFFER - sum(map(len, self._out))
        if not self._transport.is_closing():
            self._read_again()
        if not self._out:
            self._written()
        self.pump()
        if self.phase is CLOSED:
            self._see_out()

    def _read_again(self) -> None:
        """What the client sends is welcome again."""
        assert self._transport is not None
        self._transport.resume_reading()

    def _takes_too_little(self, now: float) -> bool:
        """Whether its client takes too little of what the socket was given."""
        assert self._transport is not None
        options, left = self.serving.options, self._transport.get_write_buffer_size()
        return self._pace.is_slow(self._paused_since, left, now, options.write_timeout, options.min_rate)

    def when_written(self, on_written: Callable[[], None]) -> None:
        """Called when nothing that was written so far is looked at any more."""
        if self._lost or not (self._out or self._paused_since):
            on_written()
        else:
            self._on_written.append(on_written)

    def _written(self) -> None:
        if self._on_written:
            waiting, self._on_written = self._on_written, []
            call_each(waiting, "what follows an answer")

    def write(self, piece: Buffer) -> None:
        """Queues; everything of one turn of the loop leaves together."""
        self._out.append(piece)
        self.room -= len(piece)
        if not self._flushing:
            self._flushing = True
            self.loop.call_soon(self._flush)

    def write_pieces(self, pieces: list[Buffer]) -> None:
        """Queues several pieces that leave as they lie, together with all else of this turn."""
        self._out += pieces
        self.room -= sum(map(len, pieces))
        if not self._flushing:
            self._flushing = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        out = self._out
        if out and self.phase is not CLOSED:
            transport = self._transport
            assert transport is not None
            self._out = []
            if not self._paused_since:
                self.room = WRITE_BUFFER
            if len(out) == 1:
                transport.write(out[0])
            elif sum(map(len, out)) > _JOINED:
                transport.writelines(out)
            else:
                transport.write(b"".join(out))
            if self._on_written and not self._paused_since:
                self._written()
            if self.blocked:
                self.pump()
        if self.phase is ENDING and not self.streams and not self._out:
            self._close()

    def pump(self) -> None:
        """Sends what the connection's window and the socket allow."""
        for stream in list(self.blocked.values()):
            if self.send_window <= 0 or self.room <= 0:
                return
            # Whoever was served goes behind the others.
            if self.blocked.pop(stream.id, None) is not None:
                self.blocked[stream.id] = stream
                stream.pump()

    def _window_update(self, number: int, increment: int) -> None:
        sender = self.streams.get(number) if number else self
        if sender is not None:
            window = sender.send_window + increment
            if increment and window <= MAX_WINDOW:
                sender.send_window = window
                if sender.blocked:
                    sender.pump()
                return
        if number > STREAM_ID or increment > STREAM_ID:
            # The reserved bit is ignored.
            self._window_update(number & STREAM_ID, increment & STREAM_ID)
        elif sender is None:
            if not increment or self.numbers.past(number) is Past.IDLE:
                raise Violation(
                    frames.PROTOCOL_ERROR, f"a window of {increment} more for stream {number}, which is not open"
                )
        else:
            code = frames.FLOW_CONTROL_ERROR if increment else frames.PROTOCOL_ERROR
            if sender is self:
                raise Violation(
                    code, f"the connection's window grows by {increment} beyond what it may be, or by nothing"
                )
            self.reset(self.streams[number], code)

    def cut(self, number: int, code: int) -> None:
        """Tells the client that nothing of that stream is looked at any more."""
        self.numbers.cut(number)
        self.write(frames.rst_stream(number, code))

    def reset(self, stream: Stream, code: int) -> None:
        """Ends a stream over what its client did."""
        stream.abandon()
        self.cut(stream.id, code)

    def _close(self) -> None:
        """Ends the connection; what was written leaves first."""
        if self.phase is not Phase.CLOSED:
            self.phase = Phase.CLOSED
            if not self._paused_since:
                self._see_out()

    def _see_out(self) -> None:
        assert self._transport is not None
        self.serving.lingering.see_out(self._transport)

    def abort(self) -> None:
        """Cuts the connection."""
        self.phase = Phase.CLOSED
        if self._transport is not None:
            self._transport.abort()
