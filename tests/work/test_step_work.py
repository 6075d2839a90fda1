"""Tests what a step costs a worker besides the model's own time: little for the step, next to nothing for each request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.records import Tensor
from tests.repositories import write_model
from tests.work.baseline import Baseline, counts
from tests.work.counter import Work
from tests.workers.worker_loop import WorkerLoop

SLOTS = 64
#: Steps before it is counted, and those that are.
WARM, COUNTED = 10, 20
COUNTS = f"""
    import jax.numpy as jnp

    inputs = {{"start": "INT32[1]"}}
    outputs = {{"y": "INT32[1]"}}
    slots, max_steps, inserts_per_step = {SLOTS}, 1000, {SLOTS}

    def create(path, config, device):
        def init(params, slots):
            return jnp.zeros(slots, jnp.int32)

        def insert(params, carry, slot, inputs):
            return carry.at[slot].set(inputs["start"][0]), {{}}

        def step(params, carry, active):
            return carry + active, {{"y": (carry + active)[:, None]}}, active, jnp.zeros_like(active)

        return (init, insert, step), None
"""


@pytest.fixture
def loop(leaves_nothing: None, tmp_path: Path) -> Iterator[WorkerLoop]:
    made = WorkerLoop()
    write_model(tmp_path, "counts", COUNTS, 'backend: "jax"')
    made.load(tmp_path / "counts")
    yield made
    made.close()


@counts
@pytest.mark.parametrize("requests", [1, 16, 64])
def test_instructions(loop: WorkerLoop, requests: int, baseline: Baseline) -> None:
    for number in range(requests):
        start = np.array([1000 * number], np.int32).tobytes()
        loop.submit("counts", [Tensor("start", "INT32", (1,), start)])
    loop.answers(WARM * requests)
    work = Work()
    answers = loop.answers(COUNTED * requests, work=work)
    assert len(answers) == COUNTED * requests
    baseline.check(f"steps {requests}", work.instructions / COUNTED)
    assert work.system_calls["send"] <= COUNTED
