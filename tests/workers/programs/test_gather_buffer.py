"""Requests side by side in one buffer: bytes or arrays, of one row or several, padded with zeros."""

from __future__ import annotations

import numpy as np
import pytest

from tensord.shm.arena import ALIGNMENT
from tensord.workers.programs.gather_buffer import GatherBuffer, aligned
from tensord.workers.requests.request import Request
from tests.records import Tensor, WholeRequest
from tests.workers.made_requests import request_of

FP32 = np.dtype(np.float32)


def as_bytes(values: np.ndarray, rows: int) -> Request:
    """Returns a request as validation makes it when it knows its kind: with the tensor's bytes."""
    content = values.tobytes()
    made = request_of({}, rows)
    own = WholeRequest(1, "m", 0, (Tensor("x", "FP32", values.shape, content),))
    return Request(
        made.version,
        made.submitter,
        own.prepared,
        own.record,
        None,
        rows,
        None,
        {},
        [],
        1,
        0,
        {"x": memoryview(content)},
    )


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.complex64])
def test_arrays_start_where_xla_takes_them(dtype: type) -> None:
    for shape in ((), (1,), (3, 5)):
        made = aligned(shape, np.dtype(dtype))
        assert made.shape == shape
        assert made.__array_interface__["data"][0] % ALIGNMENT == 0


def test_bytes_and_arrays_of_several_rows_then_zeros() -> None:
    buffer = GatherBuffer("x", 6, (2,), FP32, True)
    one, two = np.arange(2, dtype=np.float32).reshape(1, 2), np.arange(4, dtype=np.float32).reshape(2, 2) + 10
    for first, second in ((as_bytes(one, 1), as_bytes(two, 2)), (request_of({"x": one}, 1), request_of({"x": two}, 2))):
        buffer.array[...] = 7
        assert buffer.fill([first, second]) == 24
        np.testing.assert_array_equal(buffer.array, np.concatenate([one, two, np.zeros((3, 2), np.float32)]))


def test_a_smaller_shape_is_padded_with_zeros() -> None:
    buffer = GatherBuffer("x", 2, (2, 3), FP32, True)
    small = np.ones((1, 1, 2), np.float32)
    for request in (as_bytes(small, 1), request_of({"x": small}, 1)):
        buffer.array[...] = 7
        assert buffer.fill([request]) == small.nbytes
        np.testing.assert_array_equal(buffer.array, [[[1, 1, 0], [0, 0, 0]], np.zeros((2, 3))])


def test_without_a_batch_dimension_the_program_sees_the_one_slot() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    buffer = GatherBuffer("x", 1, (2, 3), FP32, False)
    for request in (as_bytes(values, 1), request_of({"x": values})):
        buffer.array[...] = 7
        assert buffer.fill([request]) == values.nbytes
        np.testing.assert_array_equal(buffer.array, values)
    wider = GatherBuffer("x", 1, (2, 4), FP32, False)
    assert wider.fill([as_bytes(values, 1)]) == values.nbytes
    np.testing.assert_array_equal(wider.array, [[0, 1, 2, 0], [3, 4, 5, 0]])


def test_nothing_in_a_row() -> None:
    buffer = GatherBuffer("x", 2, (0,), FP32, True)
    assert buffer.fill([as_bytes(np.zeros((2, 0), np.float32), 2)]) == 0
