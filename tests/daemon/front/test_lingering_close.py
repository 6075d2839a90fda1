"""Clients that read late, and send meanwhile, get everything that was written to them; nobody is waited for without end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import psutil
import pytest

from tensord.daemon.front import lingering_close
from tensord.daemon.front.lingering_close import LINGER_SECONDS, Lingering, LingeringClose, is_quiet
from tensord.daemon.front.socket_transport import SocketWatch
from tensord.daemon.grpc import frames
from tensord.shm.running_time import RunningTime
from tests.daemon.grpc.frame_client import INFER, FrameClient, request
from tests.daemon.grpc.frame_client import serving as serving_grpc
from tests.fakes import SMALL_BUFFER, EchoWorker, FrontProcess, binary_request, json_request, serving, until

#: Fits into the buffer of the front's side, and not into its client's.
SEND_BUFFER, CONTENT = 160 << 10, bytes(range(256)) * 600
PING = frames.frame(frames.PING, 0, 0, b"reading?")
ENDED = ("FIN_WAIT1", "FIN_WAIT2", "CLOSING", "TIME_WAIT", "CLOSE", "NONE")


def wait_ended(client: socket.socket) -> None:
    """Returns when the server has ended its side of the connection, or closed it."""
    ours, theirs = client.getsockname(), client.getpeername()

    def states() -> list[str]:
        return [each.status for each in psutil.net_connections("tcp4") if (each.laddr, each.raddr) == (theirs, ours)]

    until(lambda: all(state in ENDED for state in states()))


def ping_until_ended(client: socket.socket) -> None:
    """Sends PINGs until the connection ends, as gRPC clients do while they read, and some more after that."""
    wait_ended(client)
    for _ in range(3):
        client.sendall(PING)


# ------------------------------------------------------------------------------------------------------- whole fronts


@contextmanager
def http_front(**http: Any) -> Iterator[tuple[FrontProcess, EchoWorker]]:
    with serving(send_buffer=SEND_BUFFER, http={"port": 0, **http}) as (front, (worker,)):
        yield front, worker


@pytest.mark.parametrize("how", ["the client's last", "after a refusal", "a stop"])
def test_an_answer_over_http_is_whole(how: str) -> None:
    """
    1. An answer lies in the buffers of the front's side. 2. The front ends the connection. 3. The client sends more, and reads.
    """
    with http_front() as (front, worker), front.client(SMALL_BUFFER) as client:
        last = ("Connection: close",) if how == "the client's last" else ()
        client.send(binary_request(b"\1", *last))
        asked = worker.next()
        if how == "after a refusal":
            client.send(b"GARBAGE\r\n\r\n")
            front.sync()
        worker.answer(asked, CONTENT)
        front.sync()
        if how == "a stop":
            front.stop(60)
        wait_ended(client.sock)
        for _ in range(3):
            client.send(b"more that nobody reads")
        assert client.answer().parts == CONTENT
        if how == "after a refusal":
            assert client.answer().status == 400
        assert client.ends()
        client.sock.close()
        if how == "a stop":
            assert front.process.wait(60) == 0


@pytest.mark.parametrize("how", ["a violation", "a stop"])
def test_an_answer_over_grpc_is_whole(how: str) -> None:
    with serving_grpc(send_buffer=SEND_BUFFER) as (front, (worker,)):
        client = FrameClient(
            front.port, ((frames.INITIAL_WINDOW_SIZE, frames.MAX_WINDOW),), receive_buffer=SMALL_BUFFER
        )
        with client:
            stream = client.call(request(), INFER)
            worker.answer(worker.next(), CONTENT)
            front.sync()
            if how == "a stop":
                front.stop(60)
            else:
                client.send(frames.frame(frames.PING, 0, 7, bytes(8)))
            ping_until_ended(client.sock)
            assert client.answer(stream).values == CONTENT
            assert client.goaway()[1] == (frames.NO_ERROR if how == "a stop" else frames.PROTOCOL_ERROR)
            assert client.ends()
        if how == "a stop":
            assert front.process.wait(60) == 0


def test_who_keeps_an_idle_connection_open_delays_no_stop() -> None:
    """It has all of its answer, and does not look at the connection until it asks again."""
    with http_front() as (front, worker), front.client() as client:
        client.send(json_request(b"\1"))
        worker.echo(worker.next())
        assert client.answer().values == b"\1"
        front.stop(10_000)
        assert front.process.wait(60) == 0
        assert client.ends()


def test_who_neither_reads_nor_closes_is_waited_for_as_long_as_there_is_grace() -> None:
    with http_front() as (front, worker), front.client(SMALL_BUFFER) as client:
        client.send(binary_request(b"\1"))
        worker.answer(worker.next(), CONTENT)
        front.sync()
        front.stop(0.5)
        assert front.process.wait(60) == 0


# ---------------------------------------------------------------------------------------------------- one connection


class Kept(asyncio.Protocol):
    """A connection that is closed as soon as it has sent something."""

    def __init__(self, closing: LingeringClose) -> None:
        self._closing = closing
        self.transport = cast(asyncio.Transport, None)
        self.lost: list[Exception | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(b"all")
        self._closing.see_out(self.transport)

    def data_received(self, data: bytes) -> None:
        raise AssertionError("it has heard its last")

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


class Pair:
    """A connection that is being closed, on asyncio's transport or ours, and its client."""

    def __init__(self, closing: LingeringClose) -> None:
        self.kept = Kept(closing)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.client = socket.create_connection(listener.getsockname())
            self._ours, _ = listener.accept()
        self.client.setblocking(False)

    async def open(self, watch: SocketWatch | None) -> None:
        if watch is None:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self.kept, self._ours)
        else:
            watch.open(self._ours, self.kept)
        while not self.kept.lost:
            await asyncio.sleep(0.001)
        assert self.kept.lost == [None]

    async def receive(self) -> bytes:
        """Returns all that the client receives."""
        loop, got = asyncio.get_running_loop(), b""
        while piece := await loop.sock_recv(self.client, 100):
            got += piece
        return got

    def close(self) -> None:
        self.client.close()
        self.kept.transport.abort()


