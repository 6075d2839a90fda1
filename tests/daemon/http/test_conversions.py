"""Conversions run in steps, one per iteration of the event loop, fairly, with exactly one callback, or none after a cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

from tensord.daemon.http.conversions import Conversions


def counting(name: str, steps: int, log: list[str]) -> Generator[None, None, str]:
    for number in range(steps):
        log.append(f"{name}{number}")
        yield
    return name


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def refuse(error: Exception) -> None:
    raise AssertionError from error


async def test_jobs_take_turns_and_others_come_between() -> None:
    log: list[str] = []
    conversions = Conversions()
    conversions.run(counting("a", 3, log), lambda result: log.append(f"{result} done"), refuse)
    conversions.run(counting("b", 1, log), lambda result: log.append(f"{result} done"), refuse)
    assert log == []
    for _ in range(4):
        await asyncio.sleep(0)
        log.append("-")
    await turns()
    assert log == ["a0", "-", "b0", "-", "a1", "-", "b done", "-", "a2", "a done"]


async def test_an_error_goes_to_its_own_job() -> None:
    def failing() -> Generator[None, None, None]:
        yield
        raise ValueError("no")

    log: list[str] = []
    conversions = Conversions()
    conversions.run(failing(), lambda _: log.append("done"), lambda error: log.append(str(error)))
    conversions.run(counting("b", 2, []), lambda result: log.append(result), refuse)
    await turns()
    assert log == ["no", "b"]


async def test_who_is_cancelled_is_never_heard_of_again() -> None:
    log: list[str] = []
    conversions = Conversions()
    jobs = [conversions.run(counting(name, 3, log), log.append, refuse) for name in "ab"]
    await turns(3)
    jobs[0].cancel()
    jobs[0].cancel()
    await turns()
    assert log == ["a0", "b0", "a1", "b1", "b2", "b"]


async def test_a_callback_may_begin_the_next_job() -> None:
    log: list[str] = []
    conversions = Conversions()
    conversions.run(counting("a", 1, log), lambda _: conversions.run(counting("b", 1, log), log.append, refuse), refuse)
    await turns()
    assert log == ["a0", "b0", "b"]
