"""A connection's incoming DATA: the windows it has to keep to, and the way of its payload to where it belongs.

A payload may arrive in any number of reads. What of it belongs to a tensor that has its place already is read there straight
from the socket (``tensord.daemon.front.body_reader``); everything else goes through ``Stream.receive``.
Source: RFC 9113, sections 5.2, 6.1 and 6.9.
"""

from __future__ import annotations

from tensord.daemon.front.body_reader import DIRECT_BYTE_SIZE, BodyReader
from tensord.daemon.grpc import frames
from tensord.daemon.grpc.frame_payload import FramePayload
from tensord.daemon.grpc.frames import END_STREAM, Violation
from tensord.daemon.grpc.outgoing import Outgoing, Phase
from tensord.daemon.grpc.serving import Serving
from tensord.daemon.grpc.stream import Stream
from tensord.daemon.grpc.stream_numbers import Past

#: What a client may send, of a stream and of all together, before it is granted again.
STREAM_WINDOW = 4 << 20
CONNECTION_WINDOW = 64 << 20
#: More than that is granted again.
_MUCH_OF_STREAM = STREAM_WINDOW // 4
_MUCH_OF_CONNECTION = CONNECTION_WINDOW // 4
#: So many reads without anything large, and the connection is read as any other again.
_MAX_READS_SINCE = 16
#: A window is below 2^31; what of a message is beyond this is granted as it comes.
_MAX_AHEAD = 1 << 30


class DataFrames(Outgoing):
    """The part of an incoming half that DATA is for."""

    def __init__(self, serving: Serving) -> None:
        super().__init__(serving)
        #: Bytes taken from the client and not granted again yet.
        self._ungranted = 0
        #: All that was granted again so far.
        self._granted = 0
        #: When anything last came from the client, loop time.
        self._heard_at = self.loop.time()
        #: A DATA frame whose payload is still arriving: bytes left, since when, its flags and its stream.
        self._data_left = 0
        self._data_since = 0.0
        self._data_flags = 0
        self._data_stream: Stream | None = None
        #: Reads what is large in our place; there while the connection sends such. What came since it last had something to do.
        self._reader: BodyReader | None = None
        self._reads_since = 0
        #: What came has to wait for the next turn of the loop.
        self._resting = False
        #: What that reads now.
        self._payload: FramePayload | None = None

    def _data(self, number: int, flags: int, data: bytes, start: int, end: int) -> None:
        """A whole DATA frame without padding, whose payload are those bytes of a chunk."""
        stream = self.streams.get(number)
        if stream is not None and not stream.half_closed:
            ungranted = stream.ungranted + end - start
            total = self._ungranted + end - start
            if ungranted <= _MUCH_OF_STREAM and total <= _MUCH_OF_CONNECTION:
                stream.ungranted, self._ungranted = ungranted, total
                if start < end:
                    stream.receive(data, start, end)
                if flags:
                    stream.end_receiving()
                return
        self._any_data(number, flags, data[start:end])

    def _any_data(self, number: int, flags: int, payload: bytes) -> None:
        """A whole DATA frame."""
        stream = self._data_target(number, len(payload))
        if stream is None:
            return
        if flags & frames.PADDED:
            payload = frames.unpadded(payload)
        if payload:
            stream.receive(payload, 0, len(payload))
        self._data_taken(stream, flags)

    def _data_taken(self, stream: Stream, flags: int) -> None:
        if flags & END_STREAM:
            stream.end_receiving()
        elif stream.ungranted > _MUCH_OF_STREAM:
            self.grant(stream)

    def _data_begins(self, number: int, flags: int, size: int) -> None:
        self._data_stream = self._data_target(number, size)
        self._data_left, self._data_flags = size, flags
        self._data_since = self._heard_at

    def _data_arrives(self, data: bytes, at: int) -> int:
        """Takes what is here of the payload; returns where the next frame begins."""
        end = min(len(data), at + self._data_left)
        self._data_left -= end - at
        stream = self._data_stream
        if stream is not None and not stream.ended and end > at:
            stream.receive(data, at, end)
        if not self._data_left:
            self._data_ends()
        return end

    def _data_ends(self) -> None:
        """The payload is whole."""
        stream, self._data_stream = self._data_stream, None
        if stream is not None and not stream.ended:
            self._data_taken(stream, self._data_flags)

    def _read_directly(self) -> None:
        """Has the rest of the payload read to where it belongs, if that is known, and takes the transport back later."""
        stream, reader = self._data_stream, self._reader
        if self.phase is Phase.CLOSED or self._paused_since or self._resting:
            return
        if stream is not None and not stream.ended and self.is_plain:
            place = stream.room()[: self._data_left]
            if len(place) >= DIRECT_BYTE_SIZE:
                assert self._transport is not None
                if reader is None:
                    reader = self._reader = BodyReader(self, self._transport)
                self._reads_since = 0
                self._payload = FramePayload(place, self._heard)
                reader.receive(self._payload)
                return
        if reader is not None:
            self._reads_since += 1
            if self._reads_since > _MAX_READS_SINCE:
                self._reader = None
                reader.leave()

    def _taken_directly(self, stream: Stream) -> int:
        """Bytes of that stream that were read past us, and that it was not told of."""
        return self._payload.taken if self._payload is not None and stream is self._data_stream else 0

    def _heard(self) -> None:
        self._heard_at = self.loop.time()

    def direct_body_complete(self) -> None:
        """What belonged to the tensor was read past us: what comes next comes here again."""
        self._flushing = True
        payload, self._payload = self._payload, None
        assert payload is not None
        self._data_left -= payload.byte_size
        if self._data_stream is not None:
            self._data_stream.advance(payload.byte_size)
        if not self._data_left:
            self._data_ends()
        self._flushing = False
        if self._out or self.phase is Phase.ENDING:
            self._flush()

    def stop_direct(self, stream: Stream) -> None:
        """What is under way of that stream is not wanted any more."""
        if self._payload is not None and self._data_stream is stream:
            assert self._reader is not None
            self._reader.stop()
            self._data_left -= self._payload.taken
            self._payload = None

    def _data_target(self, number: int, size: int) -> Stream | None:
        """The stream a DATA frame is for, its windows reduced; None: one that ended meanwhile."""
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
            self.cut(number, frames.STREAM_CLOSED)
        elif past is not Past.CUT:
            raise Violation(frames.STREAM_CLOSED, f"DATA for stream {number}, which has ended")

    def grant(self, stream: Stream) -> None:
        """Lets the client send again what it sent, unless its call has enough to do."""
        if stream.ungranted > 0 and not (stream.held or stream.half_closed or stream.ended or stream.waits_for_room):
            self.write(frames.window_update(stream.id, stream.ungranted))
            stream.ungranted = 0

    def grant_ahead(self, stream: Stream, byte_size: int) -> None:
        """Lets the client send all that is left of a message, which has its place already, and then as much as it always may."""
        ahead = min(byte_size, _MAX_AHEAD)
        if byte_size > STREAM_WINDOW - stream.ungranted and not stream.half_closed and not stream.ended:
            self.write(frames.window_update(stream.id, stream.ungranted + ahead))
            # Once all of it has come, what is granted is as much as before.
            stream.ungranted = -ahead
