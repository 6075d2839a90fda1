"""Tests what a connection that is used once costs the HTTP front, from accepting it to its end, counted in its own code.

Over a socket: the client connects, asks, reads its answer and closes. What the kernel and the loop do besides
cannot be counted here; that they are asked for nothing in vain can.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tensord.daemon.front.acceptor import Acceptor
from tensord.daemon.front.socket_transport import SocketWatch
from tensord.daemon.http.connection import Http1Connection
from tensord.shm.messages import Prepare, RequestRecord
from tests.fakes import complete_numbered
from tests.records import WholeAnswer
from tests.work.baseline import Baseline, counts
from tests.work.connection import Bench, KeptTransport
from tests.work.counter import Work
from tests.work.test_front_work import _SMALL, binary, two_small

WARM, COUNT = 3, 10
_TURNS = 200
REQUEST = binary("addsub", _SMALL, 128)
#: Its client says that it is used once: our side ends first, and then the client's.
LAST = REQUEST.replace(b"Accept: */*", b"Connection: close")


class Door(Bench):
    """A front's bench with a listening socket."""

    def open(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.sockets = SocketWatch()
        self.acceptor = Acceptor(
            [self.listener.dup()],
            self.serving.counters,
            lambda socket, owner: self.sockets.open(socket, Http1Connection(self.serving, owner)),
        )
        self.acceptor.start()

    async def turn(self, work: Work, done: Callable[[], bool]) -> None:
        for _ in range(_TURNS):
            if done():
                return
            with work.counting():
                await asyncio.sleep(0.001)
        raise AssertionError("nothing happens any more")

    async def visit(self, work: Work, request: bytes) -> bytes:
        """Lets a client connect, ask and leave; returns all bytes that it got."""
        got: list[WholeAnswer] = []
        answer = bytearray()

        def asked() -> bool:
            for record in self.worker.receive() or ():
                assert isinstance(record, Prepare | RequestRecord)
                if (whole := self._whole.read(record)) is not None:
                    got.append(two_small(self.worker, whole))
                    if isinstance(record, RequestRecord) and isinstance(record.prepared, int):
                        complete_numbered(self.worker, got[0])
                    else:
                        self.worker.complete(got[0].record)
                    assert self.worker.flush()
            return bool(got)

        def answered() -> bool:
            with contextlib.suppress(BlockingIOError):
                answer.extend(client.recv(1 << 16))
            return answer.endswith(bytes(128))

        with socket.create_connection(self.listener.getsockname()) as client:
            client.setblocking(False)
            await self.turn(work, lambda: bool(self.connections))
            client.sendall(request)
            await self.turn(work, asked)
            await self.turn(work, answered)
        await self.turn(work, lambda: not (self.connections or self.serving.lingering))
        return bytes(answer)


@pytest.fixture
async def made() -> AsyncIterator[Door]:
    door = Door()
    door.open()
    yield door
    await door.acceptor.close(1)
    door.sockets.close()
    door.listener.close()
    door.close()


async def visits(made: Door, work: Work, count: int, request: bytes) -> None:
    for _ in range(count):
        assert (await made.visit(work, request)).startswith(b"HTTP/1.1 200 OK\r\n")


@counts
@pytest.mark.parametrize(("name", "request_"), [("closes", REQUEST), ("is-closed", LAST)])
async def test_instructions(name: str, request_: bytes, baseline: Baseline, made: Door) -> None:
    await visits(made, Work(), WARM, request_)
    work = Work()
    await visits(made, work, COUNT, request_)
    baseline.check(f"http connection {name}", work.instructions / COUNT)


async def test_system_calls(made: Door) -> None:
    """An accept, now and then one in vain; reads at once, of the request and of the end; the lane's two, and the answer."""
    await visits(made, Work(), WARM, REQUEST)
    work = Work()
    await visits(made, work, COUNT, REQUEST)
    assert work.system_calls.total() <= 7 * COUNT + 3, work.system_calls


async def test_a_transport_is_asked_nothing() -> None:
    """Its answers would cost system calls, and the peer is known since the accept."""
    asked: list[str] = []

    class Asked(KeptTransport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            asked.append(name)
            return default

    bench = Bench()
    bench.transport = Asked
    try:
        await bench.answer(Work(), [(bench.connect(), REQUEST)], two_small)
    finally:
        bench.close()
    assert not asked


@pytest.mark.parametrize("request_", [REQUEST, LAST], ids=["closes", "is-closed"])
async def test_nothing_is_left_for_the_garbage_collector(request_: bytes, made: Door) -> None:
    await visits(made, Work(), WARM, request_)
    gc.collect()
    gc.disable()
    try:
        await visits(made, Work(), COUNT, request_)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = [type(each) for each in gc.garbage if not isinstance(each, socket.socket)]  # asyncio leaves its own
        ours = [kind.__name__ for kind in kinds if kind.__module__.startswith("daemon.")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not ours
