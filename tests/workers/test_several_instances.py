"""Several instances of a jitted model in a real worker: executions that meet each other, in programs that cannot end alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tensord.shm.operations import ModelStatistics
from tests.repositories import write_model
from tests.workers.worker_process import PATIENCE_S, WorkerProcess

#: A request of a value above 0 ends only together with as many others as ``PARTIES`` says.
MEETING = """
import threading

import jax
import numpy as np

inputs = {"x": "FP32[4]"}
outputs = {"y": "FP32[4]"}
max_batch_size = MAX_BATCH_SIZE
batch_buckets = (1, 2)
_all = threading.Barrier(PARTIES)


def create(path, config, device):
    def meet(x):
        if x.max() > 0:
            _all.wait(PATIENCE)
        return np.asarray(x) * 2

    def apply(params, inputs):
        x = inputs["x"]
        return {"y": jax.pure_callback(meet, jax.ShapeDtypeStruct(x.shape, x.dtype), x)}

    return apply, None
"""


@pytest.fixture(scope="module")
def worker(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder: Path = tmp_path_factory.mktemp("repository")
    for name, batch, count in (("pairs", 2, 2), ("threes", 2, 3)):
        source = MEETING.replace("MAX_BATCH_SIZE", str(batch)).replace("PARTIES", str(count))
        config = f"instance_group [ {{ count: {count} kind: KIND_CPU }} ]"
        write_model(folder, name, source.replace("PATIENCE", str(PATIENCE_S)), config)
    with WorkerProcess() as running:
        running.serve(folder, "pairs", "threes")
        yield running


@pytest.mark.parametrize(("model", "count"), [("pairs", 2), ("threes", 3)])
def test_as_many_executions_run_at_the_same_time(worker: WorkerProcess, model: str, count: int) -> None:
    """Each waits inside the program for the others: had they to follow each other, none would end."""
    before = statistics(worker, model)
    for turn in range(1, 4):
        # Two rows each: whatever waits with them cannot join their batch.
        sent = [np.full((2, 4), 10 * turn + i, np.float32) for i in range(count)]
        ids = [worker.submit(model, {"x": x}) for x in sent]
        for request_id, x in zip(ids, sent, strict=True):
            np.testing.assert_array_equal(worker.arrays(worker.answer(request_id))["y"], 2 * x)
    after = statistics(worker, model)
    for key in ("inference_count", "execution_count"):
        assert after[key] - before[key] == {"inference_count": 6 * count, "execution_count": 3 * count}[key]


def test_batches_and_padding_are_as_with_one_instance(worker: WorkerProcess) -> None:
    sent = [np.full((rows, 4), -rows, np.float32) for rows in (1, 2, 1, 1, 2, 1, 1)]
    ids = [worker.submit("pairs", {"x": x}, flush=x is sent[-1]) for x in sent]
    for request_id, x in zip(ids, sent, strict=True):
        np.testing.assert_array_equal(worker.arrays(worker.answer(request_id))["y"], 2 * x)


def statistics(worker: WorkerProcess, model: str) -> dict[str, int]:
    (found,) = json.loads(worker.call(ModelStatistics(model))[0].result)["model_stats"]
    return dict(found)
