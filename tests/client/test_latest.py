"""Inputs that come faster than a model answers: the newest is asked, and the newest answer is given."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensord_client
from tensord_client.asynchronous import AsyncLatest

from tensord import testing
from tests.daemon_process import PATIENCE


@pytest.fixture(params=[tensord_client, testing], ids=["client", "testing"])
def library(request: pytest.FixtureRequest) -> Any:
    return request.param


class Slow:
    """A model that answers when the test tells it to."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Future[Any]]] = []

    def submit(self, inputs: Mapping[str, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.asked.append((int(inputs["x"][0]), future))
        return future

    def answer(self, at: int) -> None:
        value, future = self.asked[at]
        future.set_running_or_notify_cancel()
        future.set_result({"x": np.array([value])})


def test_ten_times_too_fast(library: Any) -> None:
    """Two are under way at most, so an answer is never older than two executions; what waits is replaced."""
    model = Slow()
    with library.Latest(model.submit) as live:
        frame = np.zeros(1, np.int64)
        got = []
        for number in range(100):
            frame[:] = number
            live.put({"x": frame})
            if number % 10 == 9:
                model.answer(number // 10)
                got.append(int(live.get(timeout=0)["x"][0]))
        assert got == [0, 1, 9, 19, 29, 39, 49, 59, 69, 79]
        assert (live.replaced, live.missed) == (88, 0)
        assert len(model.asked) == 12
        assert live.behind == 2
        model.answer(10)
        model.answer(11)
        assert int(live.get(timeout=0)["x"][0]) == 99
        assert live.missed == 1, "the one before"
        assert live.behind == 0
        with pytest.raises(library.DeadlineExceeded):
            live.get(timeout=0)


def test_an_answer_that_is_overtaken_is_left_out(library: Any) -> None:
    model = Slow()
    with library.Latest(model.submit) as live:
        for number in (1, 2):
            live.put({"x": [number]})
        model.answer(1)
        assert live.get()["x"].tolist() == [2]
        model.answer(0)
        with pytest.raises(library.DeadlineExceeded):
            live.get(timeout=0)


class Place(NamedTuple):
    at: Any
    speed: float


def test_what_is_stored_is_a_copy(library: Any) -> None:
    """In lists and tuples as well, and of others' arrays; what lies on a GPU stays there."""
    asked: list[Any] = []

    class Other:
        """An array of another library."""

        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return self.array

    class OnDevice:
        place = "somewhere"
        dtype = np.dtype(np.float32)
        __dlpack__ = None

    def submit(inputs: Any) -> Future[Any]:
        asked.append(inputs)
        return Future()

    value, on_device = np.zeros(2), OnDevice()
    inputs = {"a": [value, Place(value, 0.5)], "b": {"c": (Other(value), "text")}, "d": on_device}
    with library.Latest(submit) as live:
        for _ in range(3):
            live.put(inputs)
        value[:] = 7
        live._under_way[1].set_result({})
        stored = asked[2]
        assert stored["d"] is on_device
        assert stored["b"]["c"][1] == "text"
        assert stored["a"][1].speed == 0.5
        for each in (stored["a"][0], stored["a"][1].at, stored["b"]["c"][0]):
            assert each.tolist() == [0, 0]


@pytest.mark.parametrize("error", [MemoryError("none"), tensord_client.NotFound("it")])
def test_whatever_fails_is_told(library: Any, error: Exception) -> None:
    """A request, and the next one that is sent as it ends."""
    futures: list[Future[Any]] = []

    def submit(inputs: Any) -> Future[Any]:
        if len(futures) == 2:
            raise error
        futures.append(Future())
        return futures[-1]

    with library.Latest(submit) as live:
        for number in range(3):
            live.put({"x": number})
        futures[0].set_exception(error)
        with pytest.raises(type(error)):
            live.get(timeout=0)
        assert live.behind == 0
        assert live.missed == 1


def test_an_error_is_the_newest(library: Any) -> None:
    model = Slow()
    with library.Latest(model.submit) as live:
        live.put({"x": [1]})
        model.asked[0][1].set_exception(library.Internal("it failed"))
        with pytest.raises(library.Internal, match="it failed"):
            live.get()
        live.put({"x": [2]})
        model.answer(1)
        assert live.get()["x"].tolist() == [2]


def test_who_waits_is_woken(library: Any) -> None:
    model = Slow()
    live = library.Latest(model.submit)
    got: list[Any] = []

    def main() -> None:
        got.append(live.get(PATIENCE)["x"].tolist())
        try:
            live.get(PATIENCE)
        except library.Cancelled as error:
            got.append(error.message)

    waiting = threading.Thread(target=main)
    waiting.start()
    live.put({"x": [5]})
    model.answer(0)
    while not got:
        pass
    live.put({"x": [6]})
    live.close()
    live.close()
    waiting.join()
    assert got == [[5], "it was closed"]
    assert model.asked[1][1].cancelled()
    with pytest.raises(library.Cancelled):
        live.put({"x": [7]})


@pytest.mark.parametrize("ending", ["cancelled", "dropped"])
def test_a_second_event_loop(ending: str) -> None:
    """The first ends with two requests under way, one that waits, and a task in ``get``; in the second all goes on."""
    asked: list[int] = []

    def submit(inputs: Mapping[str, Any]) -> asyncio.Future[Any]:
        async def answer() -> Any:
            asked.append(number := int(inputs["x"][0]))
            if number < 4:
                await asyncio.get_running_loop().create_future()
            return {"x": [number]}

        return asyncio.ensure_future(answer())

    async def first() -> None:
        for number in (1, 2, 3):
            live.put({"x": [number]})
        tasks.append(asyncio.ensure_future(live.get()))
        await asyncio.sleep(0.01)

    async def second() -> None:
        for number in (4, 5):
            live.put({"x": [number]})
        while live.behind:
            assert (await live.get(PATIENCE))["x"] in ([4], [5])
        live.put({"x": [6]})
        assert (await live.get(PATIENCE))["x"] == [6]
        await live.close()

    live = AsyncLatest(submit)
    tasks: list[Any] = []
    if ending == "cancelled":
        asyncio.run(first())
    else:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)  # which is told of the tasks that are left
        loop.run_until_complete(first())
        loop.close()
    asyncio.run(second())
    assert (asked, live.replaced) == ([1, 2, 4, 5, 6], 1)
