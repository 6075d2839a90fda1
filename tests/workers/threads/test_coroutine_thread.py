"""A thread for a model's coroutines goes on, whatever they do to it, and who waits for one of them hears of its end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

from tensord.workers.threads.coroutine_thread import CoroutineThread


@pytest.fixture
def thread() -> Iterator[CoroutineThread]:
    made = CoroutineThread("coroutines")
    yield made
    made.close()


async def exits() -> NoReturn:
    await asyncio.sleep(0)
    sys.exit(3)


async def is_interrupted() -> NoReturn:
    raise KeyboardInterrupt


async def stops_the_loop() -> int:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    return 1


async def five() -> int:
    return 5


def ended(act: Callable[[], Any]) -> Any:
    """Returns what ``act`` returns or raises in a thread of its own, which may wait for ever."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_result(type(error))

    threading.Thread(target=run, daemon=True).start()
    return future.result(600)


@pytest.mark.parametrize(
    ("made", "end"), [(exits, SystemExit), (is_interrupted, KeyboardInterrupt), (stops_the_loop, 1)]
)
def test_a_coroutine_that_would_end_the_thread(thread: CoroutineThread, made: Callable[[], Any], end: object) -> None:
    assert ended(lambda: thread.run(made())) == end
    assert ended(lambda: thread.run(five())) == 5


def test_who_began_it_hears_that_it_exited(thread: CoroutineThread) -> None:
    heard: concurrent.futures.Future[BaseException | None] = concurrent.futures.Future()
    thread.begin(exits(), heard.set_result)
    assert isinstance(heard.result(600), SystemExit)


def test_one_that_exits_when_it_is_cancelled(thread: CoroutineThread) -> None:
    """Others are cancelled as well, and everybody hears of it before ``close`` returns."""
    heard: list[BaseException | None] = []

    async def waits(last: Callable[[], object]) -> None:
        try:
            await asyncio.sleep(600)
        finally:
            last()

    for last in (sys.exit, int, int):
        thread.begin(waits(last), heard.append)
    thread.run(five())
    ended(thread.close)
    assert sorted(type(each).__name__ for each in heard) == ["CancelledError", "CancelledError", "SystemExit"]
