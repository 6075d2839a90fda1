"""Tests what a traced request takes along from the worker."""

from __future__ import annotations

import numpy as np

from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import LAST, AnswerRecord
from tensord.workers.requests.timeline import TENSORS, TIMESTAMPS, RequestTimeline


def test_requests_that_were_made_for_it_are_told_with_it_up_to_a_bound() -> None:
    timeline = RequestTimeline(TIMESTAMPS | TENSORS, 5)
    inner = RequestTimeline(TIMESTAMPS | TENSORS, 6)
    innermost = RequestTimeline(TIMESTAMPS | TENSORS, 7)
    innermost.executed((8, 8, 8), {}, {"y": np.zeros(1, np.int8)})
    inner.add("second", 2, innermost)
    timeline.add("first", 1, inner)
    large = {"x": np.full((16384,), 1e300)}
    for _ in range(2000):
        child = RequestTimeline(TIMESTAMPS | TENSORS, 9)
        child.executed((9, 9, 9), large if _ < 20 else {}, {})
        timeline.add("many", 1, child)
    trace = timeline.attach(AnswerRecord(1, LAST)).trace
    assert trace is not None
    first, *many = trace.children
    assert (first.model, first.version) == ("first", 1)
    assert [name for name, _ in first.moments] == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    (second,) = first.children
    assert [name for name, _ in second.moments] == [
        *("REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),
        *("COMPUTE_END", "REQUEST_END"),
    ]
    assert [tensor.name for tensor in second.tensors] == ["y"]
    assert len(many) == 1024 - 2
    characters = sum(len(tensor.content) for child in many for tensor in child.tensors)
    assert 0 < characters <= 1 << 20


def test_the_bound_holds_for_requests_within_requests() -> None:
    timeline = RequestTimeline(TENSORS, 5)
    for _ in range(40):
        outer, inner = RequestTimeline(TENSORS, 6), RequestTimeline(TENSORS, 7)
        inner.executed((8, 8, 8), {"x": np.full((16384,), 1e300)}, {})
        outer.add("inner", 1, inner)
        timeline.add("outer", 1, outer)
    trace = timeline.attach(AnswerRecord(1, LAST)).trace
    assert trace is not None
    assert len(trace.children) == 40
    tensors = [tensor for outer in trace.children for inner in outer.children for tensor in inner.tensors]
    assert 0 < sum(len(tensor.content) for tensor in tensors) <= 1 << 20


class Elsewhere:
    """A tensor on a GPU, as far as a trace needs it. ``content`` None: its memory cannot be read any more."""

    dtype, shape = np.dtype(np.float32), (3,)

    def __init__(self, content: list[float] | None) -> None:
        self.content = content

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        if self.content is None:
            raise InvalidArgument("its owner has freed it or is gone")
        return np.array(self.content, np.float32)


def test_tensors_that_lie_elsewhere() -> None:
    """They are read for it; one that cannot be takes only its own line along."""
    timeline = RequestTimeline(TENSORS, 1)
    timeline.executed((2, 3, 4), {"there": Elsewhere([1, 2, 3]), "gone": Elsewhere(None)}, {})  # type: ignore[dict-item]
    told = timeline.attach(AnswerRecord(1, LAST)).trace
    assert told is not None
    assert [(one.name, one.shape, one.content, one.truncated) for one in told.tensors] == [
        ("there", (3,), "1.0,2.0,3.0", False),
        ("gone", (3,), "", True),
    ]
