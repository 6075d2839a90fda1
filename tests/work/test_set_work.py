"""Tests what requests that name parameter sets cost a worker, counted in its own code: hardly more than those that name none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensord.workers.native.extensions import available
from tests.repositories import write_model
from tests.work.baseline import Baseline, counts
from tests.work.counter import Work
from tests.workers.parameters.pushing import PushingLoop, numbered, value, write_numbered

TOGETHER, WARM, COUNT = 16, 30, 10
MIXED = """
    import jax.numpy as jnp
    import numpy as np

    inputs = {"x": "FP32[8]"}
    outputs = {"y": "FP32[8]"}
    batch_sets = True

    def create(path, config, device):
        parameters = {"w": np.zeros(4, np.float32), "deep": [{"v": np.zeros(4, np.float32)}]}

        def apply(stacked, inputs, index):
            w, v = stacked["w"][index], stacked["deep"][0]["v"][index]
            return {"y": inputs["x"] + jnp.concatenate([w, v], axis=1)}

        return apply, parameters
"""


@pytest.fixture
def loop() -> Iterator[PushingLoop]:
    worker = PushingLoop()
    yield worker
    worker.close()


def cost(loop: PushingLoop, name: Callable[[int], str | None]) -> float:
    """Returns the bytecodes of 16 requests that come together, of which each is answered with the set that it names."""

    def ask(work: Work) -> None:
        asked = {loop.submit_value("m", 0.0, 1, name(number)): name(number) for number in range(TOGETHER)}
        for answer in loop.answers(TOGETHER, work=work):
            given = asked[answer.request_id]
            assert value(answer) == (0 if given is None else int(given[1:]))

    for _ in range(WARM):
        ask(Work())
    work = Work()
    for _ in range(COUNT):
        ask(work)
    return work.instructions / COUNT


@pytest.mark.skipif(not available, reason="the C extension was not built")
@counts
@pytest.mark.parametrize("kind", ["apart", "mixed", "delayed"])
def test_instructions_of_requests_that_come_together(
    loop: PushingLoop, tmp_path: Path, kind: str, baseline: Baseline
) -> None:
    """A model's requests may wait for others: those that are enough do not, and cost no more."""
    if kind == "apart":
        loop.load(write_numbered(tmp_path, "m", f"max_batch_size: {TOGETHER}"))
    else:
        delay = "" if kind == "mixed" else "dynamic_batching { max_queue_delay_microseconds: 3600000000 }"
        write_model(tmp_path, "m", MIXED, f'name: "m" max_batch_size: {TOGETHER} {delay}')
        loop.load(tmp_path / "m")
    for number in range(1, TOGETHER + 1):
        loop.push("m", numbered(number), number, f"c{number}")
    baseline.check(f"sets {kind} main", cost(loop, lambda _: None))
    baseline.check(f"sets {kind} one", cost(loop, lambda _: "c3"))
    baseline.check(f"sets {kind} sixteen", cost(loop, lambda number: f"c{number + 1}"))
