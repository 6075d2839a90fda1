"""The sending half of a stream: messages cut to the windows, then the status. ``Stream`` is the other half, and owns both.

    HEADERS ─▶ | compressed 8 | length 32 | message: length bytes | ... in DATA frames ─▶ HEADERS: the trailers

What the windows or the socket do not take yet waits here as it lies, and whoever it belongs to hears when it has left.
Source: gRPC's PROTOCOL-HTTP2.md, RFC 9113 section 6.9.
"""

from __future__ import annotations

import struct
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial

from tensord.daemon.front.each import call_each
from tensord.daemon.front.pace import Pace
from tensord.daemon.grpc import frames, header_blocks
from tensord.daemon.grpc.codes import OK
from tensord.daemon.grpc.header_blocks import CallHead
from tensord.daemon.grpc.link import Link
from tensord.shm.messages import Buffer

#: Before each message, either way: whether it is compressed, and its length.
PREFIX = struct.Struct(">BI")
read_prefix = PREFIX.unpack_from
#: Answers up to this size leave in one piece: no client takes smaller frames only.
SMALL = 16384
#: Less is not worth compressing.
MIN_COMPRESSED = 512
_TRAILERS_OK_SIZE = len(header_blocks.TRAILERS_OK)


class Reply(ABC):
    """What one call is answered."""

    # What nearly every call leaves as it is costs nothing here.
    _head_sent = False
    #: The status is known: nothing is added any more.
    _finished = False
    #: Something waits for its window, for the connection's, or for the socket.
    blocked = False
    #: What waits for a window, or for the socket.
    _unsent: deque[Buffer] | None = None
    unsent_size = 0
    #: Since when some of it has not left, loop time, while it is blocked; how much has left that was; and whether that is enough.
    _blocked_since = 0.0
    _taken = 0
    _pace: Pace | None = None
    #: Who waits for all of that to have left.
    _on_sent: list[Callable[[], None]] | None = None
    _trailers = b""

    def __init__(self, connection: Link, number: int, head: CallHead, send_window: int) -> None:
        self.connection = connection
        self.id = number
        self.head = head
        #: What may still be sent to the client.
        self.send_window = send_window

    def answer(self, parts: list[Buffer], on_sent: Callable[[], None] | None = None) -> None:
        """The one message of a unary call, and the end. ``on_sent``: its bytes are not looked at any more."""
        if self._finished:
            if on_sent is not None:
                on_sent()
            return
        size = sum(map(len, parts))
        connection = self.connection
        framed = size + PREFIX.size
        if (
            framed > SMALL
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
                    PREFIX.pack(0, size),
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
        framed = size + PREFIX.size
        connection = self.connection
        if (
            not self._unsent
            and not compressed
            and framed <= self.send_window
            and framed <= connection.send_window
            and framed <= connection.max_frame_size
            and framed <= connection.room
            # TLS copies what is large, and says nothing of when that was.
            and (framed <= SMALL or connection.is_plain)
        ):
            self.send_window -= framed
            connection.send_window -= framed
            connection.answered += 1
            head = frames.head(frames.DATA, 0, self.id, framed) + PREFIX.pack(0, size)
            if framed <= SMALL:
                connection.write(b"".join((head, *parts)))
                if on_sent is not None:
                    on_sent()
                return
            connection.sent += framed
            connection.write_pieces([head, *parts])
            if on_sent is not None:
                connection.when_written(on_sent)
            return
        flag = 0
        if compressed:
            deflate = zlib.compressobj(self.connection.serving.compression, wbits=31)
            parts = [deflate.compress(b"".join(parts)) + deflate.flush()]
            size, flag = len(parts[0]), 1
        prefix = PREFIX.pack(flag, size)
        if self._unsent is None:
            self._unsent = deque()
        if size <= SMALL:
            self._unsent.append(b"".join((prefix, *parts)))
        else:
            self._unsent.append(prefix)
            # TLS copies when it comes to it, and says nothing of when that was.
            plain = self.connection.is_plain
            self._unsent.extend(memoryview(part if plain else bytes(part)) for part in parts if len(part))
        self.unsent_size += size + PREFIX.size
        connection.answered += 1
        if on_sent is not None:
            self.send_later(on_sent)
        self.pump()

    def send_later(self, on_sent: Callable[[], None]) -> None:
        """``on_sent`` is called when everything unsent has left."""
        if self._on_sent is None:
            self._on_sent = []
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

    def answer_http(self, status: int) -> None:
        """An answer to what is no gRPC call."""
        self._finished = self._head_sent = True
        self._trailers = header_blocks.http_error(status)
        self.pump()

    def pump(self) -> None:
        """Sends what the windows and the socket's buffer allow, then the trailers."""
        connection, unsent = self.connection, self._unsent
        while unsent:
            room = min(self.send_window, connection.send_window, connection.max_frame_size, connection.room)
            if room <= 0:
                if not self.blocked:
                    self.blocked = True
                    self._blocked_since = connection.loop.time()
                if self.send_window > 0:
                    connection.blocked[self.id] = self
                else:
                    connection.blocked.pop(self.id, None)
                return
            pieces: list[Buffer] = []
            size = 0
            while unsent and size < room:
                piece = unsent[0]
                if len(piece) <= room - size:
                    unsent.popleft()
                else:
                    unsent[0] = memoryview(piece)[room - size :]
                    piece = memoryview(piece)[: room - size]
                pieces.append(piece)
                size += len(piece)
            self.send_window -= size
            connection.send_window -= size
            connection.sent += size
            self.unsent_size -= size
            self._taken += size
            header = frames.head(frames.DATA, 0, self.id, size)
            if size < SMALL // 2:
                connection.write(b"".join((header, *pieces)))
            else:
                connection.write(header)
                for piece in pieces:
                    connection.write(piece)
        if self.blocked:
            self.blocked = False
            self._blocked_since = 0.0
            connection.blocked.pop(self.id, None)
        self._sent()
        if self._trailers:
            flags = frames.END_HEADERS | frames.END_STREAM
            connection.write(frames.frame(frames.HEADERS, flags, self.id, self._trailers))
            self._close()

    def _sent(self) -> None:
        """Everything is handed to the connection: what waits for it to have left waits there."""
        if self._on_sent:
            waiting, self._on_sent = self._on_sent, None
            when_written = self.connection.when_written
            call_each((partial(when_written, on_sent) for on_sent in waiting), "what follows an answer")

    def _is_stalled(self, now: float) -> bool:
        """Whether its client lets too little of an answer go, by whatever: the stream's window, the connection's, the socket."""
        if not self.blocked:
            return False
        if self._pace is None:
            self._pace = Pace()
        options = self.connection.serving.options
        return self._pace.is_slow(self._blocked_since, -self._taken, now, options.write_timeout, options.min_rate)

    def _send_head(self) -> None:
        self._head_sent = True
        compresses = bool(self.connection.serving.compression) and "gzip" in self.head.accepts
        block = header_blocks.RESPONSE_GZIP if compresses else header_blocks.RESPONSE
        self.connection.write(frames.frame(frames.HEADERS, frames.END_HEADERS, self.id, block))

    def _compresses(self, size: int) -> bool:
        return bool(self.connection.serving.compression) and size >= MIN_COMPRESSED and "gzip" in self.head.accepts

    @abstractmethod
    def _drop(self) -> None:
        """What of the client's is still under way is not wanted any more."""

    @abstractmethod
    def _close(self) -> None:
        """Our side is done."""
