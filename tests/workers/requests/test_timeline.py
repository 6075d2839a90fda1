"""What a traced request takes along from the worker."""

from __future__ import annotations

import numpy as np

from shm.errors import Internal
from shm.messages import Completion
from workers.requests.timeline import TENSORS, TIMESTAMPS, RequestTimeline


def test_times_and_tensors_as_text() -> None:
    timeline = RequestTimeline(TIMESTAMPS | TENSORS, 5)
    inputs = {
        "b": np.array([True, False]),
        "s": np.array([b"a", "ä".encode()], np.object_),
        "n": np.zeros((2, 10_000), np.int8),
    }
    timeline.executed((7, 7, 7), inputs, {"y": np.array([[1.5, -2]], np.float32)})
    trace = timeline.attach(Completion(1)).trace
    assert trace is not None
    assert [name for name, _ in trace.moments] == [
        "QUEUE_START",
        "COMPUTE_START",
        "COMPUTE_INPUT_END",
        "COMPUTE_OUTPUT_START",
        "COMPUTE_END",
    ]
    b, s, n, y = trace.tensors
    assert (b.content, s.content, y.content) == ("1,0", '"a","ä"', "1.5,-2.0")
    assert (y.activity, y.name, y.datatype, y.shape) == ("TENSOR_BACKEND_OUTPUT", "y", "FP32", (1, 2))
    assert (n.activity, n.truncated, n.content.count(",")) == ("TENSOR_QUEUE_INPUT", True, 16383)


def test_only_what_was_asked_for() -> None:
    timeline = RequestTimeline(TENSORS, 5)
    timeline.executed((7, 7, 7), {"x": np.zeros(1, np.int8)}, Internal("no"))
    trace = timeline.attach(Completion(1)).trace
    assert trace is not None
    assert (trace.moments, [tensor.name for tensor in trace.tensors]) == ((), ["x"])
    never_run = RequestTimeline(TIMESTAMPS, 5).attach(Completion(1)).trace
    assert never_run is not None
    assert never_run.moments == (("QUEUE_START", 5),)
