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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from daemon.grpc import frames, header_blocks
from daemon.grpc.codes import DEADLINE_EXCEEDED, INTERNAL, OK, RESOURCE_EXHAUSTED, UNIMPLEMENTED
from daemon.grpc.header_blocks import CallHead

if TYPE_CHECKING:
    from daemon.grpc.connection import Connection

_log = logging.getLogger(__name__)
Buffer = bytes | memoryview
_prefix = struct.Struct(">BI")
_PREFIX_SIZE = 5
#: Answers up to this size leave in one piece.
_SMALL = 16384
#: Less is not worth compressing.
_MIN_COMPRESSED = 512


class Call(ABC):
    """What a method does with one stream. Nothing is called any more after ``abandoned``."""

    @abstractmethod
    def message(self, content: Buffer) -> None:
        """A whole message from the client."""

    @abstractmethod
    def half_closed(self) -> None:
        """The client sends no more messages."""

    @abstractmethod
    def abandoned(self) -> None:
        """Nobody waits for an answer: the client went away, or the deadline passed."""


class Stream:
    """Owned by its connection until ``ended``."""

    __slots__ = (
        "_blocked",
        "_content",
        "_content_size",
        "_expected",
        "_finished",
        "_head_sent",
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
        self._content: list[Buffer] = []
        self._content_size = 0
        #: Size of the message being collected with its prefix; 0: not known yet.
        self._expected = 0
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
        if not self._content_size and size >= _PREFIX_SIZE:
            flag, length = _prefix.unpack_from(piece)
            if length == size - _PREFIX_SIZE and length <= self.connection.serving.max_message:
                self._deliver(flag, piece[_PREFIX_SIZE:])
                return
        self._collect(piece)

    def _collect(self, piece: Buffer) -> None:
        """A message in several pieces, or several messages in one."""
        self._content.append(piece)
        self._content_size += len(piece)
        self.connection.serving.collected += len(piece)
        while not self._finished and self._content_size >= _PREFIX_SIZE:
            if not self._expected:
                first = self._content[0] if len(self._content[0]) >= _PREFIX_SIZE else b"".join(self._content)
                limit, (_, length) = self.connection.serving.max_message, _prefix.unpack_from(first)
                if length > limit:
                    self._drop()
                    self.refuse(RESOURCE_EXHAUSTED, f"Received message larger than max ({length} vs. {limit})")
                    return
                self._expected = _PREFIX_SIZE + length
            if self._content_size < self._expected:
                break
            whole = memoryview(b"".join(self._content) if len(self._content) > 1 else self._content[0])
            message, rest = whole[: self._expected], whole[self._expected :]
            self.connection.serving.collected -= self._expected
            self._content = [rest] if rest else []
            self._content_size = len(rest)
            self._expected = 0
            self._deliver(message[0], bytes(message[_PREFIX_SIZE:]) if rest else message[_PREFIX_SIZE:])
        if self._finished:
            return
        if not self._content_size:
            self.partial_since = 0.0
        elif not self.partial_since:
            self.partial_since = self.connection.loop.time()
        if self.connection.serving.collected > self.connection.serving.max_collected:
            limit = self.connection.serving.max_collected
            self.refuse(RESOURCE_EXHAUSTED, f"more than {limit} bytes of request messages are being received at once")

    def _drop(self) -> None:
        self.connection.serving.collected -= self._content_size
        self._content.clear()
        self._content_size = 0
        self.partial_since = 0.0

    def _deliver(self, flag: int, content: Buffer) -> None:
        assert self.call is not None
        if flag:
            inflated = self._inflated(content) if flag == 1 else None
            if inflated is None:
                return
            content = inflated
        try:
            self.call.message(content)
        except Exception:
            self._defect()

    def _inflated(self, content: Buffer) -> bytes | None:
        """The message behind gzip or deflate; None: refused."""
        encoding, limit = self.head.encoding, self.connection.serving.max_message
        if encoding not in ("gzip", "deflate"):
            self.refuse(
                UNIMPLEMENTED, f"message encoding '{encoding[:32]}' is not supported; identity, deflate and gzip are"
            )
            return None
        inflate = zlib.decompressobj(31 if encoding == "gzip" else 15)
        try:
            whole = inflate.decompress(content, limit + 1)
        except zlib.error:
            whole = b""
        if len(whole) > limit:
            self.refuse(
                RESOURCE_EXHAUSTED, f"Received message larger than max ({len(whole)} vs. {limit}) after decompression"
            )
        elif not inflate.eof or inflate.unused_data:
            self.refuse(INTERNAL, f"a message is not valid {encoding} data")
        else:
            return whole
        return None

    def end_receiving(self) -> None:
        """The client half-closed."""
        self.half_closed = True
        if self._finished:
            return
        if self._content_size:
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
