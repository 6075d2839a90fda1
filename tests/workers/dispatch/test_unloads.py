"""Tests that nothing in a worker keeps a model that was unloaded."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

from tensord.shm.control_records import Unload, Unloaded
from tests import repositories
from tests.records import Tensor
from tests.workers.worker_loop import WorkerLoop

BATCHING = "max_batch_size: 4 dynamic_batching { preferred_batch_size: 2 max_queue_delay_microseconds: 3600000000 }"
X = [Tensor("x", "FP32", (1, 4), bytes(16))]


def test_the_time_until_when_a_request_would_have_waited_keeps_no_model(loop: WorkerLoop, tmp_path: Path) -> None:
    """
    1. A sequence of one model is idle. 2. Two requests to another model run, the first of which would have waited longer
    than the sequence lives. 3. That model is unloaded. Result: its version and its parameters are gone at once.
    """
    loop.load(repositories.total_model(tmp_path))
    loop.submit("total", [Tensor("x", "FP32", (1, 1), bytes(4))], own={"sequence_id": 5, "sequence_start": True})
    loop.answers(1)
    scale = repositories.scale_model(tmp_path) / "scale"
    (scale / "config.pbtxt").write_text(BATCHING)
    loop.load(scale)
    first = loop.submit("scale", X)
    assert loop.front.flush()
    loop.worker.iterate()
    assert len(loop.version("scale").planner) == 1
    second = loop.submit("scale", X)
    assert [answer.request_id for answer in loop.answers(2)] == [first, second]
    version = weakref.ref(loop.version("scale"))
    parameters = weakref.ref(loop.version("scale").sets.main)  # type: ignore[union-attr]
    loop.tell(Unload("scale", 1))
    loop.hear(Unloaded)
    loop.worker.iterate()  # as it waits for what comes next
    gc.collect()
    assert (version(), parameters()) == (None, None)
