"""Steps of many requests: whether they are answered one by one or in one go, each gets its own, in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensord.config.options import Expert, Options
from tensord.shm.messages import RequestedOutput
from tensord.workers.dispatch.stepping import MANY
from tensord.workers.models.model_version import ModelVersion
from tests.records import Tensor, WholeAnswer
from tests.repositories import write_model
from tests.workers.worker_loop import OPTIONS, WorkerLoop

SLOTS, STEPS = 2 * MANY, 24
#: Counts on from its start; ``half`` is the number's half.
COUNTS = f"""
    import jax.numpy as jnp

    inputs = {{"start": "INT32[1]"}}
    outputs = {{"y": "INT32[1]", "half": "FP32[2]"}}
    slots, max_steps, inserts_per_step = {SLOTS}, {STEPS}, 8

    def create(path, config, device):
        def init(params, slots):
            return jnp.zeros(slots, jnp.int32)

        def insert(params, carry, slot, inputs):
            return carry.at[slot].set(inputs["start"][0]), {{}}

        def step(params, carry, active):
            value = carry + active
            half = jnp.stack([value / 2, value / 2], 1).astype(jnp.float32)
            return value, {{"y": value[:, None], "half": half}}, active, value % 1000 == 900

        return (init, insert, step), None
"""
#: What a response counts that its client has not taken.
BYTE_SIZE = 256 + 4 + 8


@pytest.fixture
def counting(leaves_nothing: None, tmp_path: Path) -> Iterator[WorkerLoop]:
    """Yields a worker's loop in which twenty responses may be ahead of a client."""
    made = WorkerLoop(Options(executables=OPTIONS.executables, expert=Expert(spin_us=0, max_ahead=BYTE_SIZE * 20)))
    write_model(tmp_path, "counts", COUNTS, 'backend: "jax"')
    made.load(tmp_path / "counts")
    yield made
    made.close()


def begin(loop: WorkerLoop, start: int, lane: Any = None, outputs: tuple[RequestedOutput, ...] = ()) -> int:
    inputs = [Tensor("start", "INT32", (1,), np.array([start], np.int32).tobytes())]
    return loop.submit("counts", inputs, outputs, lane=lane)


class Heard:
    """Records the responses of each request, and how many of them were final or an error."""

    def __init__(self) -> None:
        self.values: dict[int, list[int]] = {}
        self.ends: dict[int, int] = {}

    def add(self, answers: list[WholeAnswer]) -> None:
        for answer in answers:
            self.ends[answer.request_id] = self.ends.get(answer.request_id, 0) + answer.final
            found = {tensor.name: tensor.place for tensor in answer.outputs}
            if isinstance(place := found.get("y"), bytes):
                (value,) = np.frombuffer(place, np.int32).tolist()
                self.values.setdefault(answer.request_id, []).append(value)
                if isinstance(half := found.get("half"), bytes):
                    assert np.frombuffer(half, np.float32).tolist() == [value / 2] * 2


def until_ended(loop: WorkerLoop, heard: Heard, numbers: list[int], lane: Any = None) -> None:
    """Takes each response as it comes, until these requests have ended."""
    lane = lane or loop.front
    while not all(heard.ends.get(number) for number in numbers):
        answers = loop.answers(1, lane)
        heard.add(answers)
        for answer in answers:
            if not answer.final:
                lane.taken(answer.request_id, BYTE_SIZE)


def version_of(loop: WorkerLoop) -> ModelVersion:
    (version,) = loop.worker._models
    return version


