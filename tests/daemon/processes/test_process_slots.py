"""Tests that a child that dies is replaced, later each time, while its slot is needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.config.options import Expert
from tensord.daemon.processes.child import Child
from tensord.daemon.processes.process_slots import HEALTHY_NS, SERVED_MAXIMUM, ProcessSlots, replacement_delay
from tensord.shm import child_process


class Dead:
    """The parts of a dead child that its slot uses."""

    name = "http-0"
    pid = 7
    started_ns = 0
    ready = False
    returncode = 1

    def describe_exit(self) -> str:
        return "exited with status 1"


def slots(needed: Callable[[Child], bool] = lambda _: True, give_up: Callable[[Child], bool] = lambda _: False) -> Any:
    return ProcessSlots(Expert(restart_delay=0.001, max_restart_delay=0.01), needed, give_up)


def dead(**fields: Any) -> Child:
    made = Dead()
    for name, value in fields.items():
        setattr(made, name, value)
    return cast(Child, made)


async def test_replaced_once_a_death() -> None:
    made, started = slots(), asyncio.Semaphore(0)
    for deaths in (1, 2, 3):
        made.died(dead(started_ns=1 << 62), started.release)
        await started.acquire()
        assert (made.deaths("http-0"), made.deaths("http-1")) == (deaths, 0)
        assert (made.restarts("http-0"), made.restarts("http-1")) == (deaths, 0)
    assert started.locked()


async def test_a_start_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    attempts: list[int] = []
    started = asyncio.Event()

    def start() -> None:
        attempts.append(len(attempts))
        if len(attempts) < 3:
            raise OSError(11, "Resource temporarily unavailable")
        started.set()

    made = slots()
    made.died(dead(), start)
    await started.wait()
    assert attempts == [0, 1, 2]
    assert made.restarts("http-0") == 1
    assert caplog.text.count("http-0 cannot be started: Resource temporarily unavailable") == 1


async def test_nobody_needs_it() -> None:
    """Neither when it dies, nor any more when its time has come."""
    needed, looked = [True], asyncio.Event()

    def is_needed(_: Child) -> bool:
        if not needed[0]:
            looked.set()
        return needed[0]

    made = slots(is_needed)
    made.died(dead(), lambda: pytest.fail("it is needed no more"))
    needed[0] = False
    await looked.wait()
    made.died(dead(), lambda: pytest.fail("it is needed no more"))
    assert made.deaths("http-0") == 1


async def test_what_another_start_would_repeat_is_given_up_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that cannot use its device; later, when the daemon serves, it is tried again as ever."""
    serving = [False]
    made, started = slots(give_up=lambda _: not serving[0]), asyncio.Semaphore(0)
    made.died(dead(returncode=child_process.NO_DEVICE), lambda: pytest.fail("it was given up"))
    assert "stopping: http-0 cannot use its device" in caplog.text
    serving[0] = True
    made.died(dead(returncode=child_process.NO_DEVICE), started.release)
    await started.acquire()


async def test_a_post_that_is_never_filled(caplog: pytest.LogCaptureFixture) -> None:
    """It is given up at the fifth death; once somebody was ready there, at none."""
    asked: list[str] = []

    def give_up(child: Child) -> bool:
        asked.append(child.name)
        return True

    made, started = slots(give_up=give_up), asyncio.Semaphore(0)
    made.died(dead(name="http-1", ready=True), started.release)
    await started.acquire()
    for name in ("http-1", "http-0"):
        for _ in range(4):
            made.died(dead(name=name, started_ns=1 << 62), started.release)
            await started.acquire()
    for status in (1, child_process.NO_DEVICE):
        made.died(dead(name="http-1", started_ns=1 << 62, returncode=status), started.release)
        await started.acquire()
    assert not asked
    made.died(dead(started_ns=1 << 62), lambda: pytest.fail("it was given up"))
    assert asked == ["http-0"]
    assert "stopping: http-0 died 5 times before it was ready" in caplog.text


async def test_series() -> None:
    made, lived = slots(), time.monotonic_ns() - HEALTHY_NS
    for count in range(1, 8):
        # One that hung at its start lived long, and was not healthy.
        made.died(dead(started_ns=lived), lambda: None)
        assert made.deaths("http-0") == count
    made.died(dead(started_ns=lived, ready=True), lambda: None)
    assert made.deaths("http-0") == 1
    made.died(dead(started_ns=time.monotonic_ns(), ready=True), lambda: None)
    assert made.deaths("http-0") == 2


def test_delays() -> None:
    options = Expert(restart_delay=0.1, max_restart_delay=1.0)
    for deaths, full in enumerate([0.1, 0.2, 0.4, 0.8, 1.0, 1.0]):
        assert 0.9 * full <= replacement_delay(options, deaths, False) <= full


@given(st.integers(0, 1 << 20), st.floats(0, 10), st.floats(10, 100))
def test_bounds(deaths: int, first: float, maximum: float) -> None:
    options = Expert(restart_delay=first, max_restart_delay=maximum)
    assert 0 <= replacement_delay(options, deaths, False) <= maximum


def test_who_had_come_up_is_replaced_soon_however_often_it_dies() -> None:
    options = Expert(restart_delay=0.1, max_restart_delay=10.0)
    for deaths in range(30):
        assert replacement_delay(options, deaths, True) <= SERVED_MAXIMUM
    assert replacement_delay(options, 30, False) > 5
