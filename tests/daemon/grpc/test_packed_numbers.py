"""Typed contents as arrays: the numbers that protobuf reads, whatever size they have and however they were written."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.internal.encoder import _VarintBytes
from tritonclient.grpc import service_pb2

from tensord.daemon.grpc import packed_numbers

Contents = service_pb2.InferTensorContents
COLUMNS = {
    "bool_contents": np.bool_,
    "int_contents": np.int32,
    "int64_contents": np.int64,
    "uint_contents": np.uint32,
    "uint64_contents": np.uint64,
    "fp32_contents": np.float32,
    "fp64_contents": np.float64,
}


def values_of(dtype: np.dtype, count: int) -> np.ndarray:
    rng = np.random.default_rng(count)
    if dtype.kind == "f":
        return rng.standard_normal(count).astype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(dtype)
    limits = np.iinfo(dtype)
    whole = rng.integers(limits.min, limits.max, count, dtype, endpoint=True)
    # As many of each length as may be.
    return whole >> rng.integers(0, 8 * dtype.itemsize, count).astype(dtype)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("count", [1, 2, 7, 1000, 50_000])
def test_they_are_what_protobuf_reads(column: str, count: int) -> None:
    dtype = np.dtype(COLUMNS[column])
    values = values_of(dtype, count)
    contents = Contents.FromString(Contents(**{column: values.tolist()}).SerializeToString() + b"\xf8\x07\x05")
    found = packed_numbers.of_contents(contents, dtype)
    assert found.dtype == dtype
    assert np.array_equal(found, values)
    assert np.array_equal(found, np.array(getattr(contents, column), dtype))


@pytest.mark.parametrize("column", ["int_contents", "int64_contents"])
def test_the_largest_and_the_smallest(column: str) -> None:
    limits = np.iinfo(COLUMNS[column])
    values = [limits.min, -1, 0, 1, 127, 128, limits.max]
    found = packed_numbers.of_contents(Contents(**{column: values}), np.dtype(COLUMNS[column]))
    assert found.tolist() == values


def test_numbers_one_by_one_are_as_packed_ones() -> None:
    contents = Contents.FromString(b"\x18\x05\x1a\x02\x80\x01\x18\x07")
    assert packed_numbers.of_contents(contents, np.dtype(np.int64)).tolist() == [5, 128, 7]


@pytest.mark.parametrize("size", range(1, 11))
def test_a_number_over_the_end_of_a_step(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_numbers, "_STEP", 16)
    values = [(1 << (7 * size - 1 if size < 10 else 63)) - 1 + number for number in range(40)]
    packed = np.frombuffer(b"".join(_VarintBytes(value) for value in values), np.uint8)
    assert packed_numbers.varints(packed).tolist() == values
