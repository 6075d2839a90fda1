"""The outputs of a run before they are cut: bytes of each row, and what an answer's shape begins with."""

from __future__ import annotations

import numpy as np

from config.model_config import parse_pbtxt
from workers.models.batch_outputs import BatchOutputs, uncut, uncut_rows
from workers.models.packing import Packing
from workers.models.signature import Signature, signature

TENSORS = """output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "n" data_type: TYPE_INT8 dims: [ -1 ] }
    output { name: "z" data_type: TYPE_FP32 dims: [ 1 ] }"""
FP32 = np.dtype(np.float32)


def row_of(made: BatchOutputs, output: int, row: int) -> bytes:
    _, _, content, start, step, size, _ = made.outputs[output]
    return content[start + row * step :][:size]


def described(max_batch_size: int) -> Signature:
    return signature(parse_pbtxt(f'name: "m" max_batch_size: {max_batch_size} {TENSORS}', "m"), {}, {})


def test_rows_of_a_batch() -> None:
    y, n = np.arange(6, dtype=np.float32).reshape(3, 2), np.arange(12, dtype=np.int8).reshape(3, 4)
    made = uncut(described(4), {"y": y, "n": n}, slots=True)
    assert made is not None
    assert made.batches
    assert made.row_byte_size == 12
    assert made.outputs == (("y", "FP32", y.tobytes(), 0, 8, 8, (2,)), ("n", "INT8", n.tobytes(), 0, 4, 4, (4,)))


def test_columns_that_are_not_contiguous_come_out_row_by_row() -> None:
    y = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    made = uncut(described(4), {"y": y}, slots=True)
    assert made is not None
    assert row_of(made, 0, 1) == y[1].tobytes()


def test_one_request_alone() -> None:
    n = np.arange(12, dtype=np.int8).reshape(3, 4)
    made = uncut(described(0), {"n": n}, slots=False)
    assert made is not None
    assert not made.batches
    assert made.row_byte_size == 12
    assert made.outputs == (("n", "INT8", n.tobytes(), 0, 12, 12, (3, 4)),)


def test_rows_of_several_outputs_side_by_side() -> None:
    packing = Packing([("y", (2,), FP32), ("n", (1, 3), np.dtype(np.int8)), ("z", (), FP32)])
    floats, numbers = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(6, dtype=np.int8).reshape(2, 3)
    made = uncut_rows(described(0), packing, [floats, numbers])
    assert made is not None
    assert not made.batches
    assert made.row_byte_size == 15
    assert [output[:2] + output[-1:] for output in made.outputs] == [
        ("y", "FP32", (2,)),
        ("n", "INT8", (1, 3)),
        ("z", "FP32", ()),
    ]
    assert [row_of(made, i, 1) for i in range(3)] == [
        floats[1, :2].tobytes(),
        numbers[1].tobytes(),
        floats[1, 2].tobytes(),
    ]


def test_what_is_large_is_left_as_arrays() -> None:
    assert uncut(described(4), {"n": np.zeros((2, 1 << 17), np.int8)}, slots=True) is not None
    assert uncut(described(4), {"n": np.zeros((2, 1 << 18), np.int8)}, slots=True) is None
    packing = Packing([("n", (1 << 17,), np.dtype(np.int8))])
    assert uncut_rows(described(0), packing, [np.zeros((2, 1 << 17), np.int8)]) is not None
    assert uncut_rows(described(0), packing, [np.zeros((3, 1 << 17), np.int8)]) is None
