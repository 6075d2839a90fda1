"""One call: an HTTP/2 stream with length-prefixed messages both ways. The connection feeds it; a ``Call`` gives it sense.

    | compressed 8 | length 32 | message: length bytes |     any number of them, cut into DATA frames anywhere

What the client may still send is bounded by the window it was granted; what it does not take waits in the stream, and a stream
with much unsent grants nothing more, so a client that never reads its answers stops itself.
Source: gRPC's PROTOCOL-HTTP2.md, RFC 9113 sections 5 and 6.9.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from daemon.grpc import frames, header_blocks
from daemon.grpc.arriving_message import ArrivingMessage
from daemon.grpc.call import Buffer, Call
from daemon.grpc.codes import DEADLINE_EXCEEDED, INTERNAL, OK, RESOURCE_EXHAUSTED
from daemon.grpc.header_blocks import CallHead
from daemon.grpc.inflation import Refused, inflated

if TYPE_CHECKING:
    from daemon.grpc.connection import Connection

_log = logging.getLogger(__name__)
_prefix = struct.Struct(">BI")
_PREFIX_SIZE = 5
#: Answers up to this size leave in one piece.
_SMALL = 16384
#: Less is not worth compressing.
_MIN_COMPRESSED = 512
#: Larger messages that do not come in one piece may go to where a worker reads them while they arrive.
_RECEIVED_BYTE_SIZE = 64 << 10


class Stream:
    """Owned by its connection until ``ended``."""

    __slots__ = (
        "_arriving",
        "_begun",
        "_blocked",
        "_finished",
        "_head_sent",
        "_kept",
        "_on_sent",
        "_timer",
        "_trailers",
        "_unsent",
        "call",
        "connection",
        "deadline_ns",
        "ended",
        "half_closed",
        "head",
        "held",
        "id",
        "partial_since",
        "receive_window",
        "send_window",
        "ungranted",
        "unsent_size",
    )

    def __init__(
        self, connection: Connection, number: int, head: CallHead, send_window: int, receive_window: int
    ) -> None:
        self.connection = connection
        self.id = number
        self.head = head
        self.call: Call | None = None
        #: What may still be sent to the client, and by it.
        self.send_window = send_window
        self.receive_window = receive_window
        #: Bytes taken from the client and not granted again yet.
        self.ungranted = 0
        #: No window is granted while this is set: the call has enough to do.
        self.held = False
        #: CLOCK_MONOTONIC; 0: the caller waits for ever.
        self.deadline_ns = 0
        self.half_closed = False
        self.ended = False
        #: Since when a message is incomplete, loop time; 0: none is.
        self.partial_since = 0.0
        #: The first bytes of a message whose prefix is not whole, or the message of which a part is here.
        self._begun = b""
        self._arriving: ArrivingMessage | None = None
        #: What of ``Serving.collected`` is this stream's.
        self._kept = 0
        self._head_sent = False
        self._finished = False
        self._unsent: deque[Buffer] = deque()
        self.unsent_size = 0
        self._on_sent: list[Callable[[], None]] = []
        self._trailers = b""
        self._blocked = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, call: Call) -> None:
        """The call that answers; its deadline runs from now."""
        self.call = call
        if self.head.timeout_ns:
            self.deadline_ns = time.monotonic_ns() + self.head.timeout_ns
            self._timer = self.connection.loop.call_later(self.head.timeout_ns / 1e9, self._expired)

    # ----------------------------------------------------------------------------------------------- receiving

    def receive(self, piece: Buffer) -> None:
        """A piece of the client's messages."""
        if self._finished:
            return
        size = len(piece)
        if self._arriving is None and not self._begun and size >= _PREFIX_SIZE:
            flag, length = _prefix.unpack_from(piece)
            if length == size - _PREFIX_SIZE and length <= self.connection.serving.max_message:
                self._deliver(flag, piece[_PREFIX_SIZE:])
                return
        self._take(memoryview(piece))
        self._note()

    def _take(self, piece: memoryview) -> None:
        """Messages in several pieces, or several in one."""
        at, end = 0, len(piece)
        while at < end and not self._finished:
            arriving = self._arriving
            if arriving is None:
                known = len(self._begun)
                self._begun += piece[at : at + _PREFIX_SIZE - known]
                at += len(self._begun) - known
                if len(self._begun) < _PREFIX_SIZE:
                    return
                (flag, length), self._begun = _prefix.unpack(self._begun), b""
                limit = self.connection.serving.max_message
                if length > limit:
                    self.refuse(RESOURCE_EXHAUSTED, f"Received message larger than max ({length} vs. {limit})")
                    return
                self.partial_since = 0.0
                if length <= end - at:
                    content = piece[at : at + length]
                    at += length
                    # What is kept of a piece keeps all of it.
                    self._deliver(flag, bytes(content) if at < end else content)
                    continue
                assert self.call is not None
                reception = self.call.reception(length) if not flag and length > _RECEIVED_BYTE_SIZE else None
                arriving = self._arriving = ArrivingMessage(flag, length, reception, self._room_came)
            size = min(arriving.left, end - at)
            arriving.feed(piece[at : at + size])
            at += size
            if not arriving.left:
                self._arrived(arriving)

    def room(self) -> memoryview:
        """Where the next bytes of its DATA may be written; empty: ``receive`` takes them."""
        return memoryview(b"") if self._arriving is None else self._arriving.rest()

    def advance(self, byte_size: int) -> None:
        """That many bytes were written into ``room``. ``advanced`` is due when enough of them were."""
        assert self._arriving is not None
        self._arriving.advance(byte_size)

    def advanced(self) -> None:
        """Nothing more is written into ``room`` for now."""
        if self._arriving is not None and not self._arriving.left:
            self._arrived(self._arriving)
            self._note()

    @property
    def waits_for_room(self) -> bool:
        """Whether a message under way has no place to go yet."""
        return self._arriving is not None and self._arriving.waits

    def _room_came(self) -> None:
        """A message that waited for room is placed, or refused: from now on the client's time runs again."""
        self.partial_since = 0.0
        self._note()
        self.connection.grant(self)

    def _note(self) -> None:
        """After every change: what is kept here of messages under way, since when, and how much more of one is welcome."""
        if self._finished:
            return
        arriving, serving = self._arriving, self.connection.serving
        kept = len(self._begun)
        if arriving is not None:
            kept += arriving.kept_byte_size
            if arriving.is_placed and not arriving.is_granted and not self.held:
                arriving.is_granted = True
                self.connection.grant_ahead(self, arriving.left)
        elif not kept:
            self.partial_since = 0.0
        if not self.partial_since and (kept or arriving is not None):
            self.partial_since = self.connection.loop.time()
        serving.collected += kept - self._kept
        self._kept = kept
        if serving.collected > serving.max_collected:
            limit = serving.max_collected
            self.refuse(RESOURCE_EXHAUSTED, f"more than {limit} bytes of request messages are being received at once")

    def _drop(self) -> None:
        self._begun = b""
        if self._arriving is not None:
            self.connection.stop_direct(self)
            self._arriving.drop()
            self._arriving = None
        self.connection.serving.collected -= self._kept
        self._kept = 0
        self.partial_since = 0.0

    def _arrived(self, arriving: ArrivingMessage) -> None:
        """The message under way is whole."""
        self._arriving = None
        self.partial_since = 0.0
        if not arriving.is_placed:
            content = arriving.content()
            arriving.drop()
            self._deliver(arriving.flag, content)
            return
        assert self.call is not None
        assert arriving.reception is not None
        try:
            self.call.received(arriving.reception)
        except Exception:
            arriving.drop()
            self._defect()

    def _deliver(self, flag: int, content: Buffer) -> None:
        assert self.call is not None
        try:
            if flag:
                content = inflated(
                    content, self.head.encoding if flag == 1 else "", self.connection.serving.max_message
                )
            self.call.message(content)
        except Refused as refused:
            self.refuse(refused.code, refused.message)
        except Exception:
            self._defect()

    def end_receiving(self) -> None:
        """The client half-closed."""
        self.half_closed = True
        if self._finished:
            return
        if self._arriving is not None or self._begun:
            self.refuse(INTERNAL, "the stream ended in the middle of a message")
            return
        assert self.call is not None
        try:
            self.call.half_closed()
        except Exception:
            self._defect()

    def _defect(self) -> None:
        """Ours, and no reason to leave a client without its answer."""
        _log.exception("a call of %s met a defect of the server", self.head.path)
        self.refuse(INTERNAL, "internal error; the server's log has the details")

    # ------------------------------------------------------------------------------------------------- sending

    def answer(self, parts: list[Buffer], on_sent: Callable[[], None] | None = None) -> None:
        """The one message of a unary call, and the end. ``on_sent``: its bytes are not looked at any more."""
        if self._finished:
            if on_sent is not None:
                on_sent()
            return
        size = sum(map(len, parts))
        connection = self.connection
        framed = size + _PREFIX_SIZE
        if (
            framed > _SMALL
            or framed > connection.max_frame_size
            or framed > connection.send_window
            or framed > self.send_window
            or self._compresses(size)
            or self._head_sent
        ):
            self.send(parts, on_sent)
            self.finish(OK)
            return
        connection.send_window -= framed
        number = self.id
        connection.write(
            b"".join(
                (
                    frames.head(frames.HEADERS, frames.END_HEADERS, number, len(header_blocks.RESPONSE)),
                    header_blocks.RESPONSE,
                    frames.head(frames.DATA, 0, number, framed),
                    _prefix.pack(0, size),
                    *parts,
                    frames.head(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, number, _TRAILERS_OK_SIZE),
                    header_blocks.TRAILERS_OK,
                )
            )
        )
        self._finished = True
        if on_sent is not None:
            on_sent()
        self._close()

    def send(self, parts: list[Buffer], on_sent: Callable[[], None] | None = None) -> None:
        """One message; what the windows do not allow yet waits. ``on_sent``: its bytes are not looked at any more."""
        if self._finished:
            if on_sent is not None:
                on_sent()
            return
        size = sum(map(len, parts))
        compressed = self._compresses(size)
        if not self._head_sent:
            self._send_head()
        framed = size + _PREFIX_SIZE
        connection = self.connection
        if (
            framed <= _SMALL
            and not self._unsent
            and not compressed
            and framed <= self.send_window
            and framed <= connection.send_window
            and framed <= connection.max_frame_size
            and framed <= connection.buffer_room()
        ):
            self.send_window -= framed
            connection.send_window -= framed
            connection.answered = True
            connection.write(b"".join((frames.head(frames.DATA, 0, self.id, framed), _prefix.pack(0, size), *parts)))
            if on_sent is not None:
                on_sent()
            return
        flag = 0
        if compressed:
            deflate = zlib.compressobj(self.connection.serving.compression, wbits=31)
            parts = [deflate.compress(b"".join(parts)) + deflate.flush()]
            size, flag = len(parts[0]), 1
        prefix = _prefix.pack(flag, size)
        if size <= _SMALL:
            self._unsent.append(b"".join((prefix, *parts)))
        else:
            self._unsent.append(prefix)
            # TLS copies when it comes to it, and says nothing of when that was.
            plain = self.connection.is_plain
            self._unsent.extend(memoryview(part if plain else bytes(part)) for part in parts if len(part))
        self.unsent_size += size + _PREFIX_SIZE
        if on_sent is not None:
            self._on_sent.append(on_sent)
        self.pump()

    def send_later(self, on_sent: Callable[[], None]) -> None:
        """``on_sent`` is called when everything unsent has left."""
        self._on_sent.append(on_sent)

    def finish(self, code: int, message: str = "") -> None:
        """The status; nothing is sent after it."""
        if self._finished:
            return
        self._finished = True
        self._drop()
        self._trailers = header_blocks.trailers(code, message) if code or message else header_blocks.TRAILERS_OK
        if not self._head_sent:
            self._head_sent = True
            self._trailers = header_blocks.trailers_only(code, message)
        self.pump()

    def refuse(self, code: int, message: str) -> None:
        """Ends a call over what its client sent: the status, and the call is told that nobody waits."""
        if not self._finished:
            self.finish(code, message)
            if self.call is not None:
                self.call.abandoned()

    def answer_http(self, status: int) -> None:
        """An answer to what is no gRPC call."""
        self._finished = self._head_sent = True
        self._trailers = header_blocks.http_error(status)
        self.pump()

    def pump(self) -> None:
        """Sends what the windows and the socket's buffer allow, then the trailers."""
        connection = self.connection
        while self._unsent:
            room = min(self.send_window, connection.send_window, connection.max_frame_size, connection.buffer_room())
            if room <= 0:
                if not self._blocked:
                    self._blocked = True
                    connection.blocked[self.id] = self
                return
            pieces: list[Buffer] = []
            size = 0
            while self._unsent and size < room:
                piece = self._unsent[0]
                if len(piece) <= room - size:
                    self._unsent.popleft()
                else:
                    self._unsent[0] = memoryview(piece)[room - size :]
                    piece = memoryview(piece)[: room - size]
                pieces.append(piece)
                size += len(piece)
            self.send_window -= size
            connection.send_window -= size
            connection.answered = True
            self.unsent_size -= size
            header = frames.head(frames.DATA, 0, self.id, size)
            if size < _SMALL // 2:
                connection.write(b"".join((header, *pieces)))
            else:
                connection.write(header)
                for piece in pieces:
                    connection.write(piece)
        if self._blocked:
            self._blocked = False
            connection.blocked.pop(self.id, None)
        self._sent()
        if self._trailers:
            flags = frames.END_HEADERS | frames.END_STREAM
            connection.write(frames.frame(frames.HEADERS, flags, self.id, self._trailers))
            self._close()

    def _sent(self) -> None:
        """Everything is handed to the connection: what waits for it to have left waits there."""
        if self._on_sent:
            waiting, self._on_sent = self._on_sent, []
            for on_sent in waiting:
                self.connection.when_written(on_sent)

    def _send_head(self) -> None:
        self._head_sent = True
        compresses = bool(self.connection.serving.compression) and "gzip" in self.head.accepts
        block = header_blocks.RESPONSE_GZIP if compresses else header_blocks.RESPONSE
        self.connection.write(frames.frame(frames.HEADERS, frames.END_HEADERS, self.id, block))

    def _compresses(self, size: int) -> bool:
        return bool(self.connection.serving.compression) and size >= _MIN_COMPRESSED and "gzip" in self.head.accepts

    # -------------------------------------------------------------------------------------------------- ending

    def _expired(self) -> None:
        if not self._finished:
            self._timer = None
            self._unsent.clear()
            self.refuse(DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _close(self) -> None:
        """Our side is done. A client that still sends is told to stop."""
        if not self.half_closed:
            self.connection.write(frames.rst_stream(self.id, frames.NO_ERROR))
        self._end()

    def abandon(self) -> None:
        """The client reset the stream, or the connection is gone."""
        if self.ended:
            return
        waited = not self._finished
        self._finished = True
        self._end()
        if waited and self.call is not None:
            self.call.abandoned()

    def _end(self) -> None:
        self.ended = True
        self._drop()
        self._unsent.clear()
        self.unsent_size = 0
        self._sent()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._blocked:
            self.connection.blocked.pop(self.id, None)
        self.connection.stream_ended(self)

    def __repr__(self) -> str:
        return f"<Stream {self.id} {self.head.path} unsent={self.unsent_size} half_closed={self.half_closed}>"


_TRAILERS_OK_SIZE = len(header_blocks.TRAILERS_OK)
