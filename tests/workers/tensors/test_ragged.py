"""Tests the layout of requests of any lengths against a plain version of it, and that programs have room for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensord.shm.arrays import DTYPES
from tensord.workers.tensors import ragged
from tensord.workers.tensors.buckets import Buckets, Shapes
from tensord.workers.tensors.ragged import SEGMENT_IDS, batch_input, cut
from tensord.workers.tensors.signature import BatchInput, Signature, TensorSpec

KINDS = (
    "BATCH_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    "BATCH_ITEM_SHAPE",
    "BATCH_ITEM_SHAPE_FLATTEN",
    SEGMENT_IDS,
)
FIXED = 2
SIZES = (4, 16, 64)


@dataclass
class Sent:
    """A request's rows and arrays."""

    rows: int
    arrays: dict[str, Any]


def spec(name: str, datatype: str, dims: tuple[int, ...], axes: tuple[str | None, ...], **more: Any) -> TensorSpec:
    return TensorSpec(name, datatype, DTYPES[datatype], dims, dims, axes, **more)


X = spec("x", "INT32", (-1, FIXED), ("n", None), ragged=True)
INPUTS = {"x": X} | {kind: spec(kind, "INT32", (-1,), (None,), of_batch=BatchInput(kind, "x")) for kind in KINDS}
BUCKETS = Buckets(Signature("m", INPUTS, {}, 8), (8,), {"n": SIZES})
requests = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 20)), min_size=1, max_size=8).map(
    lambda sizes: [
        Sent(rows, {"x": np.arange(rows * length * FIXED, dtype=np.int32).reshape(rows, length, FIXED) + 100 * number})
        for number, (rows, length) in enumerate(sizes)
    ]
)


def settled(batch: list[Sent]) -> dict[str, tuple[int, ...] | None]:
    key: Shapes = ((), *(None for _ in KINDS))
    rows, shapes = BUCKETS.settled(key, batch)
    assert rows == 8
    return dict(zip(INPUTS, shapes, strict=True))


@given(requests)
def test_what_is_told_is_what_lies_there(batch: list[Sent]) -> None:
    batch = batch[: max(1, BUCKETS.fitting(batch))]
    while sum(request.rows for request in batch) > 8:
        batch.pop()
    shapes = settled(batch)
    told = {kind: batch_input(INPUTS[kind], X, shapes[kind] or (), 8, batch) for kind in KINDS}
    laid = np.concatenate([request.arrays["x"].reshape(-1) for request in batch])
    assert len(laid) <= math.prod(shapes["x"] or ())
    counts = [request.arrays["x"].size for request in batch]
    n, rest = len(counts), 8 - len(counts)
    assert told["BATCH_ELEMENT_COUNT"].tolist() == [*counts, *[0] * rest]
    ends = [sum(counts[: i + 1]) for i in range(n)]
    assert told["BATCH_ACCUMULATED_ELEMENT_COUNT"].tolist() == [*ends, *[ends[-1]] * rest]
    assert told["BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"].tolist() == [0, *ends, *[ends[-1]] * rest]
    most = told["BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"]
    assert max(counts) <= len(most) <= len(np.zeros(shapes["x"] or ()))
    items = [list(request.arrays["x"].shape[1:]) for request in batch for _ in range(request.rows)]
    items += [[0, 0]] * (8 - len(items))
    assert told["BATCH_ITEM_SHAPE"].tolist() == items
    assert told["BATCH_ITEM_SHAPE_FLATTEN"].tolist() == [size for item in items for size in item]
    of = [
        row
        for row, length in enumerate([request.arrays["x"].shape[1] for request in batch for _ in range(request.rows)])
        for _ in range(length)
    ]
    segments = told[SEGMENT_IDS].tolist()
    assert segments == [*of, *[8] * (len(segments) - len(of))]
    assert len(segments) * FIXED == math.prod(shapes["x"] or ())


@given(requests)
def test_a_cut_gives_everyone_its_own(batch: list[Sent]) -> None:
    laid = np.concatenate([request.arrays["x"].reshape(-1) for request in batch] + [np.full(5, -1, np.int32)])
    for request, part in zip(batch, cut(laid * 2, X, batch), strict=True):
        np.testing.assert_array_equal(part, request.arrays["x"] * 2)


@given(requests)
def test_what_fits_the_buckets_is_compiled_in_advance(batch: list[Sent]) -> None:
    while sum(request.rows for request in batch) > 8:
        batch.pop()
    if not batch:
        return
    fitting = BUCKETS.fitting(batch)
    assert 1 <= fitting <= len(batch)
    total = sum(ragged.elements(request, "x") for request in batch[:fitting]) // FIXED
    assert fitting == 1 or total <= SIZES[-1]
    if total <= SIZES[-1]:
        shapes = settled(batch[:fitting])
        assert (8, tuple(shapes.values())) in set(BUCKETS.planned())
    if fitting < len(batch):
        assert total + ragged.elements(batch[fitting], "x") // FIXED > SIZES[-1]


def test_lengths_without_buckets_are_powers_of_two() -> None:
    free = Buckets(Signature("m", {"x": X}, {}, 8), (8,), {})
    assert list(free.planned()) == []
    for length, size in ((0, 1), (1, 1), (2, 2), (3, 4), (17, 32)):
        batch = [Sent(1, {"x": np.zeros((1, length, FIXED), np.int32)})]
        assert free.settled(((),), batch) == (8, ((size * FIXED,),))
        assert free.fitting(batch * 8) == 8
