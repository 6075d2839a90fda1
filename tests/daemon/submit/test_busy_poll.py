"""The loop stays awake for a few requests whose answers come soon, and for nothing else."""

from __future__ import annotations

import asyncio

import pytest

from tensord.daemon.submit.busy_poll import BusyPoll
from tensord.shm.spin import Spin

#: Longer than any test waits.
_LONG_NS = 3600 * 10**9


class Requests:
    """Pretends that so many requests are in flight, and counts how often it is asked."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked = 0

    def __len__(self) -> int:
        self.asked += 1
        return self.count


async def _turned(requests: Requests) -> int:
    """Returns how often the requests were asked in a hundred iterations of a loop that is kept awake."""
    before = requests.asked
    for _ in range(100):
        await asyncio.sleep(0)
    return requests.asked - before


def _poll(requests: Requests, limit_ns: int = _LONG_NS) -> BusyPoll:
    """Returns a busy poll that has seen an answer come in time."""
    poll = BusyPoll(asyncio.get_running_loop(), Spin(limit_ns), requests)
    poll.flushed()
    poll.answered()
    return poll


async def test_the_loop_turns_until_nothing_is_in_flight() -> None:
    requests = Requests(3)
    poll = _poll(requests)
    poll.flushed()
    assert await _turned(requests) >= 99
    # Once more does not make it two.
    poll.flushed()
    assert await _turned(requests) <= 101
    assert "turning" in repr(poll)
    requests.count = 0
    await _turned(requests)
    assert "turning" not in repr(poll)
    assert await _turned(requests) == 0


@pytest.mark.parametrize("count", [0, 5])
async def test_it_sleeps_with_nothing_to_wait_for_and_where_there_is_always_something_to_do(count: int) -> None:
    requests = Requests(1)
    poll = _poll(requests)
    requests.count = count
    poll.flushed()
    assert await _turned(requests) == 0


async def test_it_sleeps_until_an_answer_has_come_in_time() -> None:
    requests = Requests(2)
    poll = BusyPoll(asyncio.get_running_loop(), Spin(_LONG_NS), requests)
    poll.flushed()
    assert await _turned(requests) == 0
    poll.answered()
    poll.flushed()
    assert await _turned(requests) > 0
    requests.count = 0
    await _turned(requests)


async def test_a_limit_of_0_switches_it_off() -> None:
    requests = Requests(2)
    poll = _poll(requests, 0)
    poll.flushed()
    poll.look(lambda timeout: pytest.fail("it looked"), lambda worker: pytest.fail("it received"), "worker")
    assert await _turned(requests) == 0


async def test_it_stops_when_the_time_is_up() -> None:
    requests = Requests(2)
    poll = _poll(requests, 1_000_000)
    poll.flushed()
    while "turning" in repr(poll):
        await asyncio.sleep(0)
    assert requests.count == 2


async def test_the_only_request_is_looked_for_until_it_is_answered() -> None:
    requests, looks, received = Requests(1), 0, 0
    poll = _poll(requests)

    def ready(timeout: int) -> bool:
        nonlocal looks
        assert timeout == 0
        looks += 1
        return looks % 3 == 0

    def receive(worker: str) -> bool:
        nonlocal received
        received += 1
        # What comes first is something else.
        requests.count = int(received < 2)
        return True

    for _ in range(15):
        poll.look(ready, receive, "worker")
    # There may be others.
    assert looks == 0
    poll.look(ready, receive, "worker")
    assert (looks, received) == (6, 2)
    # Its worker is gone.
    requests.count = 1
    poll.look(ready, lambda worker: False, "worker")
    assert looks == 9
    # Another client came.
    requests.count = 2
    poll.flushed()
    requests.count = 1
    poll.look(ready, receive, "worker")
    assert looks == 9
