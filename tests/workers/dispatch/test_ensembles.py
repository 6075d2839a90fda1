"""Ensembles in a worker's loop: which of their requests go through all programs as one batch, and who counts what."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensord.shm.messages import RequestedOutput
from tensord.workers.native.extensions import available
from tests.records import Tensor, WholeAnswer
from tests.repositories import ensemble, scale_model, write_model
from tests.workers.worker_loop import PATIENCE_SECONDS, WorkerLoop, ever_queued

in_c = pytest.mark.skipif(not available, reason="the C extension was not built")
#: Another size of batches than the first one has, and what it makes is as long.
SQUARE = """
    inputs = {"x": "FP32[4]"}
    outputs = {"y": "FP32[4]", "same": "FP32[4]"}
    max_batch_size = 8
    batch_buckets = BUCKETS

    def create(path, config, device):
        return (lambda params, inputs: {"y": inputs["x"] ** 2, "same": inputs["x"]}), {}
"""
DELAYS = "dynamic_batching { max_queue_delay_microseconds: 100 }"


def load(loop: WorkerLoop, repository: Path, *names: str) -> None:
    for name in names:
        config = repository / name / "config.pbtxt"
        if not config.exists():
            config.write_text('backend: "jax"')
        loop.load(repository / name)


@pytest.fixture
def chained(loop: WorkerLoop, tmp_path: Path) -> Callable[..., WorkerLoop]:
    """Returns a function that loads ``chain``: (3x + 1) squared, and 3x + 1 itself."""

    def made(buckets: str = "(2, 8)") -> WorkerLoop:
        scale_model(tmp_path)
        write_model(tmp_path, "square", SQUARE.replace("BUCKETS", buckets))
        steps = [("scale", {"x": "x"}, {"y": "scaled"}), ("square", {"x": "scaled"}, {"y": "y", "same": "same"})]
        ensemble(tmp_path, "chain", ["x FP32 4"], ["scaled FP32 4", "y FP32 4", "same FP32 4"], steps, 8)
        load(loop, tmp_path, "scale", "square", "chain")
        return loop

    return made


def submit(loop: WorkerLoop, values: Sequence[float], *outputs: str, model: str = "chain", **more: Any) -> None:
    for value in values:
        array = np.full((1, 4), value, np.float32)
        wanted = tuple([RequestedOutput(name) for name in outputs])
        loop.submit(model, [Tensor("x", "FP32", array.shape, array.tobytes())], wanted, **more)


def read(answers: Sequence[WholeAnswer]) -> dict[str, list[float]]:
    """Returns the first element of each output of each answer, by output."""
    found: dict[str, list[float]] = {}
    for answer in answers:
        assert answer.code == "", answer.message
        for tensor in answer.outputs:
            assert isinstance(tensor.place, bytes)
            array = np.frombuffer(tensor.place, np.float32).reshape(tensor.shape)
            assert array.shape == (1, 4)
            found.setdefault(tensor.name, []).append(float(array[0, 0]))
    return found


def ask(loop: WorkerLoop, values: Sequence[float], *outputs: str, **more: Any) -> dict[str, list[float]]:
    submit(loop, values, *outputs, **more)
    return read(loop.answers(len(values)))


def queued(loop: WorkerLoop) -> int:
    """Returns how many requests were ever queued in Python; those that C answers are not."""
    return sum(ever_queued(each.queue) for each in loop.worker._models)


def known(loop: WorkerLoop, once: Callable[[], object]) -> None:
    """Asks until nothing of it is Python's affair any more."""
    deadline, quiet = time.monotonic() + PATIENCE_SECONDS, 0
    while quiet < 5:
        before = queued(loop)
        once()
        quiet = quiet + 1 if queued(loop) == before else 0
        assert time.monotonic() < deadline, "it never came about"


def counts(loop: WorkerLoop, name: str) -> dict[str, Any]:
    found = loop.version(name).statistics.to_dict()
    sizes = {batch["batch_size"]: batch["compute_infer"]["count"] for batch in found["batch_stats"]}
    good, failed = found["inference_stats"]["success"], found["inference_stats"]["fail"]
    return {
        "answered": good["count"],
        "failed": failed["count"],
        "rows": found["inference_count"],
        "executions": found["execution_count"],
        "sizes": sizes,
        "copied": found["copied_byte_size"],
        "infer": found["inference_stats"]["compute_infer"]["ns"],
    }


@in_c
@pytest.mark.parametrize("together", [1, 3, 8, 20])
def test_what_is_known_of_a_chain_is_answered_outside_of_python(
    chained: Callable[..., WorkerLoop], together: int
) -> None:
    loop = chained()
    values = [n / 2 for n in range(together)]
    expected = {
        "scaled": [3 * x + 1 for x in values],
        "y": [(3 * x + 1) ** 2 for x in values],
        "same": [3 * x + 1 for x in values],
    }
    assert ask(loop, values) == expected
    known(loop, lambda: ask(loop, values))
    before = queued(loop)
    assert ask(loop, values) == expected
    assert queued(loop) == before


