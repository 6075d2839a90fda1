"""Follows the framing of a chunked HTTP body alongside the parser, to refuse a body as soon as it announces too large a chunk.

    size [;extension] CRLF | chunk: size bytes | CRLF     ...     0 [;extension] CRLF | trailers | CRLF

A body that breaks this framing is left to the parser to refuse. Sans-I/O. Source: RFC 9112, section 7.1.
"""

from __future__ import annotations

import enum
import re

from tensord.daemon.front.status import BodyTooLarge

_SIZE = re.compile(rb"[0-9A-Fa-f]+")
#: Matches a size beyond 64 bits, in which the parser counts.
_HUGE = re.compile(rb"0*[1-9A-Fa-f][0-9A-Fa-f]{16}")
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
#: Matches the extensions behind a chunk's size, and the end of the line.
_EXTENSIONS = re.compile(rb'(?:;%b(?:=(?:%b|"(?:[^"\\\x00-\x08\x0a-\x1f\x7f]|\\.)*"))?)*\r\n' % (_TOKEN, _TOKEN))


class ChunkRefused(Exception):
    """Raised when a chunked body is refused. Its arguments are the status and the text of the HTTP response."""


class _Phase(enum.Enum):
    """Names what is expected next in a chunked body."""

    #: A line with a size.
    SIZE = "size"
    #: A line of the trailers, or the one that ends them.
    TRAILERS = "trailers"
    #: The body has ended.
    ENDED = "ended"
    #: The CRLF behind a chunk.
    CRLF = "crlf"
    #: The bytes are no chunked body.
    LOST = "lost"


class ChunkSizes:
    """Finds the end of one chunked HTTP body, and checks the limits of the body, without decoding the body.

    Args:
      max_body: the most bytes of the body, without its framing.
      max_lines: the most bytes of any line, of all chunk extensions together, and of all trailers together.
    """

    __slots__ = ("_left", "_line", "_max_body", "_max_lines", "_phase", "_spent", "_total")

    def __init__(self, max_body: int, max_lines: int) -> None:
        self._max_body = max_body
        self._max_lines = max_lines
        self._phase = _Phase.SIZE
        #: Bytes to come of the current chunk.
        self._left = 0
        #: The beginning of a line, or of a chunk's CRLF, that is not complete.
        self._line = b""
        self._total = 0
        #: Bytes of extensions, or of trailers.
        self._spent = 0

    def take(self, data: bytes, at: int, end: int) -> int:
        """Searches ``data[at:end]``, the next bytes of the body, for the end of the body. Returns the index behind that end.

        Returns ``end`` if the body does not end in ``data[at:end]``. Also returns ``end`` if the bytes are no chunked body: the
        HTTP parser refuses them. After the call, ``ended`` says whether the body has ended.
        Raises ChunkRefused if the body, a line, its chunk extensions or its trailers are too large.
        """
        while at < end and self._phase is not _Phase.ENDED and self._phase is not _Phase.LOST:
            if self._left:
                taken = min(self._left, end - at)
                self._left -= taken
                at += taken
                continue
            if self._phase is _Phase.CRLF:
                self._line += data[at : at + 1]
                at += 1
                if not b"\r\n".startswith(self._line):
                    self._phase = _Phase.LOST
                elif len(self._line) == 2:
                    self._phase, self._line = _Phase.SIZE, b""
                continue
            cut = data.find(b"\n", at, end)
            self._line += data[at : end if cut < 0 else cut + 1]
            at = end if cut < 0 else cut + 1
            # The parser would refuse it in the middle of a line that comes in parts.
            huge = _HUGE.match(self._line) if self._phase is _Phase.SIZE else None
            self._check_lines(huge.end() if huge else len(self._line))
            if huge:
                raise self._too_large(1 << 63)
            if cut >= 0:
                line, self._line = self._line, b""
                self._take_line(line)
        return at if self._phase is _Phase.ENDED else end

    @property
    def ended(self) -> bool:
        return self._phase is _Phase.ENDED

    def _take_line(self, line: bytes) -> None:
        if self._phase is _Phase.TRAILERS:
            self._spent += len(line)
            if line in (b"\r\n", b"\n"):
                self._phase = _Phase.ENDED
            return
        size = _SIZE.match(line)
        if size is None:
            self._phase = _Phase.LOST
            return
        self._spent += len(line) - size.end() - len(b"\r\n")
        byte_size = int(size[0], 16)
        if not byte_size:
            self._phase, self._spent = _Phase.TRAILERS, 0
            return
        self._total += byte_size
        if self._total > self._max_body:
            if _EXTENSIONS.fullmatch(line, size.end()) is None:
                self._phase = _Phase.LOST
                return
            raise self._too_large(self._total)
        self._left, self._phase = byte_size, _Phase.CRLF

    def _too_large(self, byte_size: int) -> ChunkRefused:
        return ChunkRefused(*BodyTooLarge(f"has at least {byte_size} bytes", self._max_body).refusal)

    def _check_lines(self, byte_size: int) -> None:
        if self._spent + byte_size > self._max_lines:
            what = "trailers" if self._phase is _Phase.TRAILERS else "chunk extensions"
            raise ChunkRefused(
                431, f"the {what} have at least {self._spent + byte_size} bytes, at most {self._max_lines} are allowed"
            )

    def __repr__(self) -> str:
        return f"<ChunkSizes {self._phase.value} total={self._total} left={self._left}>"
