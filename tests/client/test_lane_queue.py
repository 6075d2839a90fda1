"""More requests than a lane's worker takes at a time are queued by the client."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tensord_client.errors import Cancelled, DeadlineExceeded, ServingError, Unavailable
from tensord_client.lane import Call, LaneConnection, LaneRequest

from tests.client.test_lane import addsub, check, identity
from tests.daemon_process import wait_until

_PATIENCE = 120.0


def slow(seconds: float) -> Call:
    return Call("slow", {"x": np.full(1, seconds, np.float32)})


def held_by(gate: Path) -> Call:
    """Returns a request that is answered once that file exists."""
    return Call("waits", {"path": np.array([str(gate)], object)})


def test_more_requests_than_a_lane_takes_wait(connection: LaneConnection) -> None:
    """Two lanes take 128 each. The others are sent when those are answered, whoever waits for them."""
    connection.open("slow")
    asked = [connection.ask(slow(0.3 if at < 2 else 0.0)) for at in range(600)]
    called: queue.SimpleQueue[LaneRequest] = queue.SimpleQueue()
    for each in asked[300:]:
        each.add_done_callback(called.put)
    assert {id(called.get(timeout=_PATIENCE)) for _ in range(300)} == {id(each) for each in asked[300:]}
    assert all(each.result(_PATIENCE)["y"].shape == (1,) for each in asked)


def test_streams_that_wait_are_sent_while_the_program_waits_for_nothing(
    connection: LaneConnection, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    first = [connection.ask(held_by(gate)) for _ in range(256)]
    given = {"base": np.zeros(16, np.float32), "count": np.array([1], np.int32)}
    streams = [connection.ask(Call("repeat", given, streams=True, detached=True)) for _ in range(10)]
    lanes = connection.model_of(held_by(gate)).lanes
    gate.touch()
    wait_until(lambda: not any(lane.queued for lane in lanes), "all streams to be sent")
    for each in (*first, *streams):
        each.cancel()


async def test_a_loop_has_any_number_of_requests_under_way(connection: LaneConnection) -> None:
    connection.open("addsub")

    async def ask(at: int) -> None:
        check(await connection.ask(addsub(at % 100)), at % 100)

    await asyncio.gather(*(ask(at) for at in range(1000)))


def test_what_waits_for_its_lane_is_cancelled_and_has_a_deadline(connection: LaneConnection, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    connection.open("slow")
    first = [connection.ask(held_by(gate)) for _ in range(256)]
    cancelled, late, last = (connection.ask(slow(0.0)) for _ in range(3))
    cancelled.cancel()
    with pytest.raises(Cancelled):
        cancelled.result(_PATIENCE)
    with pytest.raises(DeadlineExceeded):
        late.result(0.05)
    gate.touch()
    assert all(each.result(_PATIENCE)["y"].shape == (1,) for each in (*first, last))


def test_prepared_calls_wait_as_others_do(connection: LaneConnection, tmp_path: Path) -> None:
    """Each has its own answer: of inputs in shared memory, inside the request, and copied; one that is late waits no more."""
    gate = tmp_path / "gate"
    lies = connection.empty(1 << 14, np.float32)
    arrays = [lies, np.zeros(8, np.float32), np.zeros(5000, np.float32)] * 4
    calls = [connection.prepare(Call("identity", {"INPUT0": array})) for array in arrays]
    late = connection.prepare(Call("identity", {"INPUT0": np.zeros(8, np.float32)}))
    for call in (*calls, late):
        call(_PATIENCE)
    first = [connection.ask(held_by(gate)) for _ in range(300)]
    lanes = connection.model_of(held_by(gate)).lanes
    with pytest.raises(DeadlineExceeded):
        late(0.05)
    for at, array in enumerate(arrays):
        array[:] = at % 3
    got: dict[int, float] = {}

    def ask(at: int) -> None:
        got[at] = float(calls[at](_PATIENCE)["OUTPUT0"][-1])

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(len(lane.queued) for lane in lanes) == 300 - 256 + len(calls), "all calls to be queued")
    gate.touch()
    for thread in threads:
        thread.join()
    expected = {at: float(arrays[at][-1]) for at in range(len(calls))}
    assert got == expected
    assert all(each.result(_PATIENCE)["y"].shape == (1,) for each in first)
    for call in (*calls, late):
        assert call(_PATIENCE)["OUTPUT0"].ndim == 1


def test_so_many_requests_wait_and_one_more_is_told(connect: Callable[..., LaneConnection], tmp_path: Path) -> None:
    """Two lanes take 128 each, and 5 wait for each: whoever asks, for itself or on a loop, is told both numbers."""
    connection, gate = connect(max_waiting=5), tmp_path / "gate"
    prepared = connection.prepare(identity(np.ones(8, np.float32)))
    asked = [connection.ask(held_by(gate)) for _ in range(256 + 10)]
    text = r"^5 requests wait in this process to be sent, at most 5 may: wait for answers first$"
    with pytest.raises(Unavailable, match=text):
        connection.ask(held_by(gate))
    with pytest.raises(Unavailable, match=text):
        prepared(_PATIENCE)

    async def ask() -> None:
        await connection.ask(held_by(gate))

    with pytest.raises(Unavailable, match=text):
        asyncio.run(ask())
    gate.touch()
    assert all(each.result(_PATIENCE)["y"].shape == (1,) for each in asked)
    assert prepared(_PATIENCE)["OUTPUT0"].tolist() == [1] * 8


def test_what_waits_for_its_lane_ends_with_the_connection(connect: Callable[..., LaneConnection]) -> None:
    connection = connect()
    connection.open("slow")
    asked = [connection.ask(slow(0.2 if at < 2 else 0.0)) for at in range(300)]
    connection.close()
    for each in asked:
        with pytest.raises(ServingError):
            each.result(_PATIENCE)
