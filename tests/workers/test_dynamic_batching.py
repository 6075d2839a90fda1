"""Queues and batches as a configuration asks for them, in a real worker: who runs with whom.

Delays are an hour: a batch that waits for one is never answered within a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.repositories import answering, fields, scale_model, write_model
from tests.workers.worker_process import WorkerProcess, wait_until

#: Answers with how many rows ran together.
COUNTS = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            x = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
            rows = sum(map(len, x))
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full((len(each), 1), rows, np.int32))]) for each in x
            ]
"""
TENSORS = fields("x FP32 -1", "y INT32 1", "max_batch_size: 8")
HOUR = 3_600_000_000


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    with WorkerProcess() as made:
        yield made


def ask(worker: WorkerProcess, model: str, rows: int, length: int = 1, priority: int = 0) -> int:
    return worker.submit(model, {"x": np.zeros((rows, length), np.float32)}, priority=priority)


def together(worker: WorkerProcess, *numbers: int) -> list[int]:
    """Returns with how many rows each of the requests was run."""
    return [int(worker.arrays(worker.answer(number))["y"][0, 0]) for number in numbers]


def test_a_batch_runs_with_exactly_a_preferred_size_and_what_is_left_over_waits(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    rules = f"dynamic_batching {{ preferred_batch_size: [ 4, 6 ] max_queue_delay_microseconds: {HOUR} }}"
    write_model(tmp_path, "counts", COUNTS, TENSORS + rules)
    worker.serve(tmp_path, "counts")
    # 3 rows are no preferred size and the next request makes 5: no more than 4 and no less than 6 is run before the hour is over.
    first = [ask(worker, "counts", 3), ask(worker, "counts", 2)]
    assert together(worker, *first, ask(worker, "counts", 1)) == [6, 6, 6]
    # Nothing that fits makes a preferred size: what waits goes.
    first = [ask(worker, "counts", 3), ask(worker, "counts", 2)]
    last = ask(worker, "counts", 4)
    assert together(worker, *first) == [5, 5]
    assert together(worker, last) == [4]


def test_a_full_batch_does_not_wait_for_an_older_request_of_another_shape(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    rules = f"dynamic_batching {{ preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: {HOUR} }}"
    write_model(tmp_path, "counts", COUNTS, TENSORS + rules)
    worker.serve(tmp_path, "counts")
    other = ask(worker, "counts", 1, length=3)
    assert together(worker, ask(worker, "counts", 2), ask(worker, "counts", 4)) == [2, 4]
    assert together(worker, other, ask(worker, "counts", 1, length=3)) == [2, 2]


def test_a_jax_model_batches_by_the_same_rules_however_often_it_is_asked(worker: WorkerProcess, tmp_path: Path) -> None:
    """A worker may answer known requests outside of Python, but not those that wait for a batch."""
    scale_model(tmp_path, "scale")
    (tmp_path / "scale" / "config.pbtxt").write_text(
        f"dynamic_batching {{ preferred_batch_size: [ 4 ] max_queue_delay_microseconds: {HOUR} }}"
    )
    worker.serve(tmp_path, "scale")
    x = np.ones((2, 4), np.float32)
    for _ in range(8):
        first = worker.submit("scale", {"x": x})
        for number in (first, worker.submit("scale", {"x": x})):
            assert worker.arrays(worker.answer(number))["y"].tolist() == [[4.0] * 4] * 2


def test_urgent_requests_overtake_in_the_order_of_their_levels(worker: WorkerProcess, tmp_path: Path) -> None:
    """Five wait for the one that runs; then each runs alone, level by level."""
    write_model(
        tmp_path,
        "order",
        answering(
            """
            (gate,) = given(request).ravel()
            if gate:
                pathlib.Path(gate.decode() + ".began").touch()
            while gate and not pathlib.Path(gate.decode()).exists():
                time.sleep(0.01)
            self.ran += 1
            return response(y=np.array([[self.ran]], np.int32))
            """,
            more="ran = 0",
        ),
        fields(
            "x STRING 1",
            "y INT32 1",
            "max_batch_size: 1 dynamic_batching { priority_levels: 5000000000 default_priority_level: 3 }",
        ),
    )
    worker.serve(tmp_path, "order")
    gate = tmp_path / "gate"

    def submit(path: Path | None, priority: int) -> int:
        x = np.array([[str(path).encode() if path else b""]], np.object_)
        return worker.submit("order", {"x": x}, flush=False, priority=priority)

    numbers = [submit(gate, 0)]
    wait_until(worker.lane.flush)
    wait_until((tmp_path / "gate.began").exists)
    numbers += [submit(None, priority) for priority in (4_999_999_999, 0, 2, 6_000_000_000, 1)]
    wait_until(worker.lane.flush)
    gate.touch()
    assert together(worker, *numbers) == [1, 6, 4, 3, 5, 2]
