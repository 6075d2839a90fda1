"""Requests in whatever pieces they come, what is none, and answers that end the connection."""

from __future__ import annotations

import asyncio

import h11
import pytest

from tensord.daemon.metrics.exchange import BadRequest, ScrapeAnswer, ScrapeExchange, ScrapeRequest, refusal


async def asked(exchange: ScrapeExchange, content: bytes, piece: int = 0, end: bool = False) -> ScrapeRequest | None:
    """Reads a request from content that is fed in pieces of that size (0: at once)."""
    reader = asyncio.StreamReader()
    task = asyncio.create_task(exchange.request(reader))
    for at in range(0, len(content), piece or len(content) or 1):
        reader.feed_data(content[at : at + (piece or len(content))])
        await asyncio.sleep(0)
    if end:
        reader.feed_eof()
    return await task


def read(content: bytes, method: str = "GET") -> tuple[int, dict[bytes, bytes], bytes]:
    """Parses an answer with another HTTP library: status, headers and body."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(content)
    head = client.next_event()
    assert isinstance(head, h11.Response)
    body = b""
    while isinstance(event := client.next_event(), h11.Data):
        body += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage)
    assert client.their_state is h11.MUST_CLOSE
    return head.status_code, dict(head.headers), body


@pytest.mark.parametrize("piece", [0, 1, 7])
@pytest.mark.parametrize(
    ("content", "request_"),
    [
        (b"GET /metrics?a=b HTTP/1.1\r\nHost: x\r\n\r\n", ScrapeRequest(b"GET", b"/metrics", "")),
        (b"GET / HTTP/1.0\r\nAccept: a\r\nAccept: b\r\n\r\n", ScrapeRequest(b"GET", b"/", "a,b")),
        (b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", ScrapeRequest(b"POST", b"/x", "")),
        (
            b"PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
            ScrapeRequest(b"PUT", b"/", ""),
        ),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n",
            ScrapeRequest(b"POST", b"/", ""),
        ),
        # More than is read of a body.
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 70000\r\n\r\n" + bytes(66000),
            ScrapeRequest(b"POST", b"/", ""),
        ),
    ],
)
async def test_requests(content: bytes, request_: ScrapeRequest, piece: int) -> None:
    assert await asked(ScrapeExchange(), content, piece and max(piece, len(content) // 500)) == request_


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: x\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 20000, 431),
        (b"GET /metr", 400),
    ],
)
async def test_what_is_no_request(content: bytes, status: int) -> None:
    exchange = ScrapeExchange()
    with pytest.raises(BadRequest) as refused:
        await asked(exchange, content, end=True)
    assert refused.value.status == status
    answered, headers, body = read(exchange.answered(refusal(status, "Bad Request")))
    assert (answered, headers[b"content-type"], body) == (status, b"application/json", b'{"error":"Bad Request"}')


async def test_nobody_asks() -> None:
    assert await asked(ScrapeExchange(), b"", end=True) is None


async def test_answers() -> None:
    exchange = ScrapeExchange()
    assert await asked(exchange, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") is not None
    status, headers, body = read(exchange.answered(ScrapeAnswer(200, b"abc", (("Content-Type", "text/plain"),))))
    assert (status, headers[b"content-length"], headers[b"connection"], body) == (200, b"3", b"close", b"abc")
    exchange = ScrapeExchange()
    assert await asked(exchange, b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n") is not None
    status, headers, body = read(exchange.answered(refusal(405, "no", ("Allow", "GET"))), "HEAD")
    assert (status, headers[b"allow"], body) == (405, b"GET", b"")