def test_each_gets_its_own(counting: WorkerLoop) -> None:
    """1. More requests than slots; the late ones get the slots of others. 2. One wants one output only. 3. Some end early."""
    heard = Heard()
    starts = [1000 * number for number in range(1, SLOTS + 8)]
    early = [1000 * number + 890 for number in range(1, 6)]
    numbers = [begin(counting, start) for start in starts + early]
    only_y = begin(counting, 500_000, outputs=(RequestedOutput("y"),))
    until_ended(counting, heard, [*numbers, only_y])
    for number, start in zip(numbers, starts + early, strict=True):
        count = 10 if start in early else STEPS
        assert heard.values[number] == list(range(start + 1, start + 1 + count))
    assert heard.values[only_y] == list(range(500_001, 500_001 + STEPS))
    assert set(heard.ends.values()) == {1}
    counted = version_of(counting).statistics.to_dict()
    assert counted["inference_stats"]["success"]["count"] == len(numbers) + 1
    whole = len(starts) + 1
    for number in range(STEPS):
        response = counted["response_stats"][str(number)]
        expected = whole + len(early) if number < 10 else whole
        assert {response[name]["count"] for name in ("compute_infer", "compute_output", "success")} == {expected}
        assert 0 < response["success"]["ns"] < 60e9 * expected
    assert max(each["batch_size"] for each in counted["batch_stats"]) == SLOTS


def test_of_two_submitters_each_hears_of_its_own_requests(counting: WorkerLoop) -> None:
    other = counting.open_lane(8)
    mine = [begin(counting, 1000 * number) for number in range(1, MANY)]
    theirs = [begin(counting, 1000 * number + 100, other) for number in range(1, MANY)]
    assert other.flush()
    heard, there = Heard(), Heard()
    until_ended(counting, heard, mine)
    until_ended(counting, there, theirs, other)
    assert [heard.values[number] for number in mine] == [
        list(range(1000 * at + 1, 1000 * at + 1 + STEPS)) for at in range(1, MANY)
    ]
    assert [there.values[number] for number in theirs] == [
        list(range(1000 * at + 101, 1000 * at + 101 + STEPS)) for at in range(1, MANY)
    ]
    other.close()


def test_a_slow_client_is_waited_for_and_nobody_else(counting: WorkerLoop) -> None:
    """1. Nobody takes what one request gets. 2. It is not stepped, the others end. 3. It goes on when it is taken."""
    heard = Heard()
    slow, *others = [begin(counting, 1000 * number) for number in range(1, SLOTS + 1)]
    while not all(heard.ends.get(number) for number in others):
        answers = counting.answers(1)
        heard.add(answers)
        for answer in answers:
            if answer.request_id != slow and not answer.final:
                counting.front.taken(answer.request_id, BYTE_SIZE)
    assert heard.values[slow] == list(range(1001, 1021))
    counting.front.taken(slow, BYTE_SIZE * 20)
    until_ended(counting, heard, [slow])
    assert heard.values[slow] == list(range(1001, 1001 + STEPS))


def test_who_is_cancelled_gets_nothing_more_and_its_slot_is_the_next_ones(counting: WorkerLoop) -> None:
    heard = Heard()
    numbers = [begin(counting, 1000 * number) for number in range(1, SLOTS + 1)]
    while not heard.values.get(numbers[-1]) or len(heard.values[numbers[3]]) < 4:
        heard.add(counting.answers(1))
    had = len(heard.values[numbers[3]])
    counting.front.cancel(numbers[3])
    following = begin(counting, 700_000)
    until_ended(counting, heard, [*numbers, following])
    assert heard.ends[numbers[3]] == 1
    got = heard.values[numbers[3]]
    assert got == list(range(4001, 4001 + len(got)))
    assert heard.values[following] == list(range(700_001, 700_001 + STEPS))
    others = numbers[:3] + numbers[4:]
    assert all(len(heard.values[number]) == STEPS for number in others)
    counted = version_of(counting).statistics.to_dict()
    cancelled = {int(at): each["cancel"]["count"] for at, each in counted["response_stats"].items()}
    # Counted where it was, not where it was when its responses were last noted one by one.
    assert cancelled[len(got)] == sum(cancelled.values()) == 1
    assert had <= len(got)
