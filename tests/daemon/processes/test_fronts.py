"""Front processes: as many as are asked for, on one socket, and told everything before they serve."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tensord.config.options import Grpc, Http, Options, Requests
from tensord.daemon.processes.child import FrontProcess
from tensord.daemon.processes.fronts import Fronts, automatic, of_one
from tensord.daemon.processes.listening import ListenError
from tensord.shm.control_records import ChildReady, ModelState

READY = ModelState("m", 1, "READY")


class Owner:
    """Stands for the supervisor that owns the fronts."""

    def __init__(self, processes: int = 2) -> None:
        self.options = Options(http=Http(port=0, processes=processes), grpc=Grpc(enabled=False))
        self.died: asyncio.Queue[FrontProcess] = asyncio.Queue()
        fake = "tests.daemon.fake_front"
        self.fronts = Fronts(
            {"http": fake, "grpc": fake},
            ["cpu:0"],
            lambda: self.options,
            itertools.count(1).__next__,
            lambda front: front.send(READY),
            self._said,
            self.died.put_nowait,
        )

    @staticmethod
    def _said(front: FrontProcess, record: Any, fds: list[int]) -> None:
        assert isinstance(record, ChildReady), "nobody asks"

    async def all_ready(self, count: int) -> list[FrontProcess]:
        while [front.ready for front in self.fronts] != [True] * count:
            await asyncio.sleep(0.01)
        return list(self.fronts)

    async def known(self, front: FrontProcess) -> dict[str, Any]:
        """Returns the models that a fake front knows; connects until that front accepts."""
        (url,) = self.fronts.urls("http")
        port = int(url.rpartition(":")[2])
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"{}\n")
            answer: dict[str, Any] = json.loads(await reader.readline())
            writer.close()
            if answer["pid"] == front.pid:
                return dict(answer["models"])


@pytest.fixture
async def owner(leaves_nothing: None) -> AsyncIterator[Owner]:
    made = Owner()
    made.fronts.listen({})
    made.fronts.start_all(at_once=1)
    yield made
    made.fronts.stop_listening()
    for front in list(made.fronts):
        front.kill()
    while made.fronts.by_incarnation:
        await made.died.get()
    made.fronts.close()
    made.fronts.close()


async def test_they_know_before_they_serve(owner: Owner) -> None:
    first, second = await owner.all_ready(2)
    assert [front.name for front in (first, second)] == ["http-0", "http-1"]
    for front in (first, second):
        assert (await owner.known(front))["m/1"]["state"] == "READY"


async def test_each_place_misses_one_until_it_is_ready(owner: Owner) -> None:
    assert owner.fronts.missing() == ["http-0", "http-1"]
    _, second = await owner.all_ready(2)
    assert owner.fronts.missing() == []
    second.kill()
    assert await owner.died.get() is second
    assert owner.fronts.missing() == ["http-1"]
    owner.fronts.start("http", 1)
    await owner.all_ready(2)
    assert owner.fronts.missing() == []


async def test_settled_waits_for_all_that_serve(owner: Owner) -> None:
    first, second = await owner.all_ready(2)
    owner.fronts.publish(ModelState("m", 2, "READY"))
    await owner.fronts.settled()
    for front in (first, second):
        assert "m/2" in await owner.known(front)
    os.kill(second.pid, signal.SIGSTOP)
    owner.fronts.publish(ModelState("m", 3, "READY"))
    waiting = [asyncio.ensure_future(owner.fronts.settled()) for _ in range(3)]
    while first.owes_since_ns or not second.owes_since_ns:
        await asyncio.sleep(0.01)
    assert not any(each.done() for each in waiting)
    waiting.pop().cancel()
    os.kill(second.pid, signal.SIGCONT)
    await asyncio.gather(*waiting)
    assert not second.owes_since_ns
    assert "m/3" in await owner.known(second)


async def test_nobody_waits_for_the_dead(owner: Owner) -> None:
    first, second = await owner.all_ready(2)
    os.kill(second.pid, signal.SIGSTOP)
    owner.fronts.publish(ModelState("m", 2, "READY"))
    waiting = asyncio.ensure_future(owner.fronts.settled())
    while not second.owes_since_ns:
        await asyncio.sleep(0.01)
    second.kill()
    await waiting
    assert await owner.died.get() is second
    assert list(owner.fronts) == [first]
    # Its replacement is told what was published meanwhile, and nobody waits for it before it serves.
    owner.fronts.start("http", 1)
    owner.fronts.publish(ModelState("m", 3, "READY"))
    await owner.fronts.settled()
    _, third = await owner.all_ready(2)
    assert third.name == "http-1"
    assert {"m/1", "m/3"} <= (await owner.known(third)).keys()


async def test_what_is_sent_to_the_dead_is_not_counted(owner: Owner) -> None:
    """A record sent to a dead front is not counted, because its row of the counters is now its replacement's."""
    _, second = await owner.all_ready(2)
    second.kill()
    assert await owner.died.get() is second
    owner.fronts.start("http", 1)
    counters, row = owner.fronts.counters("http-1")
    third = counters.front(row)
    third.read = 3  # as many as a front has been sent that starts
    assert not third.is_behind()
    for _ in range(10):
        second.send(READY)
    assert not third.is_behind()


