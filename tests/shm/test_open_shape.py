"""The dimension that a client leaves open: found where there is one, refused with what was given where there is none."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.shm.arrays import byte_content
from tensord.shm.datatypes import check_shape, closed, elements, is_open
from tensord.shm.errors import InvalidArgument


@given(st.lists(st.integers(1, 5), max_size=4), st.integers(0, 4), st.integers(0, 7))
def test_what_was_taken_out_is_found(shape: list[int], at: int, size: int) -> None:
    whole = [*shape[:at], size, *shape[at:]]
    asked = [*shape[:at], -1, *shape[at:]]
    assert is_open(asked)
    assert not is_open(shape)
    assert closed(asked, math.prod(whole), "x") == tuple(whole)


@pytest.mark.parametrize(
    ("shape", "count", "said"),
    [
        ([-1, -1], 4, r"x \[-1,-1\] has 2 dimensions of -1, at most 1 can be found"),
        ([-1, 3], 4, r"x \[-1,3\] cannot have the 4 elements"),
        ([-1, 0], 0, r"x \[-1,0\] cannot have the 0 elements"),
        ([-1, -2], 4, "dimension -2 is negative"),
        ([-1, 2**40, 2**40], 4, "elements given, at most"),
        ([-1] + [1] * 40, 4, "dimensions given, at most"),
    ],
)
def test_what_cannot_be_found(shape: list[int], count: int, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        closed(shape, count, "x")


def test_only_the_shape_is_looked_at() -> None:
    check_shape([-1, 4], "x")
    check_shape([2, 4], "x")
    with pytest.raises(InvalidArgument, match="2 dimensions of -1"):
        check_shape([-1, 4, -1], "x")


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_elements_of_bytes(values: list[bytes]) -> None:
    made = np.empty(len(values), np.object_)
    made[:] = values
    assert elements("BYTES", byte_content(made), "x") == len(values)


def test_elements_of_numbers() -> None:
    assert elements("FP32", bytes(12), "x") == 3
    with pytest.raises(InvalidArgument, match="x: 13 bytes are no whole number of FP32"):
        elements("FP32", bytes(13), "x")
    assert elements("BYTES", b"\xff\xff\xff\xffab", "x") == 1