@contextmanager
def made(closing: LingeringClose, count: int = 1) -> Iterator[list[Pair]]:
    pairs = [Pair(closing) for _ in range(count)]
    try:
        yield pairs
    finally:
        for pair in pairs:
            pair.close()


@pytest.fixture(params=["loop", "socket_transport"])
async def watch(request: pytest.FixtureRequest) -> AsyncIterator[SocketWatch | None]:
    """Yields a watch for transports of ours, or None for the loop's."""
    made = SocketWatch() if request.param == "socket_transport" else None
    yield made
    await asyncio.sleep(0.01)
    if made is not None:
        made.close()


async def test_it_ends_with_its_client(watch: SocketWatch | None) -> None:
    closing = LingeringClose(0, RunningTime())
    with made(closing) as (pair,):
        await pair.open(watch)
        assert len(closing) == 1
        for _ in range(3):
            pair.client.send(b"too late")
            await asyncio.sleep(0.001)
        assert await pair.receive() == b"all"
        assert not pair.kept.transport.is_closing()
        pair.client.close()
        while closing:
            await asyncio.sleep(0.001)
        assert pair.kept.transport.is_closing()


async def test_what_took_long_enough(monkeypatch: pytest.MonkeyPatch, watch: SocketWatch | None) -> None:
    """A client that does not close; one too many; more bytes than are thrown away."""
    monkeypatch.setattr(lingering_close, "MOST_LINGERING", 2)
    monkeypatch.setattr(lingering_close, "MOST_DROPPED", 100)
    closing = LingeringClose(0, RunningTime())
    with made(closing, 3) as pairs:
        for pair in pairs:
            await pair.open(watch)
        assert [pair.kept.transport.is_closing() for pair in pairs] == [True, False, False]
        assert len(closing) == 2
        pairs[2].client.send(bytes(101))
        while len(closing) == 2:
            await asyncio.sleep(0.001)
        now = asyncio.get_running_loop().time()
        closing.check(now)
        closing.check(now + LINGER_SECONDS - 1)
        assert len(closing) == 1
        closing.check(now + LINGER_SECONDS + 1)
        assert len(closing) == 0
        assert all(pair.kept.transport.is_closing() for pair in pairs)


async def test_who_goes_on_reading_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The close waits while the client takes ``min_rate``; the kernel has what it has not taken."""
    lingering = Lingering(LingeringClose(100, RunningTime()), cast(asyncio.Transport, None))
    untaken, now = 1 << 20, asyncio.get_running_loop().time()
    monkeypatch.setattr(lingering_close, "_waiting", lambda *_: untaken)
    assert not lingering.is_late(now, 100)
    for _ in range(20):
        now, untaken = now + LINGER_SECONDS + 1, untaken - 1000
        assert not lingering.is_late(now, 100)
    assert lingering.is_late(now + LINGER_SECONDS + 1, 100)


async def test_whether_anything_is_under_way() -> None:
    watch, closing = SocketWatch(), LingeringClose(0, RunningTime())
    kept = Kept(closing)
    kept.connection_made = lambda transport: setattr(kept, "transport", transport)  # type: ignore[method-assign]
    ours, client = socket.socketpair()
    watch.open(ours, kept)
    kept.transport.pause_reading()
    assert is_quiet(kept.transport)
    kept.transport.write(b"answer")
    assert not is_quiet(kept.transport)
    assert client.recv(6) == b"answer"
    assert is_quiet(kept.transport)
    client.send(b"request")
    assert not is_quiet(kept.transport)
    client.close()
    kept.transport.abort()
    await asyncio.sleep(0)
    watch.close()
