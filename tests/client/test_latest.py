"""Inputs that come faster than a model answers: the newest is asked, and the newest answer is given."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import tensord_client

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
        assert live.replaced == 88
        assert len(model.asked) == 12
        assert live.behind == 2
        model.answer(10)
        model.answer(11)
        assert int(live.get(timeout=0)["x"][0]) == 99
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
