"""A keep-alive HTTP/1.1 connection that never blocks: it sends one request at a time and receives the answer.

The caller gives a request to ``HttpChannel.send``, and then calls ``HttpChannel.advance`` until ``advance`` returns 0. Between
two calls, the caller waits for the poll events that ``advance`` returned. Source: RFC 9112.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
from collections.abc import Sequence
from typing import NamedTuple, Union

import numpy as np

from tensord_client.common.results import Array

_MAX_HEAD = 64 << 10
_MAX_LINE = 256
_RECEIVE = 64 << 10
#: The most buffers for one system call; Linux accepts 1024.
_PIECES = 64

#: A status, a body's length and a chunk's size as HTTP has them; ``int`` takes more.
_STATUS, _LENGTH, _CHUNK = (re.compile(each) for each in (rb"[1-9]\d\d", rb"\d{1,18}", rb"[0-9A-Fa-f]{1,15}"))

Buffer = Union[bytes, memoryview]


class Address(NamedTuple):
    """The address of a server. It is the path of a unix socket, or a host and a port."""

    path: str
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    @property
    def authority(self) -> str:
        """Returns the value of the Host header in requests to this address, such as "localhost:8000"."""
        return "localhost" if self.path else str(self)[len("http://") :]


class MalformedResponse(OSError):
    """The server's answer is not valid HTTP."""


