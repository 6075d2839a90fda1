"""One answer for a scrape, a refusal for anything else, and the text only when the snapshot is there."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gzip
import random
import re
from typing import Any

import pytest

from tests.daemon.metrics.served import GET, Served, status


async def test_a_scrape(served: Served) -> None:
    head, _, body = (await served.send(GET)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n" in head
    assert f"Content-Length: {len(body)}\r\n".encode() in head
    assert b'nv_inference_request_success{model="m",version="3"} 10.0\n' in body
    old = await served.send(b"GET /metrics?x=1 HTTP/1.0\r\nAccept: application/openmetrics-text\r\n\r\n")
    assert b"Content-Type: application/openmetrics-text" in old
    assert old.endswith(b"# EOF\n")


async def test_head_says_what_get_would(served: Served) -> None:
    get = (await served.send(GET)).partition(b"\r\n\r\n")
    head = (await served.send(GET.replace(b"GET", b"HEAD"))).partition(b"\r\n\r\n")
    # Memory may have moved by a digit.
    assert re.sub(rb"Length: \d+", b"", head[0]) == re.sub(rb"Length: \d+", b"", get[0])
    assert (head[2], get[2] != b"") == (b"", True)


@pytest.mark.parametrize(
    ("accepts", "compressed"),
    [
        (b"gzip", True),
        (b"br, GZIP;q=0.5", True),
        (b"gzip; q=1.0", True),
        (b"gzip;q=0", False),
        (b"gzip;q=0.000", False),
        (b"deflate", False),
        (b"identity", False),
    ],
)
async def test_compressed_for_those_who_ask(served: Served, accepts: bytes, compressed: bool) -> None:
    answer = await served.send(GET.replace(b"Host: x", b"Host: x\r\nAccept-Encoding: " + accepts))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert (b"Content-Encoding: gzip\r\n" in head) is compressed
    assert b"Vary: Accept, Accept-Encoding\r\n" in head
    assert f"Content-Length: {len(body)}\r\n".encode() in head
    text = gzip.decompress(body) if compressed else body
    assert b'nv_inference_request_success{model="m",version="3"} 10.0\n' in text
    assert not compressed or len(body) < len(text) / 3


@pytest.mark.parametrize(
    ("request_", "expected", "words"),
    [
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", 405, b'{"error":"Method Not Allowed"}'),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 404, b'{"error":"Not Found"}'),
        (b"GET /metrics/ HTTP/1.1\r\nHost: x\r\n\r\n", 404, b'{"error":"Not Found"}'),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400, b'{"error":"Bad Request"}'),
        (b"nonsense\r\n\r\n", 400, b'{"error":"Bad Request"}'),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400, b'{"error":"Bad Request"}'),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * (64 << 10), 431, b'{"error":"Bad Request"}'),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400, b'{"error":"Bad Request"}'),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: x\r\n\r\n", 501, b'{"error":"Bad Request"}'),
        # More than is read of a body.
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 70000\r\n\r\n" + bytes(66000), 404, b"Not Found"),
        (
            b"PUT /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
            405,
            b"Not Allowed",
        ),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: \x00\r\n\r\n", 400, b'{"error":"Bad Request"}'),
        (
            b"POST /metrics HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n",
            405,
            b"Not Allowed",
        ),
    ],
)
async def test_what_is_no_scrape(served: Served, request_: bytes, expected: int, words: bytes) -> None:
    answer = await served.send(request_)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status(answer) == expected
    assert words in body
    assert b"Connection: close" in head
    assert (b"Allow: GET, HEAD\r\n" in head) is (expected == 405)
    assert served.asked == 0


async def test_a_request_in_pieces(served: Served) -> None:
    reader, writer = await asyncio.open_connection(*served.address)
    for at in range(len(GET)):
        writer.write(GET[at : at + 1])
        await asyncio.sleep(0)
    assert status(await reader.read()) == 200
    writer.close()


async def test_who_goes_away_early(served: Served) -> None:
    assert await served.send(b"", end=True) == b""
    assert status(await served.send(b"GET /met", end=True)) == 400
    assert status(await served.send(GET)) == 200


async def test_mutated_requests(served: Served) -> None:
    """Each is answered or dropped; none makes the endpoint fail, and none stays open."""
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    chance = random.Random(7)
    whole = (
        GET,
        b"HEAD /metrics HTTP/1.0\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/openmetrics-text;version=\xff\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n" * 2,
    )
    answers = collections.Counter[int]()
    for turn in range(300):
        mutated = bytearray(whole[turn % len(whole)])
        for _ in range(turn // len(whole) % 4):
            at = chance.randrange(len(mutated))
            mutated[at : at + chance.randrange(5)] = chance.randbytes(chance.randrange(5))
        with contextlib.suppress(ConnectionError):  # it was dropped with something unread
            answer = await served.send(bytes(mutated), end=True)
            answers[status(answer) if answer else 0] += 1
    assert {200, 400, 404, 405} <= answers.keys() <= {0, 200, 400, 404, 405, 431, 501, 505}
    while served.endpoint._connections:
        await asyncio.sleep(0.001)
    assert not failures


async def test_a_snapshot_that_fails_is_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.fails = True
    answer = await served.send(GET)
    assert status(answer) == 500
    assert b"RuntimeError" not in answer
    assert "RuntimeError: no" in caplog.text


async def test_one_that_waits_holds_up_nobody(served: Served) -> None:
    served.waits.clear()
    slow = asyncio.create_task(served.send(GET))
    while not served.asked:
        await asyncio.sleep(0.001)
    assert status(await served.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")) == 404
    served.waits.set()
    assert status(await slow) == 200
