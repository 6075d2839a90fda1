"""Whoever connects: one answer for a request, a refusal for anything else, and nobody is kept waiting by others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from config.options import Metrics
from daemon.listening import ListenError
from daemon.metrics import endpoint
from daemon.metrics.endpoint import MAX_CONNECTIONS, Endpoint
from daemon.metrics.snapshot import Snapshot
from tests.daemon.metrics.test_exposition import SNAPSHOT

GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


class Served:
    """An endpoint, and a snapshot that may wait or fail."""

    def __init__(self) -> None:
        self.endpoint = Endpoint(Metrics(port=0), self.snapshot)
        self.asked = 0
        self.waits = asyncio.Event()
        self.waits.set()
        self.fails = False

    async def snapshot(self) -> Snapshot:
        self.asked += 1
        await self.waits.wait()
        if self.fails:
            raise RuntimeError("no")
        return SNAPSHOT

    @property
    def address(self) -> tuple[str, int]:
        assert self.endpoint.url is not None
        host, port = self.endpoint.url.removeprefix("http://").removesuffix("/metrics").split(":")
        return host, int(port)

    async def send(self, content: bytes, end: bool = False) -> bytes:
        """All that comes back until the connection ends."""
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(content)
        if end:
            writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    await made.endpoint.open()
    yield made
    made.endpoint.close()


async def ended(reader: asyncio.StreamReader) -> bool:
    """Waits for the end of a connection on which nothing comes, orderly or not."""
    try:
        return await reader.read(1) == b""
    except ConnectionResetError:
        return True


def status(answer: bytes) -> int:
    return int(answer.split()[1])


async def test_a_scrape(served: Served) -> None:
    head, _, body = (await served.send(GET)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n" in head
    assert f"Content-Length: {len(body)}\r\n".encode() in head
    assert b'nv_inference_request_success{model="m",version="3"} 10.0\n' in body
    old = await served.send(b"GET /metrics?x=1 HTTP/1.0\r\nAccept: application/openmetrics-text\r\n\r\n")
    assert b"Content-Type: application/openmetrics-text" in old
    assert old.endswith(b"# EOF\n")


@pytest.mark.parametrize(
    ("request_", "expected", "words"),
    [
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", 405, b'{"error":"Method Not Allowed"}'),
        (b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 405, b""),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 404, b'{"error":"Not Found"}'),
        (b"GET /metrics/ HTTP/1.1\r\nHost: x\r\n\r\n", 404, b'{"error":"Not Found"}'),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400, b'{"error":"Bad Request"}'),
        (b"nonsense\r\n\r\n", 400, b'{"error":"Bad Request"}'),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400, b'{"error":"Bad Request"}'),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * (64 << 10), 431, b'{"error":"Bad Request"}'),
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
    assert (b"Allow: GET\r\n" in head) is (expected == 405)
    assert served.asked == 0


async def test_who_goes_away_early(served: Served) -> None:
    assert await served.send(b"", end=True) == b""
    assert status(await served.send(b"GET /met", end=True)) == 400
    assert status(await served.send(GET)) == 200


async def test_a_snapshot_that_fails_is_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.fails = True
    answer = await served.send(GET)
    assert status(answer) == 500
    assert b"RuntimeError" not in answer
    assert "RuntimeError: no" in caplog.text


async def test_the_oldest_makes_room(served: Served) -> None:
    """As many as there is room for send nothing; one more is answered, and the first of them is cut off."""
    silent = [await asyncio.open_connection(*served.address) for _ in range(MAX_CONNECTIONS)]
    while len(served.endpoint._connections) < MAX_CONNECTIONS:
        await asyncio.sleep(0.001)
    assert status(await served.send(GET)) == 200
    first, *others = silent
    assert await ended(first[0])
    assert not any(reader.at_eof() for reader, _ in others)
    for _, writer in silent:
        writer.close()


async def test_one_that_waits_holds_up_nobody(served: Served) -> None:
    served.waits.clear()
    slow = asyncio.create_task(served.send(GET))
    while not served.asked:
        await asyncio.sleep(0.001)
    assert status(await served.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")) == 404
    served.waits.set()
    assert status(await slow) == 200


@pytest.mark.parametrize("sends", [b"", b"GET /metrics HTTP/1.1\r\n"])
async def test_who_takes_too_long_is_cut_off(served: Served, sends: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_TIMEOUT", 0.05)
    reader, writer = await asyncio.open_connection(*served.address)
    writer.write(sends)
    assert await ended(reader)
    writer.close()


async def test_who_never_reads_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer does not fit into what the kernel takes."""
    monkeypatch.setattr(endpoint, "_TIMEOUT", 0.5)
    monkeypatch.setattr(endpoint, "_render", lambda snapshot, accept: (bytes(64 << 20), "text/plain"))
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(deaf, served.address)
        await loop.sock_sendall(deaf, GET)
        while not served.asked:
            await asyncio.sleep(0.001)
        while served.endpoint._connections:
            await asyncio.sleep(0.001)
    monkeypatch.undo()
    assert status(await served.send(GET)) == 200


async def test_where_it_is_not_enabled_nothing_listens() -> None:
    made = Endpoint(Metrics(enabled=False), Served().snapshot)
    await made.open()
    assert made.url is None
    made.close()


async def test_a_taken_port_is_said(served: Served) -> None:
    made = Endpoint(Metrics(port=served.address[1]), served.snapshot)
    with pytest.raises(
        ListenError, match=rf"cannot listen on 127\.0\.0\.1:{served.address[1]}: Address already in use"
    ):
        await made.open()
    made.close()


async def test_close_ends_what_is_open() -> None:
    made = Served()
    await made.endpoint.open()
    address = made.address
    reader, writer = await asyncio.open_connection(*address)
    while not made.endpoint._connections:
        await asyncio.sleep(0.001)
    made.endpoint.close()
    made.endpoint.close()
    assert await ended(reader)
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)
    assert made.endpoint.url is None