async def test_connections_of_the_dead_do_not_count(owner: Owner) -> None:
    first, second = await owner.all_ready(2)
    port = int(owner.fronts.urls("http")[0].rpartition(":")[2])
    writers = []
    while not (owner.fronts.connections(first) and owner.fronts.connections(second)):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        writer.write(b"{}\n")
        await reader.readline()
    second.kill()
    assert await owner.died.get() is second
    assert owner.fronts.connections(second) == 0
    assert owner.fronts.connections(first) > 0
    for writer in writers:
        writer.close()


async def test_idle_fronts_are_asked_for_a_sign_of_life(owner: Owner) -> None:
    first, second = await owner.all_ready(2)
    asked = first.asked_ns
    owner.fronts.ask_idle(asked + 10, 0)
    owner.fronts.ask_idle(asked + 10, 1 << 62)
    assert first.asked_ns == asked
    owner.fronts.ask_idle(max(first.asked_ns, second.asked_ns) + 10, 5)
    assert first.asked_ns > asked
    while first.owes_since_ns or second.owes_since_ns:
        await asyncio.sleep(0.01)


async def test_a_place_that_is_taken() -> None:
    owner, other = Owner(), Owner()
    owner.fronts.listen({})
    port = int(owner.fronts.urls("http")[0].rpartition(":")[2])
    other.options = Options(http=Http(port=port, processes=2), grpc=Grpc(port=0))
    with pytest.raises(ListenError, match="Address already in use"):
        other.fronts.listen({})
    assert other.fronts.urls("grpc")
    other.fronts.close()
    assert other.fronts.urls("grpc") == []
    owner.fronts.close()


async def test_posts_are_there_whether_they_are_filled_or_not() -> None:
    owner = Owner()
    assert owner.fronts.slots() == {}
    owner.fronts.listen({})
    assert owner.fronts.slots() == {"http-0": "http", "http-1": "http"}
    assert not list(owner.fronts)
    owner.fronts.close()


MIB = 1 << 20


def test_one_front_has_everything() -> None:
    options = Options()
    assert of_one(options, 1) is options


@pytest.mark.parametrize(
    ("cores", "devices", "count"),
    [
        *[(1, ["cpu:0"], 1), (2, ["cpu:0"], 1), (31, ["cpu:0"], 1), (32, ["cpu:0", "cpu:1"], 2), (512, ["cpu:0"], 8)],
        *[(8, ["cuda:0"], 1), (17, ["cuda:0"], 2), (64, [f"cuda:{i}" for i in range(8)], 7), (256, ["cuda:0"], 8)],
        (1, ["cuda:0", "cuda:1"], 1),
    ],
)
def test_as_many_as_suit_the_host(cores: int, devices: list[str], count: int) -> None:
    assert automatic(cores, devices) == count


@pytest.mark.parametrize(
    ("processes", "in_flight", "collected"), [(2, 500, 128 * MIB), (3, 334, -(-256 * MIB // 3)), (64, 16, 64 * MIB)]
)
def test_http(processes: int, in_flight: int, collected: int) -> None:
    """A part is rounded up, and never less than the largest request needs."""
    options = Options(http=Http(processes=processes), requests=Requests(max_in_flight=1000))
    one = of_one(options, processes)
    assert (one.requests.max_in_flight, one.http.max_collected_byte_size) == (in_flight, collected)


def test_grpc() -> None:
    one = of_one(Options(grpc=Grpc(processes=4, max_receiving_byte_size=1 << 30)), 4)
    assert (one.requests.max_in_flight, one.grpc.max_receiving_byte_size) == (2048, 256 * MIB)


def test_a_limit_below_the_largest_request_stays() -> None:
    """The operator has chosen it so."""
    options = Options(http=Http(processes=8, max_collected_byte_size=MIB), requests=Requests(max_in_flight=1))
    one = of_one(options, 8)
    assert (one.requests.max_in_flight, one.http.max_collected_byte_size) == (1, MIB)