class HttpResponse:
    """Parses an HTTP answer from bytes as they arrive. It does no input or output itself."""

    def __init__(self, streams: bool = False) -> None:
        """Starts an answer of which no byte has arrived.

        If ``streams`` is true and the status is 200, the caller reads the body from ``stream`` while it arrives. Otherwise
        the caller reads the body once the answer is complete.
        """
        self._streams = streams
        self.status = 0
        self.fields: dict[bytes, bytes] = {}
        #: The JSON, or a body of any other kind.
        self.text = bytearray()
        #: The binary part of the body, behind the JSON; its first byte is aligned as numpy aligns arrays.
        self.tail: Array | None = None
        #: Bytes of a body that is read while it arrives that were received and not read yet.
        self.stream = bytearray()
        self.whole = False
        self.keep_alive = True
        self._head = bytearray()
        #: Parts of the body's memory that no bytes were received into so far.
        self._places: list[memoryview] = []
        self._is_chunked = self._to_end = False
        #: Bytes that are left of a stream of a known length; else of a chunk and its line end; -1: a size line is next, -2: a
        #: trailer line is.
        self._left = -1
        self._line = bytearray()

    @property
    def begun(self) -> bool:
        """Returns whether at least one byte of the answer has arrived."""
        return bool(self.status or self._head)

    @property
    def place(self) -> memoryview | None:
        """Returns memory for the body's next bytes, or None if received bytes must be given to ``feed``."""
        return self._places[0] if self._places else None

    def filled(self, count: int) -> None:
        """Records that the caller wrote the body's next ``count`` bytes to the beginning of ``self.place``."""
        rest = self._places[0][count:]
        if len(rest):
            self._places[0] = rest
        else:
            del self._places[0]
            self.whole = not self._places

    def feed(self, data: Buffer) -> None:
        """Parses received bytes. Raises MalformedResponse if they are not valid HTTP."""
        while not self.status:
            self._head += data
            if not self._head.startswith(b"HTTP/1."[: len(self._head)]):
                # HTTP/2 begins with a frame of settings, whose kind is the fourth byte.
                is_grpc = self._head[3:4] == b"\x04"
                raise MalformedResponse(
                    f"the answer is no HTTP/1.1{', it is HTTP/2: gRPC has a port of its own' if is_grpc else ''}"
                )
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > _MAX_HEAD:
                    raise MalformedResponse(f"the head of an answer has more than {_MAX_HEAD} bytes")
                return
            data = bytes(self._head[end + 4 :])
            self._read_head(bytes(self._head[:end]))
        self._take(memoryview(data))

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        words = first.split(b" ", 2)
        if len(words) < 2 or not _STATUS.fullmatch(words[1]):
            raise MalformedResponse("the answer is no HTTP/1.1")
        self._head = bytearray()
        if words[1][:1] == b"1":
            return
        self.status = int(words[1])
        for line in lines:
            name, _, value = line.partition(b":")
            self.fields[name.strip().lower()] = value.strip()
        fields = self.fields
        self.keep_alive = words[0] != b"HTTP/1.0" and fields.get(b"connection", b"").lower() != b"close"
        self._streams = self._streams and self.status == 200
        self._is_chunked = fields.get(b"transfer-encoding", b"").lower() == b"chunked"
        length, json_size = fields.get(b"content-length"), fields.get(b"inference-header-content-length")
        if self._is_chunked:
            return
        if length is None:
            self._to_end, self.keep_alive = True, False
            return
        if not all(each is None or _LENGTH.fullmatch(each) for each in (length, json_size)):
            raise MalformedResponse("a length in an answer's head is no number")
        size = int(length)
        text_size = size if json_size is None else int(json_size)
        if text_size > size:
            raise MalformedResponse(f"an answer of {size} bytes cannot begin with {text_size} bytes of JSON")
        if self._streams:
            self._left, self.whole = size, not size
            return
        self.text = bytearray(text_size)
        self._places = [memoryview(self.text)] if text_size else []
        if json_size is not None:
            self.tail = np.empty(size - text_size, np.uint8)
            if size > text_size:
                self._places.append(self.tail.data)
        self.whole = not self._places

    def _take(self, data: memoryview) -> None:
        if self._is_chunked:
            self._dechunk(data)
            return
        if self._to_end:
            self._collect(data)
            return
        if self._streams:
            part = data[: self._left]
            self._collect(part)
            self._left -= len(part)
            self.whole = not self._left
            data = data[len(part) :]
        while len(data) and self._places:
            part = data[: len(self._places[0])]
            self._places[0][: len(part)] = part
            self.filled(len(part))
            data = data[len(part) :]
        if len(data):
            raise MalformedResponse("bytes follow an answer that nobody asked for")

    def _collect(self, data: memoryview) -> None:
        if self._streams:
            self.stream += data
        else:
            self.text += data

    def _complete(self) -> None:
        """Sets ``whole``. If the body is JSON and then binary data, moves the data from the attribute ``text`` to ``tail``."""
        self.whole = True
        json_size = self.fields.get(b"inference-header-content-length")
        if json_size is None or self._streams:
            return
        if not _LENGTH.fullmatch(json_size) or int(json_size) > len(self.text):
            raise MalformedResponse(
                f"an answer of {len(self.text)} bytes cannot begin with {json_size!r} bytes of JSON"
            )
        rest = memoryview(self.text)[int(json_size) :]
        self.tail = np.empty(len(rest), np.uint8)
        self.tail.data[:] = rest
        self.text = self.text[: int(json_size)]

    def _dechunk(self, data: memoryview) -> None:
        while len(data) and not self.whole:
            if self._left > 2:
                part = data[: self._left - 2]
                self._collect(part)
                self._left -= len(part)
                data = data[len(part) :]
                continue
            if self._left > 0:
                self._left -= 1
                data = data[1:]
                if not self._left:
                    self._left = -1
                continue
            end = bytes(data[:_MAX_LINE]).find(b"\n")
            self._line += data if end < 0 else data[: end + 1]
            data = data[len(data) if end < 0 else end + 1 :]
            if len(self._line) > _MAX_LINE:
                raise MalformedResponse("a line between the chunks of an answer is too long")
            if end >= 0:
                self._read_line(bytes(self._line).strip())
                self._line = bytearray()

    def _read_line(self, line: bytes) -> None:
        if self._left == -2:
            if not line:
                self._complete()
            return
        number = line.partition(b";")[0].rstrip()
        if not _CHUNK.fullmatch(number):
            raise MalformedResponse("the size of a chunk is no number")
        size = int(number, 16)
        self._left = size + 2 if size else -2

    def end(self) -> None:
        """Records that the server has closed the connection. This completes a body that has neither a stated length nor chunks.

        Raises ConnectionResetError for any other body, because the answer is incomplete.
        """
        if not self._to_end:
            raise ConnectionResetError(errno.ECONNRESET, "the connection ended before the answer")
        self._complete()


