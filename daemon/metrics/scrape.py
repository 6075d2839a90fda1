"""Reads one HTTP request for the metrics or the status page from a connection, and answers the request."""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from http import HTTPStatus
from typing import Any, NamedTuple

import httptools
import msgspec

from tensord.daemon.metrics import exposition, page
from tensord.daemon.metrics.snapshot import MetricsSnapshot
from tensord.shm.errors import DEFECT

_log = logging.getLogger(__name__)
_PATH, _PAGE = b"/metrics", b"/"
#: The level of gzip: the text is so repetitive that a higher one only takes longer.
_LEVEL = 1
#: The most bytes of request line and headers together.
_MAX_HEAD = 16 << 10
#: The most bytes read of a body that nobody asked for, so that its sender reads the answer instead of a reset connection.
_MAX_BODY = 64 << 10

#: Takes whether traced requests are wanted as exemplars.
TakeSnapshot = Callable[[bool], Awaitable[MetricsSnapshot]]
Describe = Callable[[], Awaitable[Mapping[str, Any]]]


class _ScrapeAnswer(NamedTuple):
    status: int
    body: bytes
    #: The headers besides Content-Length and Connection.
    headers: tuple[tuple[str, str], ...]

    def encoded(self, without_body: bool) -> bytes:
        """Returns the answer as bytes, with the header ``Connection: close``.

        ``without_body``: whether the request is a HEAD request.
        """
        headers = (*self.headers, ("Content-Length", str(len(self.body))), ("Connection", "close"))
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}", *map(": ".join, headers), "", ""]
        return "\r\n".join(lines).encode("latin-1") + (b"" if without_body else self.body)


class _Request:
    """Reads and holds the head of an HTTP request."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._fields: list[tuple[bytes, bytes]] = []
        #: The status with which it is refused; 0: it is valid; None: it is not complete yet.
        self.refusal: int | None = None
        self.method = self.path = b""

    async def read(self, reader: asyncio.StreamReader) -> bool:
        left = _MAX_HEAD
        while self.refusal is None and left and (data := await reader.read(left)):
            left -= len(data)
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade):
                # Behind the head nothing matters: a body that is malformed, another protocol that is offered.
                if self.refusal is None:
                    self.refusal = 400
        if self.refusal is None:
            self.refusal = 400 if left else 431
        return left < _MAX_HEAD

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.refusal is not None:
            return  # another request follows this one
        self.method, self.path = self._parser.get_method(), self._target.partition(b"?")[0]
        version, codings = self._parser.get_http_version(), self.values(b"transfer-encoding")
        self.refusal = 400 if version == "1.1" and len(self.values(b"host")) != 1 else 0
        if codings and (version == "1.0" or codings[0].lower() != b"chunked"):
            self.refusal = 501
        elif version not in ("1.0", "1.1"):
            self.refusal = 505

    def values(self, name: bytes) -> list[bytes]:
        return [value for found, value in self._fields if found == name]

    @property
    def takes_gzip(self) -> bool:
        """Returns whether Accept-Encoding names gzip with a weight other than 0."""
        for coding in b",".join(self.values(b"accept-encoding")).decode("latin-1").lower().split(","):
            name, _, weight = coding.replace(" ", "").partition(";q=")
            if name in ("gzip", "x-gzip"):
                return not weight or weight.strip("0.") != ""
        return False


async def serve(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    snapshot: TakeSnapshot,
    thread: Executor,
    describe: Describe | None = None,
) -> None:
    """Reads an HTTP request and answers it: with metrics (/metrics), the status page (/), or an error.

    Returns after the answer, once the client has closed its side or has sent 64 KiB more. The caller must then close the
    connection. If the client closes its side without having sent anything, the client gets no answer.
    Args:
      snapshot: gathers what the metrics show. Its argument says whether to gather traced requests too, for exemplars.
      thread: the executor in which the body of the answer is made.
      describe: returns what the status page shows. If it is None, / is answered with 404.
    Raises OSError if the connection breaks.
    """
    request = _Request()
    if not await request.read(reader):
        return
    answer = await _answer(request, snapshot, thread, describe)
    writer.write(answer.encoded(without_body=request.method == b"HEAD"))
    writer.write_eof()
    left = _MAX_BODY
    while left > 0 and (data := await reader.read(left)):
        left -= len(data)


async def _answer(
    request: _Request, snapshot: TakeSnapshot, thread: Executor, describe: Describe | None
) -> _ScrapeAnswer:
    if request.refusal:
        return _refused(request.refusal, "Bad Request")
    if request.path != _PATH and not (request.path == _PAGE and describe is not None):
        return _refused(404, "Not Found")
    if request.method not in (b"GET", b"HEAD"):
        return _refused(405, "Method Not Allowed", ("Allow", "GET, HEAD"))
    loop = asyncio.get_running_loop()
    try:
        if request.path == _PAGE and describe is not None:
            text = await loop.run_in_executor(thread, page.render, await describe())
            return _ScrapeAnswer(200, text, page.HEADERS)
        accept = b",".join(request.values(b"accept")).decode("latin-1")
        taken = await snapshot(exposition.wants_openmetrics(accept))
        body, content_type = await loop.run_in_executor(thread, _rendered, taken, accept, request.takes_gzip)
    except Exception:
        _log.exception("a scrape of the metrics failed")
        return _refused(500, DEFECT)
    coding = (("Content-Encoding", "gzip"),) if request.takes_gzip else ()
    return _ScrapeAnswer(200, body, (("Content-Type", content_type), *coding, ("Vary", "Accept, Accept-Encoding")))


def _refused(status: int, reason: str, *headers: tuple[str, str]) -> _ScrapeAnswer:
    return _ScrapeAnswer(
        status, msgspec.json.encode({"error": reason}), (("Content-Type", "application/json"), *headers)
    )


def _rendered(snapshot: MetricsSnapshot, accept: str, compressed: bool) -> tuple[bytes, str]:
    text, content_type = exposition.render(snapshot, accept)
    return gzip.compress(text, _LEVEL, mtime=0) if compressed else text, content_type
