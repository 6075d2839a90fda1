"""The outputs of a run before they are cut: bytes of each row, and what an answer's shape begins with."""

from __future__ import annotations

import numpy as np

from config.model_config import parse_pbtxt
from workers.models.batch_outputs import uncut
from workers.models.signature import Signature, signature

TENSORS = (
    """output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "n" data_type: TYPE_INT8 dims: [ -1 ] }"""
)


def described(max_batch_size: int) -> Signature:
    return signature(parse_pbtxt(f'name: "m" max_batch_size: {max_batch_size} {TENSORS}', "m"), {}, {})


def test_rows_of_a_batch() -> None:
    y, n = np.arange(6, dtype=np.float32).reshape(3, 2), np.arange(12, dtype=np.int8).reshape(3, 4)
    made = uncut(described(4), {"y": y, "n": n}, slots=True)
    assert made is not None
    assert made.batches
    assert made.row_byte_size == 12
    assert [(o.name, o.datatype, o.row_byte_size, o.shape) for o in made.outputs] == [
        ("y", "FP32", 8, (2,)),
        ("n", "INT8", 4, (4,)),
    ]
    assert made.outputs[0].content[8:16] == y[1].tobytes()


def test_columns_that_are_not_contiguous_come_out_row_by_row() -> None:
    y = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    made = uncut(described(4), {"y": y}, slots=True)
    assert made is not None
    assert made.outputs[0].content[8:16] == y[1].tobytes()


def test_requests_of_a_series_and_one_alone() -> None:
    n = np.arange(12, dtype=np.int8).reshape(3, 4)
    series, alone = uncut(described(0), {"n": n}, slots=True), uncut(described(0), {"n": n}, slots=False)
    assert series is not None
    assert alone is not None
    assert not series.batches
    assert (series.row_byte_size, series.outputs[0].shape) == (4, (4,))
    assert (alone.row_byte_size, alone.outputs[0].shape) == (12, (3, 4))


def test_what_is_large_is_left_as_arrays() -> None:
    assert uncut(described(4), {"n": np.zeros((2, 1 << 17), np.int8)}, slots=True) is not None
    assert uncut(described(4), {"n": np.zeros((2, 1 << 18), np.int8)}, slots=True) is None
