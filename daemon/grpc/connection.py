"""One client connection: HTTP/2 from the server's side. Frames in, streams made and fed, frames out, and bounds on all of it.

    preface, SETTINGS ─▶ streams come and go ─▶ GOAWAY: no new ones ─▶ the last one ended: closed

HTTP/2 is spoken here and not by a library because a call then costs a third or less (docs/decisions/grpc-transport.md).
Whatever breaks the protocol ends the connection with GOAWAY; whatever is merely wrong with one call ends that stream.
Source: RFC 9113.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from daemon.access import Restricted
from daemon.connection_end import ConnectionEnd
from daemon.each import call_each
from daemon.grpc import frames
from daemon.grpc.codes import UNAVAILABLE, UNIMPLEMENTED
from daemon.grpc.data_frames import CONNECTION_WINDOW, DIRECT_BYTE_SIZE, STREAM_WINDOW, DataFrames
from daemon.grpc.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEAD_SIZE,
    HEADERS,
    STREAM_ID,
    UPDATE,
    UPDATE_SIZE,
    WINDOW_UPDATE,
    Violation,
    read_head,
    read_update,
)
from daemon.grpc.header_blocks import CallHead, HeaderBlocks
from daemon.grpc.outgoing import CLOSED, ENDING, OPENING, TLS_BUFFER, Phase
from daemon.grpc.pings import Pings, Sign
from daemon.grpc.serving import Serving
from daemon.grpc.stream import Stream

_log = logging.getLogger(__name__)
#: Frames we take; larger than the default, so that large tensors come in fewer pieces.
_FRAME_SIZE = 4 << 20
#: Streams a client may reset without having let them end, per second, before it is taken for an attack.
_MAX_RESETS = 20_000
_PING = b"tensord\0"


class Connection(DataFrames):
    """The incoming half; owns the streams."""

    def __init__(self, serving: Serving) -> None:
        super().__init__(serving)
        #: For who waits for the end of this connection.
        self.connection_end = ConnectionEnd()
        self._blocks = HeaderBlocks(serving.options.max_head_byte_size)
        self._peer_window = frames.DEFAULT_WINDOW
        self._buffer = b""
        #: A header block in several frames: its stream, flags and pieces.
        self._continued: tuple[int, int, list[bytes]] | None = None
        self._opened_at = self._heard_at
        self._pings = Pings(serving.options)
        #: Something of a call was sent since the client's last ping.
        self.answered = False
        self._resets = 0
        self._ending_at = 0.0

    # ------------------------------------------------------------------------------------------------ transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        # With no room to buffer, a write goes to the socket at once and says whether all of it went. TLS has a buffer of its own.
        self.is_plain = transport.get_extra_info("sslcontext") is None
        transport.set_write_buffer_limits(high=0 if self.is_plain else TLS_BUFFER)
        options = self.serving.options
        seat, connections = self.serving.seat, self.serving.connections
        if seat.total() >= options.max_connections or self.serving.stopping:
            self.phase = Phase.CLOSED
            transport.close()
            return
        connections.add(self)
        seat.count(len(connections))
        transport.write(
            frames.settings(
                (
                    (frames.MAX_CONCURRENT_STREAMS, options.max_concurrent_streams),
                    (frames.INITIAL_WINDOW_SIZE, STREAM_WINDOW),
                    (frames.MAX_FRAME_SIZE, _FRAME_SIZE),
                    (frames.MAX_HEADER_LIST_SIZE, options.max_head_byte_size),
                )
            )
            + frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW)
        )

    def connection_lost(self, error: Exception | None) -> None:
        self.connection_end.close()
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
        # Whether a header block is not to be interrupted.
        free = self._continued is None
        while end - at >= HEAD_SIZE:
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
                    self._head(number & STREAM_ID, flags, data[start:at])
                    continue
            size = high << 16 | low
            at = start + size
            if size > _FRAME_SIZE:
                raise Violation(frames.FRAME_SIZE_ERROR, f"a frame of {size} bytes, at most {_FRAME_SIZE} are allowed")
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
                self._buffer = data[start - HEAD_SIZE :]
                return
            self._frame(kind, flags, number & STREAM_ID, data[start:at])
            free = self._continued is None
        self._buffer = data[at:] if at < end else b""

    def _preface(self, data: bytes) -> int:
        """Where the first frame after it begins; 0: more is to come first."""
        size = min(len(data), len(frames.PREFACE))
        if data[:size] != frames.PREFACE[:size]:
            raise Violation(frames.PROTOCOL_ERROR, "no HTTP/2 connection preface")
        if size < len(frames.PREFACE) or len(data) < size + HEAD_SIZE:
            return 0
        if data[size + 3] != frames.SETTINGS:
            raise Violation(frames.PROTOCOL_ERROR, "the preface ends with SETTINGS")
        self.phase = Phase.OPEN
        return size

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == HEADERS:
            self._headers(number, flags, payload)
        elif kind == DATA:
            self._any_data(number, flags, payload)
        elif kind == WINDOW_UPDATE:
            raise Violation(frames.FRAME_SIZE_ERROR, f"WINDOW_UPDATE of {len(payload)} bytes")
        elif kind == frames.RST_STREAM:
            self._reset(number, payload)
        elif kind == frames.SETTINGS:
            self._settings(number, flags, payload)
        elif kind == frames.PING:
            self._ping(number, flags, payload)
        elif kind == frames.CONTINUATION:
            self._continuation(number, flags, payload)
        elif kind == frames.PUSH_PROMISE:
            raise Violation(frames.PROTOCOL_ERROR, "clients do not push")
        elif kind == frames.PRIORITY and len(payload) != 5:
            raise Violation(frames.FRAME_SIZE_ERROR, f"PRIORITY of {len(payload)} bytes")
        elif kind == frames.GOAWAY and self.phase is Phase.OPEN:
            self.phase = Phase.ENDING
        # Other types are ignored, as the RFC asks.

    # ---------------------------------------------------------------------------------------------------- streams

    def _headers(self, number: int, flags: int, payload: bytes) -> None:
        if flags & frames.PADDED:
            payload = frames.unpadded(payload)
        if flags & frames.PRIORITIZED:
            if len(payload) < 5:
                raise Violation(frames.FRAME_SIZE_ERROR, "HEADERS without room for its priority")
            payload = payload[5:]
        if not flags & END_HEADERS:
            self._continued = (number, flags, [payload])
            return
        self._head(number, flags, payload)

    def _continuation(self, number: int, flags: int, payload: bytes) -> None:
        if self._continued is None or self._continued[0] != number:
            raise Violation(frames.PROTOCOL_ERROR, "CONTINUATION of nothing")
        _, first_flags, pieces = self._continued
        pieces.append(payload)
        if sum(map(len, pieces)) > self.serving.options.max_head_byte_size or len(pieces) > 64:
            raise Violation(frames.ENHANCE_YOUR_CALM, "the headers are larger than allowed")
        if flags & END_HEADERS:
            self._continued = None
            self._head(number, first_flags, b"".join(pieces))

    def _head(self, number: int, flags: int, block: bytes) -> None:
        """A whole header block: a new stream, or the trailers of one."""
        head = self._blocks.decode(block)
        if number <= self._last_stream:
            stream = self.streams.get(number)
            # Of one that ended a moment ago the client may not know yet.
            if stream is not None:
                if stream.half_closed or not flags & END_STREAM:
                    raise Violation(frames.STREAM_CLOSED, "headers in the middle of a stream")
                stream.end_receiving()
            return
        if not number & 1:
            raise Violation(frames.PROTOCOL_ERROR, f"clients do not open stream {number}")
        if self.phase is Phase.ENDING:
            return
        self._last_stream = number
        if len(self.streams) >= self.serving.options.max_concurrent_streams:
            self.write(frames.rst_stream(number, frames.REFUSED_STREAM))
            return
        stream = Stream(self, number, head, self._peer_window)
        self.streams[number] = stream
        self._open(stream, head)
        if flags & END_STREAM:
            stream.end_receiving()

    def _open(self, stream: Stream, head: CallHead) -> None:
        if head.http_status != 200:
            stream.answer_http(head.http_status)
            return
        if self.serving.rules and (rule := self.serving.rules.get(head.path)) is not None:
            try:
                rule.check([(name.encode(), value.encode("latin-1")) for name, value in head.metadata])
            except Restricted as error:
                stream.finish(UNAVAILABLE, error.message)
                return
        make = self.serving.methods.get(head.path)
        if make is None:
            stream.finish(UNIMPLEMENTED, f"Method not found: {head.path[:200]}")
            return
        stream.begin(make(stream))

    def stream_ended(self, stream: Stream) -> None:
        """Called by the stream, once."""
        self.answered = True
        self.streams.pop(stream.id, None)
        if self.phase is Phase.ENDING and not self.streams and not self._flushing:
            self._flushing = True
            self.loop.call_soon(self._flush)

    def _reset(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Violation(frames.FRAME_SIZE_ERROR, f"RST_STREAM of {len(payload)} bytes")
        if number > self._last_stream or not number:
            raise Violation(frames.PROTOCOL_ERROR, f"stream {number} is reset before it is opened")
        stream = self.streams.get(number)
        if stream is not None:
            self._resets += 1
            if self._resets > _MAX_RESETS:
                raise Violation(frames.ENHANCE_YOUR_CALM, "too many streams were reset")
            stream.abandon()

    # --------------------------------------------------------------------------------------------------- connection

    def _settings(self, number: int, flags: int, payload: bytes) -> None:
        if number:
            raise Violation(frames.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & frames.ACK:
            return
        for key, value in frames.read_settings(payload):
            if key == frames.INITIAL_WINDOW_SIZE:
                if value > frames.MAX_WINDOW:
                    raise Violation(frames.FLOW_CONTROL_ERROR, f"an initial window of {value} bytes")
                for stream in self.streams.values():
                    stream.send_window += value - self._peer_window
                self._peer_window = value
            elif key == frames.MAX_FRAME_SIZE:
                if not frames.DEFAULT_FRAME_SIZE <= value < 1 << 24:
                    raise Violation(frames.PROTOCOL_ERROR, f"a largest frame of {value} bytes")
                self.max_frame_size = value
        self.write(frames.frame(frames.SETTINGS, frames.ACK, 0))
        if self.blocked:
            self._pump()

    def _ping(self, number: int, flags: int, payload: bytes) -> None:
        if number or len(payload) != 8:
            raise Violation(frames.PROTOCOL_ERROR, "a bad PING")
        if flags & frames.ACK:
            self._pings.answered()
            if payload == _LAST_CALL:
                if self.serving.stopping:
                    self.stop()
                else:
                    self.end()
            return
        self.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        answered, self.answered = self.answered, False
        self._pings.pinged(self.loop.time(), bool(self.streams), answered)

    def _fail(self, violation: Violation) -> None:
        _log.debug("closing a connection: %s", violation.reason)
        self.write(frames.goaway(self._last_stream, violation.code, violation.reason))
        self._flush()
        self._abandon_streams()
        self._close()

    def _abandon_streams(self) -> None:
        call_each([stream.abandon for stream in self.streams.values()], "leaving a call")

    # ------------------------------------------------------------------------------------------------------- ending

    def announce_end(self) -> None:
        """No new streams, once the client can know of it: a PING tells when what was on its way has come."""
        if self.phase is Phase.OPENING:
            self._close()
        elif self.phase is Phase.OPEN:
            self.phase = Phase.ANNOUNCED
            self._ending_at = self.loop.time()
            self.write(frames.goaway(STREAM_ID, frames.NO_ERROR) + frames.frame(frames.PING, 0, 0, _LAST_CALL))

    def end(self) -> None:
        """No new streams from now on; closed with the last one."""
        if self.phase is Phase.ANNOUNCED:
            self.phase = Phase.ENDING
            self.write(frames.goaway(self._last_stream, frames.NO_ERROR))

    def stop(self) -> None:
        """The server stops: ``end``, and streams end with the answers they are owed."""
        self.end()
        for stream in list(self.streams.values()):
            stream.stop()

    def check(self, now: float) -> None:
        """Looks at every deadline of the connection; called about once a second."""
        options = self.serving.options
        self._resets = 0
        if self.phase is Phase.OPENING and now - self._opened_at > options.head_timeout:
            return self._close()
        if self._paused_since and now - self._paused_since > options.write_timeout:
            return self.abort()
        for stream in list(self.streams.values()):
            if stream.waits_for_room:
                continue  # it is we who hold it up, for ``arenas.wait`` at most
            if stream.partial_since and now - stream.partial_since > options.body_timeout:
                stream.refuse(UNAVAILABLE, f"a message did not arrive within {options.body_timeout:g} s")
        sign = self._pings.look(now, self._heard_at, bool(self.streams))
        if sign is Sign.DEAD:
            return self.abort()
        if sign is Sign.ASK:
            self.write(frames.frame(frames.PING, 0, 0, _PING))
        if options.max_connection_age and now - self._opened_at > options.max_connection_age:
            self.announce_end()
            if options.max_connection_age_grace and now - self._ending_at > options.max_connection_age_grace:
                self.abort()
        return None

    def __repr__(self) -> str:
        return f"<Connection {self.phase.value} streams={len(self.streams)} blocked={len(self.blocked)}>"


_LAST_CALL = b"tensord!"
