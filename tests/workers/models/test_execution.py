"""A bad request of a batch costs only its own answer."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from tensord.shm.errors import Internal, InvalidArgument
from tensord.shm.seldom import LineRate
from tensord.workers.models import execution
from tensord.workers.models.execution import Execution, run
from tests.workers.made_requests import request_of


class Picky:
    """Refuses a whole batch because of one element, in the way that its value says."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def execute(self, execution: Execution) -> None:
        self.sizes.append(len(execution.requests))
        values = [int(request.arrays["x"][0]) for request in execution.requests]
        if 1 in values:
            raise InvalidArgument("one is not wanted")
        if 2 in values:
            raise ValueError("secret")
        if 3 in values:
            raise SystemExit(3)
        execution.results = [{"y": np.array([value * 10])} for value in values]

    def describe(self, error: BaseException) -> str:
        return f"picky failed with {type(error).__name__}"


def execute(*values: int) -> tuple[Picky, list[object]]:
    model = Picky()
    version = SimpleNamespace(repeatable=True)
    batch = Execution([request_of({"x": np.array([value])}, version=version) for value in values], 5)
    run(model, batch)
    assert batch.began_ns <= batch.gathered_ns <= batch.computed_ns
    return model, [
        result["y"].tolist() if isinstance(result, dict) else (type(result), str(result)) for result in batch.results
    ]


def test_good_batch() -> None:
    model, results = execute(7, 8)
    assert results == [[70], [80]]
    assert model.sizes == [2]


def test_everyone_gets_his_own(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        model, results = execute(7, 1, 8, 2, 3)
    assert results == [
        [70],
        (InvalidArgument, "one is not wanted"),
        [80],
        (Internal, "picky failed with ValueError"),
        (Internal, "picky failed with SystemExit"),
    ]
    assert model.sizes == [5, 1, 1, 1, 1, 1]
    assert "secret" in caplog.text


def test_failures_do_not_fill_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [10**9]
    monkeypatch.setattr(execution, "_FAILURES", LineRate(3, lambda: now_ns[0]))
    with caplog.at_level(logging.ERROR):
        _, results = execute(*[2] * 8)
        assert results == [(Internal, "picky failed with ValueError")] * 8
        assert [bool(record.exc_info) for record in caplog.records] == [True] * 3
        now_ns[0] += 10**9
        execute(2)
    assert len(caplog.records) == 4
    assert "picky failed with ValueError (5 such lines before it were left out)\n" in caplog.text


def test_a_batch_of_a_model_that_keeps_something_is_run_once(caplog: pytest.LogCaptureFixture) -> None:
    """A second run would compute again the requests that were computed before the failure."""
    model, version = Picky(), SimpleNamespace(repeatable=False)
    requests = [request_of({"x": np.array([value])}, version=version) for value in (7, 2, 8)]
    execution = Execution(requests, 5)
    with caplog.at_level(logging.ERROR):
        run(model, execution)
    assert [(type(result), str(result)) for result in execution.results] == [
        (Internal, "picky failed with ValueError")
    ] * 3
    assert model.sizes == [3]
    assert len(caplog.records) == 1
