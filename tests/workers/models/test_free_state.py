"""State of any size: what a step gets, what is kept of its run, and how much all of it may be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensord.shm.arrays import DTYPES
from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.workers.models.free_state import FreeState, Unfit, program_signature
from tensord.workers.requests.request import Request
from tensord.workers.scheduling.sequence import Controls, LiveSequence
from tensord.workers.tensors.buckets import Buckets
from tensord.workers.tensors.signature import Signature, StateSpec, TensorSpec
from tests.workers.made_requests import request_of

FP32 = DTYPES["FP32"]


def spec(name: str) -> TensorSpec:
    return TensorSpec(name, "FP32", FP32, (-1,), (-1,), ("n",))


STATES = (
    StateSpec("h", "FP32", FP32, (-1,), (-1,), ("n",), output="h"),
    StateSpec("g", "FP32", FP32, (-1, 2), (-1, 2), (None, None), output="g_out"),
)
SIGNATURE = Signature("m", {"x": spec("x")}, {"y": spec("y")}, 4, STATES, 8)


def free_state(limit: int = 1 << 20, **values: Any) -> FreeState:
    buckets = Buckets(program_signature(SIGNATURE), (1, 2, 4), {})
    return FreeState(SIGNATURE, buckets, {name: np.asarray(each, np.float32) for name, each in values.items()}, limit)


def step(live: LiveSequence[Any], size: int, flags: str = "") -> Request:
    request = request_of({"x": np.zeros((1, size), np.float32)})
    request.live, request.controls = live, Controls(live.correlation_id, "S" in flags, "E" in flags)
    return request


def made(size: int, more: int) -> dict[str, np.ndarray]:
    row = np.ones((1, size), np.float32)
    return {"h": row, "g_out": np.ones((1, more, 2), np.float32), "y": row}


def run(state: FreeState, request: Request, result: Any, *live: LiveSequence[Any]) -> Any:
    return state.keep([request], [result], lambda: live)[0]


def test_where_a_sequence_begins_and_goes_on() -> None:
    state, live = free_state(h=3), LiveSequence(1, 1)
    state.attach(first := step(live, 5, "S"))
    assert first.arrays["h"].tolist() == [[3] * 5]
    assert first.arrays["g"].tolist() == [[[0, 0]]]
    assert first.key == ((5,), (5,), (1, 2))
    assert run(state, first, made(5, 3), live).keys() == {"y"}
    state.attach(second := step(live, 5))
    assert second.key == ((5,), (5,), (3, 2))
    # START in the middle begins anew, of another size.
    state.attach(anew := step(live, 2, "S"))
    assert anew.key == ((2,), (2,), (1, 2))


def test_another_size_is_refused_and_runs_with_no_other() -> None:
    state, live = free_state(), LiveSequence(1, 1)
    state.attach(first := step(live, 5, "S"))
    run(state, first, made(5, 1), live)
    refused = [step(live, 4), step(live, 4)]
    for each in refused:
        state.attach(each)
    assert refused[0].key != refused[1].key
    assert isinstance(refused[0].key, Unfit)
    assert "axis 'n' has size 4 in a request to model 'm', 5 in state 'h' of sequence 1" in refused[0].key.error.message


def test_what_failed_changes_nothing() -> None:
    state, live = free_state(), LiveSequence(1, 1)
    state.attach(first := step(live, 5, "S"))
    run(state, first, made(5, 2), live)
    error = InvalidArgument("no")
    assert run(state, step(live, 5), error, live) is error
    assert live.kept["g"].shape == (1, 2, 2)


def test_all_of_it_is_bounded_and_sequences_that_ended_make_room() -> None:
    state, one, other = free_state(limit=100), LiveSequence(1, 1), LiveSequence(2, 2)
    for live in (one, other):
        state.attach(first := step(live, 4, "S"))
        run(state, first, made(4, 3), one, other)  # 16 and 24 bytes
    refused = run(state, step(one, 4), made(4, 6), one, other)
    assert isinstance(refused, Unavailable)
    assert "would have 64 bytes beside 40 of other sequences" in refused.message
    assert one.kept["g"].shape == (1, 3, 2)
    # The other one was silent too long: nobody said so, and it is not among those that live.
    assert run(state, step(one, 4), made(4, 6), one).keys() == {"y"}
    assert one.kept["g"].shape == (1, 6, 2)


def test_the_last_step_leaves_nothing() -> None:
    state, live = free_state(), LiveSequence(1, 1)
    state.attach(first := step(live, 5, "SE"))
    run(state, first, made(5, 2), live)
    assert live.kept is None


@pytest.mark.parametrize("rows", [1, 3])
def test_a_batch_begins_with_a_row_each(rows: int) -> None:
    begun = free_state(h=2).begun({"x": np.zeros((rows, 4), np.float32)}, rows)
    assert begun["h"].tolist() == [[2] * 4] * rows
    assert begun["g"].shape == (rows, 1, 2)
