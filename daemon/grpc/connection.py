"""One client connection: HTTP/2 from the server's side. Frames in, streams made and fed, frames out, and bounds on all of it.

    preface, SETTINGS ─▶ streams come and go ─▶ GOAWAY: no new ones ─▶ the last one ended: closed

HTTP/2 is spoken here and not by a library because a call then costs a third or less (docs/decisions/grpc-transport.md).
Whatever breaks the protocol ends the connection with GOAWAY; whatever is merely wrong with one call ends that stream. In one turn
of the loop so many frames are looked at (``floods``); what came beyond is read no further until the next one.

One object in five files, each a class that adds a noun to the one before: Outgoing ◁ DataFrames ◁ HeaderFrames ◁ FrameReader ◁
Connection; a Stream adds receiving to its Reply. They are layers and not parts: what arrives changes windows, streams and pings,
all of which write, so parts would refer to each other both ways. Counted: of the 1,917 bytecodes of a small unary call 35 reach
into another file's state, of the 1,581 of a stream's message 18, each of which would be a look-up more.
Source: RFC 9113.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from tensord.daemon.front.connection_end import ConnectionEnd
from tensord.daemon.front.each import call_each
from tensord.daemon.grpc import frames
from tensord.daemon.grpc.data_frames import CONNECTION_WINDOW, STREAM_WINDOW
from tensord.daemon.grpc.frame_reader import FRAME_SIZE, FrameReader
from tensord.daemon.grpc.frames import DATA, HEADERS, STREAM_ID, WINDOW_UPDATE, Violation
from tensord.daemon.grpc.outgoing import CLOSED, TLS_BUFFER, Phase
from tensord.daemon.grpc.pings import Pings, Sign
from tensord.daemon.grpc.serving import Serving
from tensord.daemon.grpc.stream import Stream
from tensord.daemon.grpc.stream_numbers import Past

_log = logging.getLogger(__name__)
#: What a control frame that is answered, and a call that is taken back, cost; one that is passed over costs 1.
_CONTROL_COST = 4
_RESET_COST = 8
_PING = b"tensord\0"
_LAST_CALL = b"tensord!"


class Connection(FrameReader):
    """Owns the streams; control frames, deadlines and the end. ``owner``: of what it holds (``Peer.owner``)."""

    def __init__(self, serving: Serving, owner: str) -> None:
        super().__init__(serving)
        self._owner = owner
        #: For who waits for the end of this connection.
        self.connection_end = ConnectionEnd()
        self._opened_at = self._checked_at = self._heard_at
        self._pings = Pings(serving.options)
        #: What had been answered when the client pinged last, and when that was last looked at.
        self._answered_at_ping = self._answered_before = 0
        #: When it was last of use to its client, and when it last had streams; loop time, as it was noticed.
        self._used_at = self._occupied_at = self._heard_at
        self._ending_at = 0.0
        #: The last stream that GOAWAY said is looked at.
        self._last_told: int | None = None

    # ------------------------------------------------------------------------------------------------ transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        # With no room to buffer, a write goes to the socket at once and says whether all of it went. TLS has a buffer of its own.
        self.is_plain = transport.get_extra_info("sslcontext") is None
        transport.set_write_buffer_limits(high=0 if self.is_plain else TLS_BUFFER)
        options = self.serving.options
        seat, connections = self.serving.seat, self.serving.connections
        full = seat.total() >= options.max_connections and not self.serving.longest_idle.make_room(self._opened_at)
        if full or self.serving.stopping:
            self.phase = Phase.CLOSED
            transport.close()
            return
        connections.add(self)
        self.account = self.serving.accounts.open(self._owner)
        seat.count(len(connections))
        transport.write(
            frames.settings(
                (
                    (frames.MAX_CONCURRENT_STREAMS, options.max_concurrent_streams),
                    (frames.INITIAL_WINDOW_SIZE, STREAM_WINDOW),
                    (frames.MAX_FRAME_SIZE, FRAME_SIZE),
                    (frames.MAX_HEADER_LIST_SIZE, options.max_head_byte_size),
                )
            )
            + frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW)
        )

    def connection_lost(self, error: Exception | None) -> None:
        self.connection_end.close()
        if self.account is not None:
            self.serving.accounts.close(self.account)
        self.phase = Phase.CLOSED
        self.serving.connections.discard(self)
        self.serving.seat.count(len(self.serving.connections))
        self._out.clear()
        self._abandon_streams()
        self._lost = True
        self._written()

    def eof_received(self) -> bool:
        """In gRPC the end of what a client sends is its end: what it left unanswered could wait for its windows for ever."""
        self.abort()
        return False

    # ---------------------------------------------------------------------------------------------------- frames

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> int:
        """Any frame. Returns what it costs beyond one that costs next to nothing, in such."""
        if kind == HEADERS:
            return self._headers(number, flags, payload)
        if kind == frames.CONTINUATION:
            return self._continuation(number, flags, payload)
        if kind == frames.SETTINGS:
            return self._settings(number, flags, payload)
        if kind == DATA:
            self._any_data(number, flags, payload)
        elif kind == WINDOW_UPDATE:
            raise Violation(frames.FRAME_SIZE_ERROR, f"WINDOW_UPDATE of {len(payload)} bytes")
        elif kind == frames.RST_STREAM:
            self._reset(number, payload)
            return _RESET_COST
        elif kind == frames.PING:
            self._ping(number, flags, payload)
            return _CONTROL_COST
        elif kind == frames.PUSH_PROMISE:
            raise Violation(frames.PROTOCOL_ERROR, "clients do not push")
        elif kind == frames.PRIORITY:
            self._priority(number, payload)
        elif kind == frames.GOAWAY:
            self._goaway(number, payload)
        # Other types are ignored, as the RFC asks.
        return 0

    def stream_ended(self, stream: Stream) -> None:
        """Called by the stream, once."""
        self.streams.pop(stream.id, None)
        if self.phase is Phase.ENDING and not self.streams and not self._flushing:
            self._flushing = True
            self.loop.call_soon(self._flush)

    def _reset(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Violation(frames.FRAME_SIZE_ERROR, f"RST_STREAM of {len(payload)} bytes")
        stream = self.streams.get(number)
        if stream is not None:
            self._floods.reset(self.answered)
            self.numbers.reset(number)
            stream.abandon()
        elif self.numbers.past(number) is Past.IDLE:
            raise Violation(frames.PROTOCOL_ERROR, f"stream {number} is reset before it is opened")

    # --------------------------------------------------------------------------------------------------- connection

    def _settings(self, number: int, flags: int, payload: bytes) -> int:
        if number:
            raise Violation(frames.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & frames.ACK:
            if payload:
                raise Violation(frames.FRAME_SIZE_ERROR, f"an acknowledgement of SETTINGS with {len(payload)} bytes")
            return 0
        values = frames.read_settings(payload)
        self.max_frame_size = values.get(frames.MAX_FRAME_SIZE, self.max_frame_size)
        window = values.get(frames.INITIAL_WINDOW_SIZE, self._peer_window)
        streams = list(self.streams.values()) if window != self._peer_window else []
        for stream in streams:
            stream.send_window += window - self._peer_window
            if stream.send_window > frames.MAX_WINDOW:
                raise Violation(frames.FLOW_CONTROL_ERROR, f"the window of stream {stream.id} is too large")
        self._peer_window = window
        self.write(frames.frame(frames.SETTINGS, frames.ACK, 0))
        for stream in streams:
            if stream.blocked:
                stream.pump()
        # As if each setting, and each window that it changes, were a frame.
        cost = len(payload) // 6 + len(streams)
        self._frames += cost
        return _CONTROL_COST + cost

    def _ping(self, number: int, flags: int, payload: bytes) -> None:
        if number:
            raise Violation(frames.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise Violation(frames.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        if flags & frames.ACK:
            self._pings.answered()
            if payload == _LAST_CALL:
                if self.serving.stopping:
                    self.stop()
                else:
                    self.end()
            return
        self.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        answered, self._answered_at_ping = self._answered_at_ping != self.answered, self.answered
        self._pings.pinged(self.loop.time(), bool(self.streams), answered)

    def _priority(self, number: int, payload: bytes) -> None:
        if not number:
            raise Violation(frames.PROTOCOL_ERROR, "PRIORITY of stream 0")
        if len(payload) != 5:
            raise Violation(frames.FRAME_SIZE_ERROR, f"PRIORITY of {len(payload)} bytes")
        frames.check_dependency(number, payload)

    def _goaway(self, number: int, payload: bytes) -> None:
        if number:
            raise Violation(frames.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:
            raise Violation(frames.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        if self.phase is Phase.OPEN:
            self.phase = Phase.ENDING

    def _fail(self, violation: Violation) -> None:
        self._take_leave(violation)
        self._close()

    def _take_leave(self, violation: Violation) -> None:
        _log.debug("closing a connection: %s", violation.reason)
        last = self.numbers.last if self._last_told is None else self._last_told
        self.write(frames.goaway(last, violation.code, violation.reason))
        self._flush()
        self._abandon_streams()

    def _abandon_streams(self) -> None:
        call_each([stream.abandon for stream in self.streams.values()], "leaving a call")

    # ------------------------------------------------------------------------------------------------------- ending

    def announce_end(self) -> None:
        """No new streams, once the client can know of it: a PING tells when what was on its way has come."""
        if self.phase is Phase.OPENING:
            self.abort()
        elif self.phase is Phase.OPEN:
            self.phase = Phase.ANNOUNCED
            self._ending_at = self.loop.time()
            self.write(frames.goaway(STREAM_ID, frames.NO_ERROR) + frames.frame(frames.PING, 0, 0, _LAST_CALL))

    def end(self) -> None:
        """No new streams from now on; closed with the last one."""
        if self.phase is Phase.ANNOUNCED:
            self.phase = Phase.ENDING
            self._last_told = self.numbers.last
            self.write(frames.goaway(self._last_told, frames.NO_ERROR))

    def stop(self) -> None:
        """The server stops: ``end``, and streams end with the answers they are owed."""
        self.end()
        for stream in list(self.streams.values()):
            stream.stop(self.loop.time(), self._taken_directly(stream))

    @property
    def asks_nothing(self) -> bool:
        """Whether it waits for no answer, nor for all of one to leave."""
        if self.phase is CLOSED or self._paused_since:
            return False
        return all(stream.idle for stream in self.streams.values())

    @property
    def used_at(self) -> float:
        """When it was last of use to its client, loop time."""
        if self.answered != self._answered_before:
            self._answered_before = self.answered
            self._used_at = max(self._used_at, self._heard_at)
        return self._used_at

    def make_room(self) -> None:
        """Others need its place."""
        self._take_leave(Violation(frames.NO_ERROR, "idle longest of too many connections"))
        self._close()

    def check(self, now: float) -> None:
        """Looks at every deadline of the connection; called about once a second."""
        options = self.serving.options
        if self._takes_too_little(now):
            return self.abort()
        if self.phase is CLOSED:
            return None
        if self.phase is Phase.OPENING and now - self._opened_at > options.head_timeout:
            return self._close()
        for stream in list(self.streams.values()):
            stream.check(now, self._taken_directly(stream))
        try:
            self._check_frames(now, now - self._checked_at)
        except Violation as violation:
            return self._fail(violation)
        self._checked_at = now
        sign = self._pings.look(now, self._heard_at, bool(self.streams))
        if sign is Sign.DEAD:
            return self.abort()
        if sign is Sign.ASK:
            self.write(frames.frame(frames.PING, 0, 0, _PING))
        return self._check_age(now)

    def _check_age(self, now: float) -> None:
        """Ends what is old, or asks nothing for long."""
        options = self.serving.options
        if not self.asks_nothing:
            self._used_at = now
        if self.streams:
            self._occupied_at = now
        idle = now - max(self.used_at, self._occupied_at)
        if options.max_connection_idle and idle > options.max_connection_idle:
            self.announce_end()
        if self.phase is Phase.ANNOUNCED and now - self._ending_at > options.keepalive_timeout:
            # Whoever has not answered that PING by now will not.
            self.end()
        if options.max_connection_age and now - self._opened_at > options.max_connection_age:
            self.announce_end()
            if options.max_connection_age_grace and now - self._ending_at > options.max_connection_age_grace:
                self.abort()

    def __repr__(self) -> str:
        return f"<Connection {self.phase.value} streams={len(self.streams)} blocked={len(self.blocked)}>"