class HttpChannel:
    """An HTTP connection to a server, over which one request at a time is sent.

    Once a method has raised an OSError, the connection can only be closed.
    """

    def __init__(self, address: Address) -> None:
        self.response = HttpResponse()
        #: True once all bytes of the request are sent: the server may have it.
        self.sent = False
        self._out: list[Buffer] = []
        #: True: the server has answered before all bytes were sent, and the others are dropped.
        self._cut = False
        family = socket.AF_UNIX if address.path else socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._connecting = False
        try:
            if not address.path:
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            failed = self._socket.connect_ex(address.path or (address.host, address.port))
            if failed == errno.EINPROGRESS:
                self._connecting = True
            elif failed:
                raise OSError(failed, os.strerror(failed))
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Closes the connection, which cancels a request in flight. Idempotent."""
        self._socket.close()

    def shut_down(self) -> None:
        """Shuts the socket down, so that a thread that waits for it wakes up and calls ``close``. Any thread may call it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def is_readable(self) -> bool:
        """Returns whether there are bytes to read, or the server has closed the connection."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def may_be_kept(self) -> bool:
        """Returns whether another request may be sent on this connection."""
        return self.response.whole and self.response.keep_alive and not self._cut

    def send(self, pieces: Sequence[Buffer], streams: bool = False) -> None:
        """Sets the request that ``advance`` sends: the bytes in ``pieces``, in their order.

        If ``streams`` is true and the answer's status is 200, the body can be read from ``response.stream`` while it arrives.
        """
        self.response = HttpResponse(streams)
        self.sent = False
        self._out = [piece for piece in pieces if len(piece)]

    def keep(self, content: bytes) -> None:
        """Makes ``advance`` take the request's unsent bytes from ``content``, which is a copy of the whole request."""
        left = sum(map(len, self._out))
        self._out = [memoryview(content)[len(content) - left :]] if left else []

    def advance(self) -> int:
        """Sends and receives as much as is possible without waiting.

        Returns 0 if the answer is complete, else the poll events to wait for before the next call. Raises OSError if the
        connection failed, or MalformedResponse if the answer is not valid HTTP.
        """
        if self._connecting:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            if not poll.poll(0):
                return select.POLLOUT
            failed = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed))
            self._connecting = False
        if self._out:
            try:
                self._send()
                self.sent = True
            except (BlockingIOError, BrokenPipeError, ConnectionResetError) as error:
                # A server that refuses may answer before it has all of the request, and says why before it closes.
                if self.is_readable:
                    self._out, self._cut = [], True
                elif isinstance(error, BlockingIOError):
                    return select.POLLOUT | select.POLLIN
                else:
                    raise
            return select.POLLIN
        try:
            return self._receive()
        except BlockingIOError:
            return select.POLLIN

    def _send(self) -> None:
        out = self._out
        while out:
            count = self._socket.sendmsg(out[:_PIECES])
            while count:
                first = out[0]
                if count >= len(first):
                    count -= len(first)
                    del out[0]
                else:
                    out[0] = memoryview(first)[count:]
                    count = 0

    def _receive(self) -> int:
        response = self.response
        while not response.whole:
            place = response.place
            if place is None:
                data = self._socket.recv(_RECEIVE)
                count = len(data)
                if data:
                    response.feed(data)
            else:
                count = self._socket.recv_into(place)
                if count:
                    response.filled(count)
            if not count:
                response.end()
        return 0
