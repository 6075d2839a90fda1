"""The largest elements with their numbers and labels, as a real server was seen to print them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.shm.arrays import DTYPES
from tensord.shm.errors import InvalidArgument
from tensord.workers.dispatch.answers import classify
from tensord.workers.tensors.signature import TensorSpec


def spec(datatype: str, labels: tuple[str, ...] = ()) -> TensorSpec:
    return TensorSpec("y", datatype, DTYPES[datatype], (-1,), (-1,), (None,), labels=labels)


ANIMALS = ("cat", "dog", "bird")


@pytest.mark.parametrize(
    ("datatype", "values", "count", "labels", "expected"),
    [
        ("FP32", [1, 2, 3, 4], 2, ANIMALS, ["4.000000:3", "3.000000:2:bird"]),
        ("FP32", [1, 2, 3, 4], 1000, (), ["4.000000:3", "3.000000:2", "2.000000:1", "1.000000:0"]),
        ("FP32", [2, 2, 1, 2], 4, ANIMALS, ["2.000000:0:cat", "2.000000:1:dog", "2.000000:3", "1.000000:2:bird"]),
        ("FP32", [-1, -2.5, 0, 1e-7], 2, (), ["0.000000:3", "0.000000:2"]),
        ("FP32", [3e38], 1, (), ["300000000549775575777803994281145270272.000000:0"]),
        ("FP32", [float("nan"), 1, float("nan"), -2], 4, (), ["1.000000:1", "-2.000000:3", "nan:0", "nan:2"]),
        ("UINT64", [0, 7, 2**64 - 1], 2, (), ["18446744073709551615:2", "7:1"]),
        ("INT8", [-128, 127, 0], 3, (), ["127:1", "0:2", "-128:0"]),
        ("FP64", [], 2, (), []),
    ],
)
def test_one_row(datatype: str, values: list[Any], count: int, labels: tuple[str, ...], expected: list[str]) -> None:
    found = classify(spec(datatype, labels), np.array(values, DTYPES[datatype]), count, batches=False)
    assert [element.decode() for element in found.tolist()] == expected


def test_rows_of_a_batch_and_a_flattened_matrix() -> None:
    values = np.array([[1, 2, 3], [6, 5, 4]], np.float32)
    assert classify(spec("FP32"), values, 1, batches=True).tolist() == [[b"3.000000:2"], [b"6.000000:0"]]
    assert classify(spec("FP32"), values, 2, batches=False).tolist() == [b"6.000000:3", b"5.000000:4"]


@given(st.lists(st.sampled_from([0, 1, -1, 5, float("nan"), float("inf"), -float("inf")]), min_size=20, max_size=99))
def test_the_largest_of_many_are_those_of_all_in_order(values: list[float]) -> None:
    row = np.array(values, np.float32)
    every = classify(spec("FP32"), row, len(row), batches=False).tolist()
    for count in (1, 2, len(row) // 9):
        assert classify(spec("FP32"), row, count, batches=False).tolist() == every[:count]


def test_so_many_classes_are_told_and_no_more() -> None:
    values = np.arange(1 << 16, dtype=np.int32)
    assert len(classify(spec("INT32"), values, 1 << 15, batches=False)) == 1 << 15
    with pytest.raises(InvalidArgument, match="output 'y': 32769 classes are asked for, at most 32768"):
        classify(spec("INT32"), values, (1 << 15) + 1, batches=False)
    with pytest.raises(InvalidArgument, match="output 'y': 65536 classes are asked for"):
        classify(spec("INT32"), values.reshape(8, -1), 1 << 20, batches=True)


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "BOOL", "BYTES"])
def test_datatypes_without_classes(datatype: str) -> None:
    with pytest.raises(InvalidArgument, match=f"unsupported type '{datatype}'"):
        classify(spec(datatype), np.zeros(2, DTYPES[datatype]), 1, batches=False)
