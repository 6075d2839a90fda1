"""The outputs of a run before they are cut: bytes of each row, and what an answer's shape begins with."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np

from tensord.config.model_config import parse_pbtxt
from tensord.shm.arrays import Array
from tensord.workers.programs.grouped_calls import Packing, layout_of_rows
from tensord.workers.tensors.output_layout import BatchOutputs, layout_of, uncut
from tensord.workers.tensors.signature import Signature, signature

TENSORS = """output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "n" data_type: TYPE_INT8 dims: [ -1 ] }
    output { name: "z" data_type: TYPE_FP32 dims: [ 1 ] }"""
FP32 = np.dtype(np.float32)


def row_of(made: BatchOutputs, output: int, row: int) -> bytes:
    _, _, content, start, step, size, _ = made.layout.outputs[output]
    return made.contents[content][start + row * step :][:size]


def made_of(signature: Signature, arrays: dict[str, Array], slots: bool) -> BatchOutputs | None:
    return uncut(layout_of(signature, arrays, slots), list(arrays.values()))


def described(max_batch_size: int) -> Signature:
    return signature(parse_pbtxt(f'name: "m" max_batch_size: {max_batch_size} {TENSORS}', "m"), {}, {})


def test_rows_of_a_batch() -> None:
    y, n = np.arange(6, dtype=np.float32).reshape(3, 2), np.arange(12, dtype=np.int8).reshape(3, 4)
    made = made_of(described(4), {"y": y, "n": n}, slots=True)
    assert made is not None
    assert made.layout.batches
    assert made.layout.row_byte_size == 12
    assert made.layout.outputs == (("y", "FP32", 0, 0, 8, 8, (2,)), ("n", "INT8", 1, 0, 4, 4, (4,)))
    assert made.contents == [y.tobytes(), n.tobytes()]


def test_columns_that_are_not_contiguous_come_out_row_by_row() -> None:
    y = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    made = made_of(described(4), {"y": y}, slots=True)
    assert made is not None
    assert row_of(made, 0, 1) == y[1].tobytes()


def test_one_request_alone() -> None:
    n = np.arange(12, dtype=np.int8).reshape(3, 4)
    made = made_of(described(0), {"n": n}, slots=False)
    assert made is not None
    assert not made.layout.batches
    assert made.layout.row_byte_size == 12
    assert made.layout.outputs == (("n", "INT8", 0, 0, 12, 12, (3, 4)),)
    assert made.contents == [n.tobytes()]


def test_rows_of_several_outputs_side_by_side() -> None:
    packing = Packing([("y", (2,), FP32), ("n", (1, 3), np.dtype(np.int8)), ("z", (), FP32)])
    floats, numbers = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(6, dtype=np.int8).reshape(2, 3)
    made = uncut(layout_of_rows(described(0), packing), [floats, numbers])
    assert made is not None
    assert not made.layout.batches
    assert made.layout.row_byte_size == 15
    assert [output[:2] + output[-1:] for output in made.layout.outputs] == [
        ("y", "FP32", (2,)),
        ("n", "INT8", (1, 3)),
        ("z", "FP32", ()),
    ]
    assert [row_of(made, i, 1) for i in range(3)] == [
        floats[1, :2].tobytes(),
        numbers[1].tobytes(),
        floats[1, 2].tobytes(),
    ]


def test_a_layout_holds_for_every_run_and_is_no_other_one() -> None:
    """Answers are planned by it: two programs whose outputs happen to lie alike are still two."""
    first, second = np.arange(6, dtype=np.float32).reshape(3, 2), np.arange(6, 12, dtype=np.float32).reshape(3, 2)
    layout, other = layout_of(described(4), {"y": first}, True), layout_of(described(4), {"y": first}, True)
    for y in (first, second):
        made = uncut(layout, [y])
        assert made is not None
        assert made.layout is layout
        assert [row_of(made, 0, row) for row in range(3)] == [row.tobytes() for row in y]
    assert layout.outputs == other.outputs
    assert layout != other
    assert len({layout, other}) == 2


def test_what_is_large_is_left_as_arrays() -> None:
    for slots, shape in ((True, (2, 1 << 17)), (False, (1 << 18,))):
        layout = layout_of(described(4), {"n": np.zeros(shape, np.int8)}, slots)
        assert uncut(layout, [np.zeros(shape, np.int8)]) is not None
        assert uncut(layout, [np.zeros((*shape[:-1], 1 << 18), np.int8), np.zeros(1, np.int8)]) is None
    assert made_of(described(4), {"n": np.zeros((2, 1 << 18), np.int8)}, slots=True) is None
    rows = layout_of_rows(described(0), Packing([("n", (1 << 17,), np.dtype(np.int8))]))
    assert uncut(rows, [np.zeros((2, 1 << 17), np.int8)]) is not None
    assert uncut(rows, [np.zeros((3, 1 << 17), np.int8)]) is None


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
