"""Speaks HTTP/2 as a server, without I/O: parses the client's bytes, and queues bytes to send in ``out``.

Each iteration of the event loop parses a limited number of frames:

    DATA ─▶ passed to its ``Stream``      HEADERS ─▶ a new ``Stream``      WINDOW_UPDATE ─▶ one ``Stream`` or all may send more

A client that breaks the protocol causes a connection error: ``Violation`` is raised, and the connection sends GOAWAY. A fault
of a single request is a stream error: RST_STREAM is sent. Why no library: docs/decisions/grpc-transport.md.
Source: RFC 9113; the sections are named where they apply.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

from tensord.daemon.front.each import call_each
from tensord.daemon.grpc import frames
from tensord.daemon.grpc.floods import CALL_COST, FRAMES_A_TURN, HEADER_BYTES_A_FRAME, Floods
from tensord.daemon.grpc.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEAD_SIZE,
    HEADERS,
    MAX_WINDOW,
    STREAM_ID,
    UPDATE,
    UPDATE_SIZE,
    WINDOW_UPDATE,
    Violation,
    read_head,
    read_update,
)
from tensord.daemon.grpc.header_blocks import HeaderBlocks, Malformed
from tensord.daemon.grpc.stream import MUCH_OF_STREAM, STREAM_WINDOW, Stream
from tensord.daemon.grpc.stream_numbers import Past, StreamNumbers
from tensord.shm.messages import Buffer

if TYPE_CHECKING:
    from tensord.daemon.grpc.connection import Http2Connection
    from tensord.daemon.grpc.serving import GrpcServing

#: The largest frame we take: larger than the default, so that large tensors come in fewer pieces.
FRAME_SIZE = 4 << 20
#: The receive window of all streams together, in bytes; the one of each is ``STREAM_WINDOW``.
CONNECTION_WINDOW = 64 << 20
#: More than that is granted again.
_MUCH_OF_CONNECTION = CONNECTION_WINDOW // 4
#: Bytes that may be handed to the transport at once; mostly views of the arena. A 1 MiB answer and its end leave in one call.
WRITE_BUFFER = 4 << 20

_COUNTS = range(FRAMES_A_TURN)
#: Costs of other frames: a call that is reset, and a control frame that is answered.
_RESET_COST = 8
_CONTROL_COST = 4
#: A read of the transport that brings so many bytes was full, or nearly: there is probably more, which the same iteration reads.
_FULL_READ = 128 << 10
#: Frames that one header block may come in.
_MAX_PIECES = 64
#: The PING behind our first GOAWAY: once it is answered, the client knows of that.
_LAST_CALL = b"tensord!"


class ConnectionPhase(enum.Enum):
    """Names the phases of an HTTP/2 connection."""

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
OPENING, ENDING, CLOSED = ConnectionPhase.OPENING, ConnectionPhase.ENDING, ConnectionPhase.CLOSED


class Http2:
    """Owns the streams of one HTTP/2 connection, and the bytes that wait to be sent to the client.

    The attribute ``out`` holds these bytes, and ``Http2Connection.flush`` sends them.
    """

    def __init__(self, serving: GrpcServing, connection: Http2Connection) -> None:
        self.serving = serving
        self.connection = connection
        self.phase = ConnectionPhase.OPENING
        self.streams: dict[int, Stream] = {}
        self.numbers = StreamNumbers()
        # --- receiving
        #: When anything last came from the client, or was not read of it. Times are the front's, in seconds, here and below.
        self.heard_at = 0.0
        #: The beginning of a frame, or what is left for the next iteration; and since when the frame is incomplete.
        self._buffer = b""
        self._half_since = 0.0
        self._blocks = HeaderBlocks(serving.options.max_head_byte_size)
        #: A header block in several frames: its stream, flags and pieces; and since when it is incomplete.
        self._continued: tuple[int, int, list[bytes]] | None = None
        self._continued_since = 0.0
        #: A DATA frame whose payload is still arriving: bytes left, since when, its flags and its stream.
        self.data_left = 0
        self._data_since = 0.0
        self._data_flags = 0
        self.data_stream: Stream | None = None
        #: The number of the payload's bytes that were read to their place, while the stream has not been told of them.
        self.data_read = 0
        #: DATA taken from the client and not granted again yet, and all that was granted again so far; bytes.
        self._ungranted = self._granted = 0
        #: Frames that came so far, and how many may.
        self._frames = 0
        self._floods = Floods(serving.options)
        # --- sending
        self.out: list[Buffer] = []
        #: Callbacks for when everything in ``out`` has left, so that its memory may be reused.
        self.on_written: list[Callable[[], None]] = []
        #: How much a stream may put into it now.
        self.room = WRITE_BUFFER
        #: True while anything written leaves without being asked for: at the end of this iteration, or once all that came was
        #: looked at.
        self.is_flushing = False
        self.max_frame_size = frames.DEFAULT_FRAME_SIZE
        #: The bytes that the client lets us send: on all streams together, and on a new one.
        self.send_window = self._peer_window = frames.DEFAULT_WINDOW
        #: Messages and ends of calls that were sent so far, and of larger ones the bytes: what a client may send goes by that.
        self.answered = self.sent = 0
        #: Streams that wait for the connection's window or for the socket, in turn. Those that wait for their own are not in it.
        self.blocked: dict[int, Stream] = {}
        #: The last stream that GOAWAY said is looked at.
        self._last_told: int | None = None

    # ------------------------------------------------------------------------------------------ 3.4: preface, 4: frames

    def hello(self) -> bytes:
        """Returns the bytes that the server sends first: SETTINGS and a larger connection window."""
        options = self.serving.options
        return frames.settings(
            (
                (frames.MAX_CONCURRENT_STREAMS, options.max_concurrent_streams),
                (frames.INITIAL_WINDOW_SIZE, STREAM_WINDOW),
                (frames.MAX_FRAME_SIZE, FRAME_SIZE),
                (frames.MAX_HEADER_LIST_SIZE, options.max_head_byte_size),
            )
        ) + frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW)

    def receive(self, data: bytes, now: float) -> bool:
        """Parses ``data``, received bytes, but no more frames than one iteration of the event loop may handle.

        Returns True if more frames are left. Then the caller must call again in the next iteration, even without new bytes.
        ``now``: seconds of the front's clock.
        """
        self.heard_at = now
        if self._buffer:
            data = self._buffer + data
        at, end = 0, len(data)
        if self.data_left:
            at = self._data_arrives(data, 0)
        elif self.phase is OPENING and not (at := self._preface(data)):
            self._half_since, self._buffer = self._half_since or now, data
            return False
        # What frames cost beyond their number, and whether no header block is to be interrupted.
        more, free = 0, self._continued is None
        for count in _COUNTS:
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
                    more += CALL_COST + self._header_block(number & STREAM_ID, flags, data[start:at])
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
                # Its payload arrives in any number of reads.
                self.data_stream = self._data_target(number & STREAM_ID, size)
                self.data_left, self._data_flags, self._data_since = size, flags, now
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
                self._half_since = now
            self._buffer = data[at:]
        if (more or end >= _FULL_READ) and count + more >= (FRAMES_A_TURN if end < _FULL_READ else FRAMES_A_TURN // 2):
            self._look_for_floods()
            return True
        return False

    def _preface(self, data: bytes) -> int:
        """Returns the size of the client's preface, or 0 if ``data`` is too short. Raises Violation if the preface is wrong."""
        size = min(len(data), len(frames.PREFACE))
        if data[:size] != frames.PREFACE[:size]:
            raise Violation(frames.PROTOCOL_ERROR, "no HTTP/2 connection preface")
        if size < len(frames.PREFACE) or len(data) < size + HEAD_SIZE:
            return 0
        if data[size + 3] != frames.SETTINGS or data[size + 4] & frames.ACK:
            raise Violation(frames.PROTOCOL_ERROR, "the preface ends with SETTINGS")
        self.phase = ConnectionPhase.OPEN
        return size

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> int:
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
            self._rst_stream(number, payload)
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

    # --------------------------------------------------------------------------------------------------- 6.1: DATA

    def _data(self, number: int, flags: int, data: bytes, start: int, end: int) -> None:
        """Passes ``data[start:end]``, the payload of an unpadded DATA frame, to its stream."""
        stream = self.streams.get(number)
        if stream is not None and not stream.half_closed:
            ungranted = stream.ungranted + end - start
            total = self._ungranted + end - start
            if ungranted <= MUCH_OF_STREAM and total <= _MUCH_OF_CONNECTION:
                stream.ungranted, self._ungranted = ungranted, total
                if start < end:
                    stream.receive(data, start, end)
                if flags:
                    stream.frame_arrived(flags)
                return
        self._any_data(number, flags, data[start:end])

    def _any_data(self, number: int, flags: int, payload: bytes) -> None:
        """Passes the payload of a DATA frame to its stream, or drops it if the stream has ended."""
        stream = self._data_target(number, len(payload))
        if stream is None:
            return
        if flags & frames.PADDED:
            payload = frames.unpadded(payload)
        if payload:
            stream.receive(payload, 0, len(payload))
        stream.frame_arrived(flags)

    def _data_arrives(self, data: bytes, at: int) -> int:
        end = min(len(data), at + self.data_left)
        self.data_left -= end - at
        stream = self.data_stream
        if stream is not None and not stream.ended and end > at:
            stream.receive(data, at, end)
        if not self.data_left:
            self.data_stream = None
            if stream is not None and not stream.ended:
                stream.frame_arrived(self._data_flags)
        return end

    def data_was_read(self) -> None:
        """Records that ``self.data_read`` more bytes were read into the message buffer of the stream ``self.data_stream``."""
        byte_size, self.data_read = self.data_read, 0
        self.data_left -= byte_size
        stream = self.data_stream
        if stream is not None:
            stream.advance(byte_size)
        if not self.data_left:
            self.data_stream = None
            if stream is not None and not stream.ended:
                stream.frame_arrived(self._data_flags)

    def _data_target(self, number: int, size: int) -> Stream | None:
        """Counts a DATA frame of ``size`` bytes for stream ``number`` against the receive windows. Returns the stream.

        Returns None if the payload must be dropped, because the stream was reset or was begun after the last GOAWAY.
        Raises Violation if the client may not send this frame.
        """
        stream = self.streams.get(number)
        # Granted again so early, and frames so much smaller than the window, that no client can exceed it.
        self._ungranted += size
        if self._ungranted > _MUCH_OF_CONNECTION:
            self.write(frames.window_update(0, self._ungranted))
            self._granted += self._ungranted
            self._ungranted = 0
        if stream is None:
            self._data_too_late(number)
            return None
        if stream.half_closed:
            raise Violation(frames.STREAM_CLOSED, f"DATA after the end of stream {number}")
        stream.ungranted = ungranted = stream.ungranted + size
        if ungranted > STREAM_WINDOW:
            raise Violation(frames.FLOW_CONTROL_ERROR, f"more DATA than the window of stream {number} allows")
        return stream

    def _data_too_late(self, number: int) -> None:
        past = self.numbers.past(number)
        if past is Past.IDLE:
            raise Violation(frames.PROTOCOL_ERROR, f"DATA for stream {number}, which is not open")
        if past is Past.RESET:
            self.rst_stream(number, frames.STREAM_CLOSED)
        elif past is not Past.CUT:
            raise Violation(frames.STREAM_CLOSED, f"DATA for stream {number}, which has ended")

    # -------------------------------------------------------------------------- 6.2: HEADERS, 6.10: CONTINUATION, 8.1

    def _headers(self, number: int, flags: int, payload: bytes) -> int:
        if not number:
            raise Violation(frames.PROTOCOL_ERROR, "HEADERS for stream 0")
        if flags & frames.PADDED:
            payload = frames.unpadded(payload)
        if flags & frames.PRIORITIZED:
            if len(payload) < 5:
                raise Violation(frames.FRAME_SIZE_ERROR, "HEADERS without room for its priority")
            frames.check_dependency(number, payload)
            payload = payload[5:]
        if not flags & END_HEADERS:
            self._continued = (number, flags, [payload])
            self._continued_since = self.heard_at
            return 0
        return self._header_block(number, flags, payload)

    def _continuation(self, number: int, flags: int, payload: bytes) -> int:
        if self._continued is None or self._continued[0] != number:
            raise Violation(frames.PROTOCOL_ERROR, "CONTINUATION of nothing")
        _, first_flags, pieces = self._continued
        pieces.append(payload)
        if sum(map(len, pieces)) > self.serving.options.max_head_byte_size or len(pieces) > _MAX_PIECES:
            raise Violation(frames.ENHANCE_YOUR_CALM, "the headers are larger than allowed, or in too many pieces")
        if not flags & END_HEADERS:
            return 0
        self._continued = None
        return self._header_block(number, first_flags, b"".join(pieces))

    def _header_block(self, number: int, flags: int, block: bytes) -> int:
        numbers, cost = self.numbers, len(block) // HEADER_BYTES_A_FRAME
        if number < numbers.next:
            self._trailers(number, flags, block)
            return cost
        if not number & 1:
            raise Violation(frames.PROTOCOL_ERROR, f"clients do not open stream {number}")
        if number == numbers.next:
            numbers.next = number + 2
        else:
            numbers.use(number)
        try:
            head = self._blocks.decode(block)
        except Malformed:
            self.rst_stream(number, frames.PROTOCOL_ERROR)
            return cost
        if self.phase is ENDING:
            numbers.remember(number, Past.CUT)
            return cost
        if len(self.streams) >= self.serving.options.max_concurrent_streams:
            self.rst_stream(number, frames.REFUSED_STREAM)
            return cost
        stream = self.streams[number] = Stream(self, number, head, self._peer_window)
        stream.begin()
        if flags & END_STREAM:
            stream.frame_arrived(flags)
        return cost

    def _trailers(self, number: int, flags: int, block: bytes) -> None:
        """Handles the header block that ends the request on stream ``number``. ``flags``: the flags of the HEADERS frame."""
        stream = self.streams.get(number)
        if stream is None:
            past = self.numbers.past(number)
            if past is Past.PASSED_OVER or past is Past.IDLE:
                raise Violation(frames.PROTOCOL_ERROR, f"stream {number} cannot be opened any more")
            if past is Past.CLOSED:
                raise Violation(frames.STREAM_CLOSED, f"HEADERS for stream {number}, which has ended")
        elif stream.half_closed:
            raise Violation(frames.STREAM_CLOSED, f"HEADERS after the end of stream {number}")
        try:
            self._blocks.trailers(block)
            if stream is not None and not flags & END_STREAM:
                raise Malformed("headers in the middle of a request")
        except Malformed:
            if stream is not None:
                self.reset(stream, frames.PROTOCOL_ERROR)
                return
        if stream is not None:
            stream.frame_arrived(flags)
        elif past is Past.RESET:
            self.rst_stream(number, frames.STREAM_CLOSED)

    # ------------------------------------------------------- 6.3 to 6.8: PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY

    def _priority(self, number: int, payload: bytes) -> None:
        if not number:
            raise Violation(frames.PROTOCOL_ERROR, "PRIORITY of stream 0")
        if len(payload) != 5:
            raise Violation(frames.FRAME_SIZE_ERROR, f"PRIORITY of {len(payload)} bytes")
        frames.check_dependency(number, payload)

    def _rst_stream(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Violation(frames.FRAME_SIZE_ERROR, f"RST_STREAM of {len(payload)} bytes")
        stream = self.streams.get(number)
        if stream is not None:
            self._floods.reset(self.answered)
            self.numbers.remember(number, Past.RESET)
            stream.abandon()
        elif self.numbers.past(number) is Past.IDLE:
            raise Violation(frames.PROTOCOL_ERROR, f"stream {number} is reset before it is opened")

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
            if stream.send_window > MAX_WINDOW:
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
            if payload == _LAST_CALL:
                if self.serving.stopping:
                    self.stop(self.heard_at)
                else:
                    self.end()
            return
        self.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        self._floods.ping(self.heard_at, bool(self.streams), self.answered)

    def _goaway(self, number: int, payload: bytes) -> None:
        if number:
            raise Violation(frames.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:
            raise Violation(frames.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        if self.phase is ConnectionPhase.OPEN:
            self.phase = ConnectionPhase.ENDING

    # ------------------------------------------------------------------------------- 5.2 and 6.9: flow control, both ways

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

    def pump(self) -> None:
        """Lets the streams with unsent bytes send, in turn."""
        for stream in list(self.blocked.values()):
            if self.send_window <= 0 or self.room <= 0:
                return
            # Whoever was served goes behind the others.
            if self.blocked.pop(stream.id, None) is not None:
                self.blocked[stream.id] = stream
                stream.pump()

    # ---------------------------------------------------------------------------------------------------------- sending

    def write(self, piece: Buffer) -> None:
        """Queues ``piece``, bytes for the client. All bytes of one iteration of the event loop are sent together."""
        self.out.append(piece)
        self.room -= len(piece)
        if not self.is_flushing:
            self.is_flushing = True
            self.connection.loop.call_soon(self.connection.flush)

    def write_pieces(self, *pieces: Buffer) -> None:
        """Queues pieces for the client without joining them. The caller must not change them until they are sent."""
        self.out += pieces
        self.room -= sum(map(len, pieces))
        if not self.is_flushing:
            self.is_flushing = True
            self.connection.loop.call_soon(self.connection.flush)

    def rst_stream(self, number: int, code: int) -> None:
        """Sends RST_STREAM with the error ``code``. Frames that still come on the stream ``number`` are ignored."""
        self.numbers.remember(number, Past.CUT)
        self.write(frames.rst_stream(number, code))

    def reset(self, stream: Stream, code: int) -> None:
        """Ends a stream with RST_STREAM and ``code``, because the client broke a rule (RFC 9113, 5.4.2)."""
        stream.abandon()
        self.rst_stream(stream.id, code)

    # -------------------------------------------------------------------------------------------------------- 6.8: the end

    def goaway(self, violation: Violation) -> None:
        """Sends GOAWAY with the code and reason of ``violation``, because the connection ends (RFC 9113, 5.4.1)."""
        last = self.numbers.last if self._last_told is None else self._last_told
        self.write(frames.goaway(last, violation.code, violation.reason))

    def announce_end(self) -> None:
        """Sends the first GOAWAY of a graceful end, and a PING whose answer shows that the client has read the GOAWAY."""
        self.phase = ConnectionPhase.ANNOUNCED
        self.write(frames.goaway(STREAM_ID, frames.NO_ERROR) + frames.frame(frames.PING, 0, 0, _LAST_CALL))

    def end(self) -> None:
        """Sends the second GOAWAY of a graceful end. Does nothing if ``announce_end`` has not sent the first GOAWAY."""
        if self.phase is ConnectionPhase.ANNOUNCED:
            self.phase = ConnectionPhase.ENDING
            self._last_told = self.numbers.last
            self.write(frames.goaway(self._last_told, frames.NO_ERROR))

    def stop(self, now: float) -> None:
        """Ends the connection because the server stops. Each stream ends once its accepted requests are answered.

        ``now``: seconds of the front's clock.
        """
        self.end()
        for stream in list(self.streams.values()):
            stream.stop(now)

    def abandon_streams(self) -> None:
        """Ends all streams without a response, because the connection is being closed."""
        call_each([stream.abandon for stream in self.streams.values()], "leaving a call")

    def connection_lost(self) -> None:
        """Drops all queued bytes and ends all streams, because the client has disconnected."""
        self.phase = CLOSED
        self.out.clear()
        self.abandon_streams()
        # Each refers to the other, and connections shall leave the garbage collector nothing to do.
        self.is_flushing = True
        del self.connection

    # ------------------------------------------------------------------------------------------------------------ bounds

    def _look_for_floods(self) -> None:
        self._floods.look(self._frames, self.answered, self._granted + self._ungranted + self.sent)

    def check(self, now: float, seconds: float, unread: bool) -> None:
        """Ends each call whose client sends a message too slowly or reads responses too slowly.

        Args:
          now: seconds of the front's clock.
          seconds: how many seconds have passed since the last check.
          unread: whether reading from the client is paused. If it is paused, an incomplete frame is not late, nor is the
            client silent.
        Raises Violation if the client sends too many frames, or if a frame or header block takes too long to arrive.
        """
        for stream in list(self.streams.values()):
            stream.check(now, seconds if unread else 0.0)
        self._floods.second(seconds)
        self._look_for_floods()
        if unread:
            self.heard_at = self._half_since = self._continued_since = self._data_since = now
            return
        options = self.serving.options
        if (self._buffer and now - self._half_since > options.head_timeout) or (
            self._continued is not None and now - self._continued_since > options.head_timeout
        ):
            raise Violation(
                frames.ENHANCE_YOUR_CALM,
                f"a frame, or a header block, was not whole within head_timeout, {options.head_timeout:g} s",
            )
        if self.data_left and now - self._data_since > options.body_timeout:
            raise Violation(
                frames.ENHANCE_YOUR_CALM, f"DATA was not whole within body_timeout, {options.body_timeout:g} s"
            )

    def __repr__(self) -> str:
        return f"<Http2 {self.phase.value} streams={len(self.streams)} blocked={len(self.blocked)}>"
