"""The line that HAProxy's agent-check reads, and the part of the time in which workers are busy."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from tensord.config.options import Metrics
from tensord.daemon.metrics import agent
from tensord.daemon.metrics.agent import WINDOW_NS, Agent, BusyPart, line

SECOND = 10**9


@pytest.mark.parametrize(
    ("draining", "unready", "busy", "expected"),
    [
        (False, "", 0.0, b"up ready 100%\n"),
        (False, "", 0.25, b"up ready 75%\n"),
        # 0% would drain.
        (False, "", 1.0, b"up ready 1%\n"),
        (True, "", 0.0, b"drain\n"),
        (True, "2 of 3 models are not served: a, b", 0.0, b"drain\n"),
        (False, "2 of 3 models are not served: a\n, b", 0.0, b"down #2 of 3 models are not served: a , b\n"),
        (False, 1000 * "x", 0.0, b"down #" + 100 * b"x" + b"\n"),
    ],
)
def test_lines(draining: bool, unready: str, busy: float, expected: bytes) -> None:
    assert line(draining, unready, busy) == expected


def test_the_busy_part() -> None:
    busy = BusyPart()
    assert busy.value == 1.0
    busy.look(0, 7 * SECOND, 2)
    assert busy.value == 0.0
    for second in range(1, 20):
        # Two workers, of which one is busy for half of the time.
        busy.look(second * SECOND, (7 * SECOND) + second * SECOND // 2, 2)
        assert busy.value == pytest.approx(0.25)
    # The last seconds count alone.
    for second in range(20, 27):
        busy.look(second * SECOND, 17 * SECOND, 2)
    assert busy.value == 0.0
    # A worker with a long run is busy before its end.
    busy.look(28 * SECOND, 17 * SECOND, 2, 1)
    assert busy.value == 0.5
    busy.look(28 * SECOND + WINDOW_NS, 100 * SECOND, 2)
    assert busy.value == 1.0


class Served:
    """An agent on a free port, over a daemon whose state the test sets."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.state = False, ""
        self.looks = 0
        self.agent = Agent(Metrics(agent_port=self.port), lambda: self.state, self.look)

    async def look(self, busy: BusyPart) -> None:
        self.looks += 1
        busy.look(self.looks * SECOND, 0, 1)

    async def ask(self, sends: bytes = b"") -> bytes:
        """Connects; returns all bytes until the connection ends."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sends)
        answer = await reader.read()
        writer.close()
        return answer


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    made.agent.listen()
    await made.agent.open()
    yield made
    made.agent.close()


async def test_whoever_connects_is_told(served: Served) -> None:
    while not served.looks:
        await asyncio.sleep(0.01)
    assert await served.ask() == b"up ready 100%\n"
    served.state = False, "starting"
    assert await served.ask(b"what HAProxy sends before\n") == b"down #starting\n"
    served.state = True, ""
    assert await served.ask() == b"drain\n"


async def test_who_stays_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_LINGER", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    assert (await reader.read()).endswith(b"\n")
    await asyncio.sleep(0.1)

    async def send_on() -> None:
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    with pytest.raises(ConnectionError):
        await send_on()


async def test_without_a_port_there_is_none() -> None:
    made = Agent(Metrics(), lambda: (False, ""), Served().look)
    made.listen()
    await made.open()
    made.close()
