"""Connections of a protocol's listening sockets, shared out among those that take them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tensord.daemon.control.shared_counters import FrontCounters, SharedCounters
from tensord.daemon.front.acceptor import AcceptLimit, Acceptor, ListeningSocket
from tensord.daemon.front.socket_transport import SocketWatch


class Connection(asyncio.Protocol):
    """Sends its client the number of the front that has it, and is counted there."""

    def __init__(self, taker: Taker) -> None:
        self.taker = taker

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.taker.connections.add(self)
        self.taker.counters.count(len(self.taker.connections))
        transport.write(self.taker.name)  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        self.taker.connections.discard(self)
        self.taker.counters.count(len(self.taker.connections))
        self.taker.lost.release()


class Taker:
    """Stands for a front. All are in this process, each with its own descriptors of the sockets."""

    def __init__(self, listeners: list[socket.socket], counters: FrontCounters, name: bytes) -> None:
        self.connections: set[Connection] = set()
        self.lost = asyncio.Semaphore(0)
        self.counters = counters
        self.name = name
        self.sockets = SocketWatch()
        self.acceptor = Acceptor([listener.dup() for listener in listeners], counters, self.open)
        #: Of all that connected.
        self.owners: list[str] = []

    @property
    def leaves_it(self) -> bool:
        """Returns whether it leaves new connections to others at this moment."""
        return self.acceptor._timer is not None

    def open(self, connection: socket.SocketType, owner: str) -> None:
        self.owners.append(owner)
        self.sockets.open(connection, Connection(self))


class Shared:
    """The listening sockets and the page of counters that the fronts share."""

    def __init__(self) -> None:
        self.counters = SharedCounters.create()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        #: Of the same protocol, somewhere else.
        self.second = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.takers: list[Taker] = []
        self.clients: list[socket.socket] = []

    def taker(self, row: int) -> Taker:
        self.takers.append(Taker([self.listener, self.second], self.counters.front(row), bytes((row,))))
        self.takers[-1].acceptor.start()
        return self.takers[-1]

    def connect(self, listener: socket.socket | None = None) -> socket.socket:
        """Connects a client, whether a front accepts it or not."""
        client = socket.create_connection((listener or self.listener).getsockname())
        client.setblocking(False)
        self.clients.append(client)
        return client

    async def next_row(self) -> int:
        """Connects a client while no front leaves connections to others; returns the front that accepts it."""
        while any(taker.leaves_it for taker in self.takers):
            await asyncio.sleep(0.001)
        return await self.row_of(self.connect())

    async def row_of(self, client: socket.socket) -> int:
        """Returns the front that has accepted a client."""
        (row,) = await asyncio.get_running_loop().sock_recv(client, 1)
        return row


@pytest.fixture
async def shared() -> AsyncIterator[Shared]:
    made = Shared()
    yield made
    for taker in made.takers:
        await taker.acceptor.close(1)
        for connection in taker.connections:
            connection.transport.close()
    for client in made.clients:
        client.close()
    made.listener.close()
    made.second.close()
    await asyncio.sleep(0)
    for taker in made.takers:
        taker.sockets.close()
    made.counters.close()


async def test_each_gets_its_part(shared: Shared) -> None:
    for row in range(3):
        shared.taker(row)
    rows = [await shared.next_row() for _ in range(12)]
    assert [rows.count(row) for row in range(3)] == [4, 4, 4]


async def test_two_sockets_are_one_to_clients(shared: Shared) -> None:
    """The front with more connections leaves new ones of either socket to the other; a hung front keeps no client waiting."""
    for row in range(2):
        shared.taker(row)
    clients = [shared.connect(listener) for _ in range(20) for listener in (shared.listener, shared.second)]
    rows = [await shared.row_of(client) for client in clients]
    assert min(rows.count(row) for row in range(2)) >= 10
    shared.counters.front(2).serve(True)
    assert [await shared.row_of(shared.connect(listener)) for listener in (shared.listener, shared.second)]


async def test_close_takes_who_has_connected_to_either(shared: Shared) -> None:
    taker = shared.taker(0)
    clients = [shared.connect(listener) for listener in (shared.listener, shared.second, shared.second)]
    await taker.acceptor.close(10)
    assert [await shared.row_of(client) for client in clients] == [0] * 3


async def test_a_crowd(shared: Shared) -> None:
    """All at once. Whoever has an eighth more than another leaves the next one to it."""
    takers = [shared.taker(row) for row in range(2)]
    clients = [shared.connect() for _ in range(60)]
    for client in clients:
        await shared.row_of(client)
    assert sum(len(taker.connections) for taker in takers) == 60
    assert min(len(taker.connections) for taker in takers) >= 20


async def test_a_new_one_catches_up(shared: Shared) -> None:
    first = shared.taker(0)
    for _ in range(6):
        assert await shared.next_row() == 0
    shared.taker(1)
    assert [await shared.next_row() for _ in range(6)] == [1] * 6
    assert len(first.connections) == 6


async def test_one_that_takes_none_keeps_nobody_waiting(shared: Shared) -> None:
    """Its row says that it serves, and it has fewer: it is hung, or it was killed a moment ago."""
    shared.counters.front(1).serve(True)
    taker = shared.taker(0)
    clients = [shared.connect() for _ in range(5)]
    assert [await shared.row_of(client) for client in clients] == [0] * 5
    assert taker.counters.least() == 0


async def test_lost_connections_count_no_more(shared: Shared) -> None:
    taker, _ = shared.taker(0), shared.taker(1)
    rows = [await shared.next_row() for _ in range(4)]
    assert sorted(rows) == [0, 0, 1, 1]
    for client, row in zip(shared.clients, rows, strict=True):
        if row == 0:
            client.close()
            await taker.lost.acquire()
    assert [await shared.next_row() for _ in range(2)] == [0, 0]


async def test_in_the_place_of_one_that_ended(shared: Shared) -> None:
    """One is taken at once, whoever has fewer; and no more than have ended."""
    shared.counters.front(1).serve(True)
    taker = shared.taker(0)

    async def was_left() -> bool:
        """Says whether the next connection was first left to other fronts."""
        client, before, left = shared.connect(), len(taker.owners), False
        while len(taker.owners) == before:
            left = left or taker.leaves_it
            await asyncio.sleep(0)
        assert await shared.row_of(client) == 0
        return left

    assert [await was_left() for _ in range(3)] == [False, True, True]
    for _ in range(3):
        for count in (1, 2):
            for _ in range(count):
                shared.clients.pop().close()
                await taker.lost.acquire()
            assert [await was_left() for _ in range(count)] == [False] * count
        assert await was_left()
        shared.clients.pop().close()
        await taker.lost.acquire()
        assert not await was_left()
    assert len(taker.connections) == 6


async def test_close_takes_who_has_connected(shared: Shared) -> None:
    """A client whose connect succeeded before the stop is served; the next one goes to others."""
    taker = shared.taker(0)
    clients = [shared.connect() for _ in range(3)]
    await taker.acceptor.close(10)
    await taker.acceptor.close(10)
    assert [await shared.row_of(client) for client in clients] == [0] * 3
    assert shared.taker(1).counters.least() is None
    assert await shared.row_of(shared.connect()) == 1


async def test_no_descriptors(shared: Shared, caplog: pytest.LogCaptureFixture) -> None:
    """They wait, another front would be free to take them, and are taken when there are some again."""
    taker = shared.taker(0)
    shared.counters.front(1).serve(True)
    client = shared.connect()
    other = shared.counters.front(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # else it may free one meanwhile
    unused = os.dup(0)
    os.close(unused)
    resource.setrlimit(resource.RLIMIT_NOFILE, (unused, hard))
    try:
        while other.least() is not None:
            assert not taker.connections
            await asyncio.sleep(0.001)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert await shared.row_of(client) == 0
    assert other.least() == len(taker.connections) == 1
    assert caplog.text.count("new connections have to wait: Too many open files") == 1


async def test_a_client_that_goes_at_once(shared: Shared) -> None:
    taker = shared.taker(0)
    with contextlib.closing(shared.connect()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes((1, 0, 0, 0, 0, 0, 0, 0)))
    assert await shared.row_of(shared.connect()) == 0
    assert taker.acceptor is not None


async def test_whose_a_connection_is(shared: Shared, tmp_path: Path) -> None:
    """Known from its accept: of TCP the host, of a unix socket the user."""
    taker = shared.taker(0)
    await shared.row_of(shared.connect())
    assert taker.owners == ["tcp 127.0.0.1"]
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        other = Taker([listener], shared.counters.front(1), b"\1")
        shared.takers.append(other)
        other.acceptor.start()
        client.setblocking(False)
        client.connect(str(tmp_path / "socket"))
        assert await shared.row_of(client) == 1
    assert other.owners == [f"uid {os.getuid()}"]


def _took(crowd: AcceptLimit, waiting: int) -> int:
    """Simulates an iteration in which ``waiting`` connections wait; returns how many are accepted."""
    room = crowd.room
    taken = min(room, waiting)
    crowd.took(taken, room)
    return taken


def test_who_comes_alone_is_seldom_followed_by_an_accept_in_vain() -> None:
    crowd = AcceptLimit()
    vain = 0
    for _ in range(170):
        room = crowd.room
        vain += room - _took(crowd, 1)
    assert vain <= 14


def test_of_a_crowd_twice_as_many_are_taken_each_turn() -> None:
    crowd = AcceptLimit()
    assert [_took(crowd, 1000) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 64, 64]
    # What is left of it, and one that comes later.
    assert _took(crowd, 5) == 5
    assert [_took(crowd, 1) for _ in range(3)] == [1, 1, 1]


def test_a_crowd_is_seen_after_many_that_came_alone() -> None:
    crowd = AcceptLimit()
    for _ in range(200):
        _took(crowd, 1)
    assert sum(_took(crowd, 1000) for _ in range(24)) >= 64


def test_others_may_take_what_one_was_woken_for() -> None:
    crowd = AcceptLimit()
    for _ in range(10):
        assert _took(crowd, 0) == 0
        assert crowd.room <= 2


@pytest.mark.parametrize("family", ["ipv4", "ipv6", "unix"])
def test_what_is_accepted_is_a_socket_like_any_other(family: str, tmp_path: Path) -> None:
    if family == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
    elif family == "ipv4":
        listener = socket.create_server(("127.0.0.1", 0))
    else:
        try:
            listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
        except OSError:
            pytest.skip("no IPv6 here")
    listening = ListeningSocket(listener)
    with pytest.raises(BlockingIOError):
        listening.accept()
    with socket.socket(listener.family) as client:
        client.connect(listener.getsockname())
        connection, address = listening.accept()
        with contextlib.closing(connection):
            assert connection.family == listener.family
            assert connection.type == socket.SOCK_STREAM
            assert address == client.getsockname()
            assert not os.get_inheritable(connection.fileno())
            client.sendall(b"x")
            assert connection.recv(1) == b"x"
    listening.close()
    assert listening.fileno() == -1
