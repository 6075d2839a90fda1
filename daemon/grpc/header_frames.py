"""A connection's incoming HEADERS and CONTINUATION: the blocks put together, streams opened by them, and streams ended.

A request that is malformed ends its own stream. What contradicts the life of streams ends the connection, and so does a block
that cannot be decoded: what it would have put into the table stays unknown, so no later block could be understood.
Source: RFC 9113, sections 4.3, 5.1, 6.2 and 8.1.
"""

from __future__ import annotations

from tensord.daemon.front.access import Restricted
from tensord.daemon.grpc import frames
from tensord.daemon.grpc.codes import UNAVAILABLE, UNIMPLEMENTED
from tensord.daemon.grpc.data_frames import DataFrames
from tensord.daemon.grpc.floods import HEADER_BYTES_A_FRAME
from tensord.daemon.grpc.frames import END_HEADERS, END_STREAM, Violation
from tensord.daemon.grpc.header_blocks import CallHead, HeaderBlocks
from tensord.daemon.grpc.header_rules import Malformed
from tensord.daemon.grpc.measured_stream import MeasuredStream
from tensord.daemon.grpc.outgoing import ENDING
from tensord.daemon.grpc.serving import Serving
from tensord.daemon.grpc.stream import Stream
from tensord.daemon.grpc.stream_numbers import Past

#: Frames that one header block may come in.
_MAX_PIECES = 64


class HeaderFrames(DataFrames):
    """The part of an incoming half that header blocks are for."""

    def __init__(self, serving: Serving) -> None:
        super().__init__(serving)
        #: What a new stream may send to the client.
        self._peer_window = frames.DEFAULT_WINDOW
        self._blocks = HeaderBlocks(serving.options.max_head_byte_size)
        #: A header block in several frames: its stream, flags and pieces; and since when it is incomplete, loop time.
        self._continued: tuple[int, int, list[bytes]] | None = None
        self._continued_since = 0.0

    def _headers(self, number: int, flags: int, payload: bytes) -> int:
        """Any HEADERS frame. Returns what it cost, in frames that cost nothing else."""
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
            self._continued_since = self._heard_at
            return 0
        return self._head(number, flags, payload)

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
        return self._head(number, first_flags, b"".join(pieces))

    def _head(self, number: int, flags: int, block: bytes) -> int:
        """A whole header block: a new stream, or the trailers of one. Returns what decoding it cost, in frames."""
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
            self.cut(number, frames.PROTOCOL_ERROR)
            return cost
        if self.phase is ENDING:
            numbers.cut(number)
            return cost
        if len(self.streams) >= self.serving.options.max_concurrent_streams:
            self.cut(number, frames.REFUSED_STREAM)
            return cost
        make = Stream if head.content_length is None else MeasuredStream
        stream = self.streams[number] = make(self, number, head, self._peer_window)  # type: ignore[arg-type]
        self._open(stream, head)
        if flags & END_STREAM:
            stream.end_receiving()
        return cost

    def _trailers(self, number: int, flags: int, block: bytes) -> None:
        """Of a stream that was opened before."""
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
            stream.end_receiving()
        elif past is Past.RESET:
            self.cut(number, frames.STREAM_CLOSED)

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
