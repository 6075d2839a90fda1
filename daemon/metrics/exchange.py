"""Serves a single HTTP request on a connection, which is closed afterwards. Knows nothing of metrics.

The parser is the one of the HTTP front, so both accept the same requests, trailers and all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

import httptools
import msgspec

from tensord.daemon.front.chunk_sizes import ChunkRefused, ChunkSizes

#: The most bytes of request line and headers together.
_MAX_HEAD = 16 << 10
#: The most bytes read of a body that nobody asked for, so that its sender reads the answer instead of a reset connection.
_MAX_BODY = 64 << 10


class BadRequest(Exception):
    """The received bytes are not a valid HTTP request; ``status`` is the HTTP status to answer with."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True)
class ScrapeRequest:
    """A parsed HTTP request to the metrics port: method, path, what its Accept header asks for, and whether it takes gzip."""

    method: bytes
    #: The path without the query.
    path: bytes
    #: The Accept header; "": none.
    accept: str
    #: Whether the answer may be compressed with gzip.
    gzip: bool = False


@dataclass(frozen=True, slots=True)
class ScrapeAnswer:
    """An HTTP answer on the metrics port; ``headers`` are those besides Content-Length and Connection."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...]


def refusal(status: int, reason: str, *headers: tuple[str, str]) -> ScrapeAnswer:
    """Makes an error answer with the JSON body {"error": reason}. ``headers``: names and values of further headers."""
    return ScrapeAnswer(
        status, msgspec.json.encode({"error": reason}), (("Content-Type", "application/json"), *headers)
    )


class ScrapeExchange:
    """Reads one HTTP request to the metrics port from a connection, and encodes the answer to it."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        #: The request line and the headers, as they came.
        self._head = b""
        self._target = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._asked: ScrapeRequest | None = None
        #: The status that refuses an invalid head; 0: it is valid.
        self._refused = 0
        #: The bytes of the body that came, and its framing if it comes in chunks.
        self._received = 0
        self._chunks: ChunkSizes | None = None
        self._whole = False

    async def request(self, reader: asyncio.StreamReader) -> ScrapeRequest | None:
        """Reads the request, without keeping its body. Returns None if the client closed the connection before it sent anything.

        Raises BadRequest: the request is invalid, or its head is too large.
        """
        while not (
            self._whole or self._received > _MAX_BODY or (self._asked is not None and self._waits_to_continue())
        ):
            data = await reader.read(_MAX_HEAD)
            if not data and not self._head and self._asked is None:
                return None
            try:
                self._take(data)
            except ChunkRefused as refusal:
                raise BadRequest(refusal.status) from None
            except httptools.HttpParserError:
                raise BadRequest(400) from None
        return self._asked

    def _take(self, data: bytes) -> None:
        """Parses received bytes of the request; b"" means that the client closed its side. Bytes behind its end are ignored.

        Raises BadRequest: the head is invalid or too large, or the client closed early; ChunkRefused or HttpParserError: the body
        is invalid.
        """
        if not data:
            raise BadRequest(400)
        while data and not self._whole:
            if self._asked is None:
                end = self._end_of_head(data)
                self._feed_head(data[:end])
            else:
                end = len(data) if self._chunks is None else self._chunks.take(data, 0, len(data))
                self._received += end
                self._parser.feed_data(data[:end])
            data = data[end:]

    def _end_of_head(self, data: bytes) -> int:
        """Returns how many bytes of the data belong to the head. Raises BadRequest: the head is too large.

        The head is parsed alone, so that it is known where the body begins.
        """
        known = len(self._head)
        self._head += data
        end = self._head.find(b"\r\n\r\n", max(0, known - 3))
        if (end if end >= 0 else len(self._head)) > _MAX_HEAD:
            raise BadRequest(431)
        return len(data) if end < 0 else end + 4 - known

    def _feed_head(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._whole = True  # another protocol is offered, and not taken
        except httptools.HttpParserError:
            if not self._refused:
                raise
        if self._refused:
            raise BadRequest(self._refused)

    # ------------------------------------------------------------------------------------------------- the parser's calls

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._asked is None:
            self._fields.append((name.lower(), value))
        # Else it is a trailer, which nobody wants.

    def on_headers_complete(self) -> None:
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._refused = 505
        elif version == "1.1" and len(self._values(b"host")) != 1:
            self._refused = 400
        codings = self._values(b"transfer-encoding")
        if codings and (version == "1.0" or codings[0].lower() != b"chunked"):
            self._refused = 501
        if codings:
            self._chunks = ChunkSizes(_MAX_BODY, _MAX_HEAD)
        accept = b",".join(self._values(b"accept")).decode("latin-1")
        path, gzip = self._target.partition(b"?")[0], _accepts_gzip(self._values(b"accept-encoding"))
        self._asked = ScrapeRequest(self._parser.get_method(), path, accept, gzip)

    def on_message_complete(self) -> None:
        self._whole = True

    def _values(self, name: bytes) -> list[bytes]:
        return [value for found, value in self._fields if found == name]

    def _waits_to_continue(self) -> bool:
        """Returns whether the client waits for ``100 Continue`` before it sends its body. This server never sends that."""
        expected = self._values(b"expect")
        return bool(expected) and expected[0].lower() == b"100-continue" and self._parser.get_http_version() == "1.1"

    def answered(self, answer: ScrapeAnswer) -> bytes:
        """Encodes the answer to the request, with a header that ends the connection; no body for a HEAD request."""
        headers = (*answer.headers, ("Content-Length", str(len(answer.body))), ("Connection", "close"))
        lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}", *map(": ".join, headers), "", ""]
        body = b"" if self._asked is not None and self._asked.method == b"HEAD" else answer.body
        return "\r\n".join(lines).encode("latin-1") + body


def _accepts_gzip(values: Sequence[bytes]) -> bool:
    """Returns whether the values of Accept-Encoding name gzip with a weight other than 0."""
    for coding in b",".join(values).decode("latin-1").lower().split(","):
        name, _, weight = coding.replace(" ", "").partition(";q=")
        if name in ("gzip", "x-gzip"):
            return not weight or weight.strip("0.") != ""
    return False
