"""More requests than a lane's worker takes at a time are queued by the client."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable

import numpy as np
import pytest
from tensord_client.errors import Cancelled, DeadlineExceeded, ServingError
from tensord_client.lane import Call, LaneConnection
from tensord_client.pending import Pending

from tests.client.test_lane import addsub, check

_PATIENCE = 120.0


def slow(seconds: float) -> Call:
    return Call("slow", {"x": np.full(1, seconds, np.float32)})


def test_more_requests_than_a_lane_takes_wait(connection: LaneConnection) -> None:
    """Two lanes take 128 each. The others are sent when those are answered, whoever waits for them."""
    connection.open("slow")
    asked = [connection.ask(slow(0.3 if at < 2 else 0.0)) for at in range(600)]
    called: queue.SimpleQueue[Pending] = queue.SimpleQueue()
    for each in asked[300:]:
        each.add_done_callback(called.put)
    assert {id(called.get(timeout=_PATIENCE)) for _ in range(300)} == {id(each) for each in asked[300:]}
    assert all(each.result(_PATIENCE)["y"].shape == (1,) for each in asked)


async def test_a_loop_has_any_number_of_requests_under_way(connection: LaneConnection) -> None:
    connection.open("addsub")

    async def ask(at: int) -> None:
        check(await connection.ask(addsub(at % 100)), at % 100)

    await asyncio.gather(*(ask(at) for at in range(1000)))


def test_what_waits_for_its_lane_is_cancelled_and_has_a_deadline(connection: LaneConnection) -> None:
    connection.open("slow")
    first = [connection.ask(slow(0.5 if at < 2 else 0.0)) for at in range(256)]
    cancelled, late, last = (connection.ask(slow(0.0)) for _ in range(3))
    cancelled.cancel()
    with pytest.raises(Cancelled):
        cancelled.result(_PATIENCE)
    with pytest.raises(DeadlineExceeded):
        late.result(0.05)
    assert all(each.result(_PATIENCE)["y"].shape == (1,) for each in (*first, last))


def test_what_waits_for_its_lane_ends_with_the_connection(connect: Callable[..., LaneConnection]) -> None:
    connection = connect()
    connection.open("slow")
    asked = [connection.ask(slow(0.2 if at < 2 else 0.0)) for at in range(300)]
    connection.close()
    for each in asked:
        with pytest.raises(ServingError):
            each.result(_PATIENCE)