@in_c
@pytest.mark.parametrize("fast", [False, True])
def test_an_ensemble_and_its_models_count_the_same_whoever_runs_them(
    chained: Callable[..., WorkerLoop], fast: bool
) -> None:
    """Three requests together are one batch, which nothing between the models is copied for."""
    loop = chained()
    if fast:
        known(loop, lambda: ask(loop, [1, 2, 3]))
    names = ("chain", "scale", "square")
    before = {name: counts(loop, name) for name in names}
    ask(loop, [1, 2, 3])
    after = {name: counts(loop, name) for name in names}
    for name in names:
        assert after[name]["answered"] - before[name]["answered"] == 3
        assert after[name]["failed"] == 0
        assert after[name]["rows"] - before[name]["rows"] == 3
        assert after[name]["executions"] - before[name]["executions"] == 1
        assert after[name]["sizes"][3] - before[name]["sizes"].get(3, 0) == 1
    took = {name: after[name]["infer"] - before[name]["infer"] for name in names}
    assert 0 < took["scale"] + took["square"] <= took["chain"]
    copied = {name: after[name]["copied"] - before[name]["copied"] for name in names}
    # Sixteen bytes of each request go in, and three times as many come out.
    assert copied == {"chain": 3 * 64, "scale": 0, "square": 0}


@in_c
def test_each_set_of_outputs_has_its_own_chain(chained: Callable[..., WorkerLoop]) -> None:
    loop = chained()
    for outputs in (("scaled",), ("y",), ("same", "scaled"), ()):
        known(loop, lambda outputs=outputs: ask(loop, [1, 2], *outputs))  # type: ignore[misc]
    before, counted = queued(loop), counts(loop, "square")["answered"]
    assert ask(loop, [2], "scaled") == {"scaled": [7]}
    assert counts(loop, "square")["answered"] == counted
    assert ask(loop, [2], "y") == {"y": [49]}
    assert ask(loop, [2], "same", "scaled") == {"same": [7], "scaled": [7]}
    assert ask(loop, [2]) == {"scaled": [7], "y": [49], "same": [7]}
    assert queued(loop) == before


@in_c
def test_an_ensemble_of_a_member_that_lacks_an_output_by_now_is_refused(loop: WorkerLoop, tmp_path: Path) -> None:
    """1. The supervisor checks an ensemble. 2. Its member is loaded again, with other outputs. 3. The ensemble is loaded."""
    scale_model(tmp_path)
    load(loop, tmp_path, "scale")
    folder = ensemble(tmp_path, "late", ["a FP32 4"], ["b FP32 4"], [("scale", {"x": "a"}, {"former": "b"})], 8)
    expected = "in ensemble late, ensemble tensor b is mapped from non-existing output former in model scale"
    assert expected in loop.refused(folder)


def test_a_model_that_is_loaded_again_is_the_one_that_runs(chained: Callable[..., WorkerLoop], tmp_path: Path) -> None:
    loop = chained()
    known(loop, lambda: ask(loop, [1]))
    scale_model(tmp_path, factor=5)
    load(loop, tmp_path, "scale", "chain")
    assert ask(loop, [2], "y") == {"y": [121]}
    known(loop, lambda: ask(loop, [1], "y"))
    assert ask(loop, [2], "y") == {"y": [121]}


@pytest.mark.parametrize("buckets", ["(8,)", "(1, 2, 4, 8)", "(3, 8)"])
def test_models_with_other_buckets_meet_at_one_that_all_have(chained: Callable[..., WorkerLoop], buckets: str) -> None:
    loop = chained(buckets)
    for together in (1, 3, 5, 8):
        before = counts(loop, "square")["executions"]
        values = [float(n) for n in range(together)]
        assert ask(loop, values, "y") == {"y": [(3 * x + 1) ** 2 for x in values]}
        assert counts(loop, "square")["executions"] == before + 1


def test_a_traced_request_goes_step_by_step_and_those_that_came_with_it_together(
    chained: Callable[..., WorkerLoop],
) -> None:
    loop = chained()
    before = counts(loop, "scale")["sizes"]
    submit(loop, [1, 2], "y")
    submit(loop, [3], "y", own={"trace": 1})
    submit(loop, [4], "y")
    assert sorted(read(loop.answers(4))["y"]) == [16, 49, 100, 169]
    after = counts(loop, "scale")["sizes"]
    assert {size: after[size] - before.get(size, 0) for size in after} == {1: 1, 3: 1}


def test_requests_to_an_ensemble_replace_one_another(chained: Callable[..., WorkerLoop]) -> None:
    """While they wait for the ensemble: of ten that come together the last one runs, also once C knows such requests."""
    loop = chained()
    known(loop, lambda: ask(loop, [1, 2]))
    submit(loop, range(10), "y", own={"replace_key": "k"})
    answers = loop.answers(10)
    assert [answer.code for answer in answers] == ["REPLACED"] * 9 + [""]
    assert read(answers[-1:]) == {"y": [28.0**2]}
    assert counts(loop, "chain")["failed"] == 9
    assert counts(loop, "scale")["failed"] == 0


def test_a_model_that_waits_for_company_is_no_link(loop: WorkerLoop, tmp_path: Path) -> None:
    """Its own queue decides how long."""
    scale_model(tmp_path)
    write_model(tmp_path, "square", SQUARE.replace("BUCKETS", "(8,)"), f'backend: "jax" {DELAYS}')
    steps = [("scale", {"x": "x"}, {"y": "scaled"}), ("square", {"x": "scaled"}, {"y": "y"})]
    ensemble(tmp_path, "chain", ["x FP32 4"], ["y FP32 4"], steps, 8)
    load(loop, tmp_path, "scale", "square", "chain")
    before = ever_queued(loop.version("square").queue)
    assert ask(loop, [1, 2]) == {"y": [16, 49]}
    assert ever_queued(loop.version("square").queue) == before + 2
