"""Tests that there is room for every scraper, and that one that hangs holds up nobody."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from tensord.config.options import Metrics
from tensord.daemon.metrics import endpoint, exposition
from tensord.daemon.metrics.endpoint import MAX_CONNECTIONS, Endpoint
from tensord.daemon.metrics.snapshot import MetricsSnapshot
from tensord.daemon.processes.listening import ListenError
from tests.daemon.metrics.served import GET, Served, status


async def ended(reader: asyncio.StreamReader) -> bool:
    """Waits for the end of a connection on which nothing comes, orderly or not."""
    try:
        return await reader.read(1) == b""
    except ConnectionResetError:
        return True


async def test_the_oldest_makes_room(served: Served) -> None:
    """More than there is room for send nothing, all at once; the first are cut off, also for one that asks."""
    silent = []
    for _ in range(MAX_CONNECTIONS + 20):
        silent.append(await asyncio.open_connection(*served.address))
        assert len(served.endpoint._connections) <= MAX_CONNECTIONS
    for reader, _ in silent[:20]:
        assert await ended(reader)
    assert status(await served.send(GET)) == 200
    assert await ended(silent[20][0])
    assert not any(reader.at_eof() for reader, _ in silent[21:])
    for _, writer in silent:
        writer.close()


@pytest.mark.parametrize("sends", [b"", b"GET /metrics HTTP/1.1\r\n"])
async def test_who_takes_too_long_is_cut_off(served: Served, sends: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_TIMEOUT", 0.05)
    reader, writer = await asyncio.open_connection(*served.address)
    writer.write(sends)
    assert await ended(reader)
    writer.close()


async def test_who_never_reads_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer does not fit into what the kernel takes; its time is up when it was written."""
    rendered = threading.Event()

    def render(snapshot: MetricsSnapshot, accept: str) -> tuple[bytes, str]:
        rendered.set()
        return bytes(64 << 20), "text/plain"

    limits: list[asyncio.Timeout] = []
    timeout = asyncio.timeout

    def noted(seconds: float | None) -> asyncio.Timeout:
        limits.append(timeout(seconds))
        return limits[-1]

    monkeypatch.setattr(exposition, "render", render)
    monkeypatch.setattr(asyncio, "timeout", noted)
    loop = asyncio.get_running_loop()
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        await loop.sock_connect(deaf, served.address)
        await loop.sock_sendall(deaf, GET)
        while not rendered.is_set():
            await asyncio.sleep(0.001)
        assert served.endpoint._connections
        limits[0].reschedule(loop.time())
        while served.endpoint._connections:
            await asyncio.sleep(0.001)
    monkeypatch.undo()
    assert status(await served.send(GET)) == 200


async def test_where_it_is_not_enabled_nothing_listens() -> None:
    made = Endpoint(Metrics(enabled=False), Served().snapshot, dict)
    made.listen()
    await made.open()
    assert made.url is None
    made.close()


async def test_a_taken_port_is_said(served: Served) -> None:
    made = Endpoint(Metrics(port=served.address[1]), served.snapshot, dict)
    with pytest.raises(
        ListenError, match=rf"cannot listen on 127\.0\.0\.1:{served.address[1]}: Address already in use"
    ):
        made.listen()
    made.close()


async def test_close_ends_what_is_open() -> None:
    made = Served()
    made.endpoint.listen()
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
