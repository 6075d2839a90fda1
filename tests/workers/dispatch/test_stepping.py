"""Steps in a worker's loop: a request that cannot begin, while others have slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensord.workers.models.stepped_model import DeviceRun, SteppedModel
from tests.records import Tensor, WholeAnswer
from tests.repositories import write_model
from tests.workers.worker_loop import WorkerLoop

#: Counts on from its start, eight times.
COUNTS = """
    import jax.numpy as jnp

    inputs = {"start": "INT32[1]"}
    outputs = {"y": "INT32[1]"}
    slots, max_steps = 4, 8

    def create(path, config, device):
        def init(params, slots):
            return jnp.zeros(slots, jnp.int32)

        def insert(params, carry, slot, inputs):
            return carry.at[slot].set(inputs["start"][0]), {}

        def step(params, carry, active):
            return carry + active, {"y": (carry + active)[:, None]}, active, jnp.zeros_like(active)

        return (init, insert, step), None
"""


@pytest.fixture
def counting(loop: WorkerLoop, tmp_path: Path) -> WorkerLoop:
    write_model(tmp_path, "counts", COUNTS, 'backend: "jax"')
    loop.load(tmp_path / "counts")
    return loop


def stepped(loop: WorkerLoop) -> SteppedModel:
    (found,) = [version.loaded.stepped for version in loop.worker._models]
    assert found is not None
    return found


def begin(loop: WorkerLoop, start: int) -> int:
    return loop.submit("counts", [Tensor("start", "INT32", (1,), np.array([start], np.int32).tobytes())])


def read(answers: list[WholeAnswer], number: int) -> list[Any]:
    """Returns the numbers that a request got, and the error that it ended with."""
    found: list[Any] = []
    for answer in answers:
        if answer.request_id == number and answer.code:
            found.append(answer.message)
        elif answer.request_id == number:
            places = [tensor.place for tensor in answer.outputs]
            found += [int(np.frombuffer(place, np.int32)[0]) for place in places if isinstance(place, bytes)]
    return found


def until(loop: WorkerLoop, answers: list[WholeAnswer], *numbers: int) -> None:
    """Reads answers until these requests have ended."""
    while not {answer.request_id for answer in answers if answer.final}.issuperset(numbers):
        answers += loop.answers(1)


def test_an_insertion_that_fails_before_it_has_the_carry_costs_its_own_request(counting: WorkerLoop) -> None:
    """1. One request has a slot and some responses. 2. The next cannot be inserted. 3. The first goes on where it was."""
    model = stepped(counting)
    (key,) = model.executables.inserts
    insert = model.executables.inserts[key]

    def fails(*_: Any) -> Any:
        raise RuntimeError("no memory for its inputs")

    first = begin(counting, 100)
    answers = counting.answers(1)
    model.executables.inserts[key] = fails
    second = begin(counting, 200)
    until(counting, answers, second)
    model.executables.inserts[key] = insert
    third = begin(counting, 300)
    until(counting, answers, first, second, third)
    assert read(answers, first) == list(range(101, 109))
    assert read(answers, second) == ["model 'counts' version 1 failed with RuntimeError"]
    assert read(answers, third) == list(range(301, 309))


def test_a_step_that_fails_after_it_has_the_carry_costs_those_that_have_slots(counting: WorkerLoop) -> None:
    """1. Two have slots. 2. A step fails with what they had. 3. Who comes then begins with a new carry."""
    model = stepped(counting)
    steps = dict(model.executables.steps)

    def fails(*given: Any) -> Any:
        next(iter(steps.values()))(*given)
        raise RuntimeError("lost on the way")

    numbers = [begin(counting, start) for start in (100, 200)]
    answers = counting.answers(2)
    for size in steps:
        model.executables.steps[size] = fails
    until(counting, answers, *numbers)
    model.executables.steps.update(steps)
    third = begin(counting, 300)
    until(counting, answers, third)
    for number, start in zip(numbers, (100, 200), strict=True):
        *values, error = read(answers, number)
        assert values == list(range(start + 1, start + 1 + len(values)))
        assert error == "model 'counts' version 1 failed with RuntimeError"
    assert read(answers, third) == list(range(301, 309))


@pytest.mark.parametrize("at_once", [False, True])
def test_who_joins_is_inserted_before_another_step(
    counting: WorkerLoop, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """1. A request is stepped; the device is asked for a step ahead, or has done each at once. 2. While a step is read another
    request comes. 3. It is the next thing that the device gets: its first response waits for what was on its way, no more."""
    model, given, came = stepped(counting), list[str](), list[int]()
    insert, step, read_run = model.insert, model.step, DeviceRun.read
    monkeypatch.setattr(DeviceRun, "ready", property(lambda _: at_once))

    def inserts(*arguments: Any) -> DeviceRun:
        given.append("insert")
        return insert(*arguments)

    def steps(*arguments: Any) -> DeviceRun:
        given.append("step")
        return step(*arguments)

    def reads(run: DeviceRun) -> Any:
        if not came and given.count("step") == 3:
            came.append(begin(counting, 200))
            counting.front.flush()
            given.append("came")
        return read_run(run)

    monkeypatch.setattr(model, "insert", inserts)
    monkeypatch.setattr(model, "step", steps)
    monkeypatch.setattr(DeviceRun, "read", reads)
    first = begin(counting, 100)
    answers = counting.answers(1)
    while not came:
        answers += counting.answers(1)
    until(counting, answers, first, *came)
    at = given.index("came")
    assert given[at + 1 : at + 3] == ["insert", "step"]
    # Two are ahead of what is read, where the device is not done at once.
    assert given[: at + 1] == ["insert", "step", "step", "step", "came"]
    assert read(answers, came[0]) == list(range(201, 209))


def test_one_of_those_that_join_together_that_costs_the_state_is_the_last_that_is_tried(
    loop: WorkerLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """1. Two join together, and their insertion fails. 2. That of the first alone loses the state, which fails the second too.
    3. The second is not inserted: its slot is free by now, which would be taken for a failure of the model."""
    together = COUNTS.replace("max_steps = 4, 8", "max_steps, insert_rows = 4, 8, 2").replace(
        '["start"][0]', '["start"][:, 0]'
    )
    write_model(tmp_path, "counts", together, 'backend: "jax"')
    loop.load(tmp_path / "counts")
    model, tried = stepped(loop), list[int]()

    def fails(requests: Any, *_: Any) -> DeviceRun:
        tried.append(len(requests))
        raise RuntimeError("not these") if len(requests) > 1 else model.lost()

    monkeypatch.setattr(model, "insert", fails)
    numbers = [begin(loop, start) for start in (100, 200)]
    answers: list[WholeAnswer] = []
    until(loop, answers, *numbers)
    assert tried == [2, 1]
    assert [code for answer in answers for code in [answer.code] if code] == ["INTERNAL", "INTERNAL"]
    assert "KeyError" not in caplog.text
