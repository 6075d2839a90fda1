"""Decompresses request bodies and compresses answers: gzip (RFC 1952) and deflate, zlib's format (RFC 1950). Sans-I/O.

Each call of ``Inflation.step``, and each iteration over ``deflated``, handles a limited number of bytes. The event loop can
serve other connections between two of them.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Generator, Iterable

from tensord.daemon.front.status import BodyTooLarge
from tensord.daemon.http.body import CollectedBody
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import Buffer

#: The formats that zlib is told to read or write. Each stands for itself alone: a body that says gzip and is deflate is broken.
_WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
#: Bytes read or written in a step: about a millisecond of work, some more at the highest level.
_INFLATE_IN, _INFLATE_OUT, DEFLATE_IN = 16 << 10, 256 << 10, 32 << 10
#: Members of a gzip stream, and what each counts for in a step: it takes a new decompressor.
_MAX_MEMBERS, _MEMBER_COST = 4096, 16 << 10
#: Members of an Accept-Encoding list that are looked at.
_MAX_CODINGS = 32


class Inflation:
    """Decompresses a request body into ``body`` while it arrives.

    Args:
      coding: "gzip" or "deflate".
      limit: the most bytes that ``body`` may hold.
    """

    def __init__(self, coding: str, body: CollectedBody, limit: int) -> None:
        self._coding = coding
        self._body = body
        self._limit = limit
        self._pending: deque[memoryview] = deque()
        self._stream = zlib.decompressobj(_WINDOW_BITS[coding])
        self._members = 1
        #: Compressed bytes so far.
        self.received = 0

    def feed(self, chunk: bytes) -> None:
        """Stores ``chunk``, a piece of the compressed body, for later calls of ``step``."""
        self.received += len(chunk)
        view = memoryview(chunk)
        self._pending.extend(view[at : at + _INFLATE_IN] for at in range(0, len(view), _INFLATE_IN))

    def step(self) -> bool:
        """Decompresses a limited amount of the received bytes, and returns whether more of them are left.

        Raises InvalidArgument if the compressed stream is broken. Raises BodyTooLarge if the decompressed body exceeds the limit.
        """
        if not self._pending:
            return False
        piece, room = self._pending.popleft(), _INFLATE_OUT
        try:
            while piece and room:
                cost = 0
                if self._stream.eof:
                    self._next_member()
                    cost = _MEMBER_COST
                content = self._stream.decompress(piece, min(room, self._limit - self._body.received + 1))
                if content:
                    self._take(content)
                room = max(0, room - len(content) - cost)
                piece = memoryview(self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail)
        except zlib.error as error:
            raise InvalidArgument(f"failed to decompress the request body: it is no {self._coding} stream") from error
        if piece:
            self._pending.appendleft(piece)
        return bool(self._pending)

    def finish(self) -> None:
        """Checks that the compressed stream is complete, after the whole body was received and decompressed.

        Raises InvalidArgument if the body ends before the stream does.
        """
        if not self._stream.eof:
            raise InvalidArgument(
                f"failed to decompress the request body: the {self._coding} stream is truncated after {self.received} bytes"
            )

    def drop(self) -> None:
        """Frees the compressed bytes that are not decompressed yet, and the decompressed body."""
        self._pending.clear()
        self._body = CollectedBody()

    def _take(self, content: bytes) -> None:
        if self._body.received + len(content) > self._limit:
            raise BodyTooLarge(
                f"of {self.received} compressed bytes so far inflates to more than {self._limit} bytes", self._limit
            )
        self._body.write(content)

    def _next_member(self) -> None:
        if self._coding != "gzip":
            raise InvalidArgument("failed to decompress the request body: bytes follow the end of the deflate stream")
        self._members += 1
        if self._members > _MAX_MEMBERS:
            raise InvalidArgument(
                f"failed to decompress the request body: more than {_MAX_MEMBERS} gzip members are given, "
                f"at most {_MAX_MEMBERS} are allowed"
            )
        self._stream = zlib.decompressobj(_WINDOW_BITS[self._coding])


def deflated(coding: str, level: int, pieces: Iterable[Buffer]) -> Generator[None, None, bytes]:
    """Compresses an answer, and yields after each ``DEFLATE_IN`` bytes. Returns the compressed answer.

    ``coding``: "gzip" or "deflate". ``level``: the level of zlib. ``pieces``: the parts of the answer, in order.
    """
    stream, compressed, room = zlib.compressobj(level, zlib.DEFLATED, _WINDOW_BITS[coding]), list[bytes](), DEFLATE_IN
    for piece in pieces:
        left = memoryview(piece)
        while left:
            part, left = left[:room], left[room:]
            compressed.append(stream.compress(part))
            room -= len(part)
            if not room:
                yield
                room = DEFLATE_IN
    return b"".join([*compressed, stream.flush()])


def request_coding(value: bytes) -> str | None:
    """Returns the coding that ``value``, a Content-Encoding header, names: "gzip", "deflate", or "" for identity.

    Returns None for any other coding.
    """
    name = value.decode("latin-1").lower()
    if name == "identity":
        return ""
    name = "gzip" if name == "x-gzip" else name
    return name if name in _WINDOW_BITS else None


def answer_coding(accept: bytes) -> str:
    """Chooses the compression of an HTTP answer. Returns "gzip", "deflate", or "" for no compression.

    ``accept``: the request's Accept-Encoding header. The supported coding with the highest q wins. If two codings have equal q,
    the coding that stands first in the header wins. ``*`` and names in capitals are ignored, as by Triton.
    """
    best, highest = "", 0.0
    for entry in accept.split(b",", _MAX_CODINGS)[:_MAX_CODINGS]:
        name, *parameters = [part.strip() for part in entry.split(b";", 2)]
        coding = name.decode("latin-1")
        if coding in _WINDOW_BITS or coding == "identity":
            quality = _quality(parameters[0]) if parameters else 1.0
            if quality > highest:
                best, highest = coding, quality
    return "" if best == "identity" else best


def _quality(parameter: bytes) -> float:
    """Returns the weight in ``parameter``, such as ``q=0.8``, or 0 if it is malformed."""
    name, _, value = parameter.partition(b"=")
    try:
        quality = float(value) if name.strip() == b"q" else 0.0
    except ValueError:
        return 0.0
    return quality if 0.0 <= quality <= 1.0 else 0.0
