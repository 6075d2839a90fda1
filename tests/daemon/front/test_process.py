"""A front that was busy reads the bytes that had come before it ends a connection, or calls its client late."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import uvloop

from tensord.config.options import Options
from tensord.daemon.control.channel import ControlChannel
from tensord.daemon.front import process
from tensord.daemon.front.endpoints import Endpoints
from tensord.daemon.front.process import Front
from tensord.shm.channel import Channel
from tensord.shm.control_records import StateAcknowledged, StatePublished
from tensord.shm.record import decoder
from tensord.shm.running_time import RunningTime

# Its library makes a pipe with the first loop of a process, and keeps it.
uvloop.new_event_loop().close()


class BusyFront(Front):
    """A front with one connection, which is read late: something else took longer than the last call, while bytes came."""

    protocol = "http"

    def __init__(self) -> None:
        self.has_come = self.has_read = False
        #: The front's clock when bytes came.
        self.came_at = 0.0
        #: The calls of ``end``: whether the connection was to end at once, and whether the bytes that had come were read.
        self.ended: list[tuple[bool, bool]] = []
        #: The calls of ``check`` with a time after bytes had come: whether these were read.
        self.checked: list[bool] = []
        self.open_connections = {self}
        self.lingering = Mock(__len__=lambda _: 0)
        self.clock = RunningTime()
        self._certificates = Mock()  # type: ignore[assignment]
        self.submitter = Mock()
        self._acceptor = SimpleNamespace(close=self._close)  # type: ignore[assignment]
        self._check = Mock()  # type: ignore[assignment]
        self._busy, self._makes_busy = socket.socketpair()
        self._bytes, self._client = socket.socketpair()

    async def _close(self, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._bytes, self._read)
        loop.add_reader(self._busy, self._work)
        self._makes_busy.send(b"a long request")

    def _work(self) -> None:
        asyncio.get_running_loop().remove_reader(self._busy)
        self._client.send(b"a request")
        self.has_come, self.came_at = True, self.clock()
        time.sleep(process._LAST_CALL_NS / 1e9)

    def _read(self) -> None:
        asyncio.get_running_loop().remove_reader(self._bytes)
        self.has_read = True

    async def open(self, options: Options, endpoints: Endpoints) -> None:
        """Does nothing: the connection is open."""

    def connections(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def end(self, connection: Any, at_once: bool) -> None:
        self.ended.append((at_once, self.has_read))
        if at_once:
            self.open_connections.clear()

    def check(self, now: float) -> None:
        # A check that had looked at the clock before they came calls nobody late for them.
        if self.has_come and now > self.came_at:
            self.checked.append(self.has_read)

    async def run_checks(self) -> None:
        checking = asyncio.create_task(self._check_connections())
        await asyncio.sleep(0.01)
        await self._close(0)
        while not (self.checked or checking.done()):
            await asyncio.sleep(0.01)
        checking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await checking

    def free(self) -> None:
        for sock in (self._busy, self._makes_busy, self._bytes, self._client):
            sock.close()


@pytest.fixture
def front() -> Iterator[BusyFront]:
    made = BusyFront()
    yield made
    made.free()


def test_a_check_that_fails_costs_no_other_its_check(
    front: BusyFront, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_CHECK_SECONDS", 0.01)
    broken = Mock(**{"check.side_effect": ZeroDivisionError})
    front.open_connections.add(broken)
    front._certificates.look.side_effect = ZeroDivisionError  # type: ignore[attr-defined]
    uvloop.run(front.run_checks())
    assert front.checked
    assert front.lingering.check.called  # type: ignore[attr-defined]
    assert caplog.text.count("a check that is made each second failed") >= 2


def test_what_came_by_the_last_call_is_read_before_a_connection_is_ended(front: BusyFront) -> None:
    uvloop.run(front.drain(10_000_000_000))
    assert front.ended[-1] == (True, True)


def test_what_came_is_read_before_a_client_is_called_late(front: BusyFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_CHECK_SECONDS", 0.05)
    uvloop.run(front.run_checks())
    assert front.checked[0]


def test_connections_that_are_cut_have_ended_when_the_drain_has(front: BusyFront) -> None:
    """Behind TLS their end takes some iterations, and it ends the traces of their requests."""

    async def drained() -> None:
        cut = Mock(**{"abort.side_effect": lambda: asyncio.get_running_loop().call_later(0.01, connections.clear)})
        front.open_connections = connections = {cut}
        front._acceptor = Mock(close=AsyncMock())  # type: ignore[assignment]
        await front.drain(0)
        assert not connections

    uvloop.run(drained())


def test_a_connection_that_is_opened_while_others_are_cut_is_cut_as_well(front: BusyFront) -> None:
    """Its handshake began before the stop. It would hold up the front until its client leaves."""

    async def drained() -> None:
        connections: list[Mock] = []

        def opens() -> None:
            connections[:] = [Mock(**{"abort.side_effect": connections.clear})]

        connections.append(Mock(**{"abort.side_effect": opens}))
        front.open_connections = connections  # type: ignore[assignment]
        front._acceptor = Mock(close=AsyncMock())  # type: ignore[assignment]
        await front.drain(0)
        assert not connections

    uvloop.run(drained())


def test_what_a_front_sends_last_is_read_by_the_supervisor(front: BusyFront) -> None:
    """A front that stops may have more to send than its socket takes at once, such as the spans of many requests."""
    edges, count = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), 20_000
    supervisor = Channel(edges[1], decoder(StateAcknowledged))
    editions: list[int] = []

    async def stopped() -> None:
        loop = asyncio.get_running_loop()
        front._connection = ControlChannel(Channel(edges[0], decoder(StatePublished)), Mock(), Mock())
        front._started, front._serve, front._stop = (loop.create_future() for _ in range(3))
        front._started.set_result(Mock())
        front._stop.set_result(Mock())
        front.submitter = Mock()
        front.tracer = Mock(close=lambda: [front._connection.send(StateAcknowledged(each)) for each in range(count)])
        running = asyncio.create_task(front.run())
        while len(editions) < count:
            if (received := supervisor.receive()) is None:
                assert not running.done()
                await asyncio.sleep(0.001)
            else:
                editions.extend(record.edition for record in received[0])
        await running

    uvloop.run(stopped())
    assert editions == list(range(count))
    supervisor.close()
