"""Tensors side by side: one row for each dtype, in order, and back again."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np

from tensord.workers.tensors.packing import Packing

FP32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def test_a_row_for_each_dtype() -> None:
    packing = Packing([("a", (2, 3), FP32), ("b", (), BF16), ("c", (0, 4), FP32), ("d", (1,), FP32), ("e", (2,), BF16)])
    assert packing.rows == [(FP32, 7), (BF16, 3)]
    assert [tuple(part) for part in packing.parts] == [
        ("a", 0, 0, 6, (2, 3)),
        ("b", 1, 0, 1, ()),
        ("c", 0, 6, 6, (0, 4)),
        ("d", 0, 6, 7, (1,)),
        ("e", 1, 1, 3, (2,)),
    ]


def test_what_is_packed_is_unpacked() -> None:
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.asarray(7, BF16),
        "c": np.zeros((0, 4), np.float32),
        "t": np.array([True, False]),
    }
    packing = Packing([(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()])
    rows = [np.asarray(row) for row in jax.jit(packing.pack)(tensors)]
    assert [(row.dtype, row.shape) for row in rows] == [(dtype, (size,)) for dtype, size in packing.rows]
    unpacked = packing.unpack(rows)
    assert list(unpacked) == list(tensors)
    for name, tensor in tensors.items():
        assert unpacked[name].dtype == tensor.dtype
        np.testing.assert_array_equal(unpacked[name], tensor)


def test_numpy_s_tensors_are_views() -> None:
    packing = Packing([("a", (2,), FP32), ("b", (), FP32)])
    row = np.zeros(3, np.float32)
    for tensor in packing.unpack([row]).values():
        tensor[...] = 5
    assert row.tolist() == [5, 5, 5]


def test_nothing() -> None:
    packing = Packing([])
    assert (packing.rows, packing.pack({}), packing.unpack([])) == ([], (), {})
