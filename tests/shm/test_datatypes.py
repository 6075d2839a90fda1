"""Datatypes and shapes: names both ways, sizes, and every shape that would overflow something later."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.shm.arrays import DTYPES, array
from tensord.shm.datatypes import (
    ELEMENT_SIZES,
    MAX_ELEMENTS,
    byte_size,
    element_count,
    from_model_config,
    to_model_config,
)
from tensord.shm.errors import InvalidArgument


@pytest.mark.parametrize("datatype", sorted(ELEMENT_SIZES))
def test_names_both_ways(datatype: str) -> None:
    assert from_model_config(to_model_config(datatype)) == datatype


@pytest.mark.parametrize("name", ["FP32", "TYPE_INVALID", "TYPE_BYTES_", "", "TYPE_fp32"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(InvalidArgument, match="unknown data type"):
        from_model_config(name)


@pytest.mark.parametrize("datatype", sorted(set(ELEMENT_SIZES) - {"BYTES"}))
def test_sizes_are_those_of_numpy(datatype: str) -> None:
    assert byte_size(datatype, (2, 3)) == np.empty((2, 3), DTYPES[datatype]).nbytes


def test_bytes_have_no_size() -> None:
    assert byte_size("BYTES", (2, 3)) is None
    with pytest.raises(InvalidArgument, match="invalid datatype 'fp32'"):
        byte_size("fp32", (1,))


@pytest.mark.parametrize(("shape", "count"), [((), 1), ((0,), 0), ((3, 0, 2), 0), ((2, 3), 6), ((1,) * 32, 1)])
def test_counts(shape: tuple[int, ...], count: int) -> None:
    assert element_count(shape) == count


@pytest.mark.parametrize(
    "shape",
    [(-1,), (0, -1), (1,) * 33, (1 << 60,), (1 << 63,), (1 << 32, 1 << 32), (0, 1 << 63), (1 << 40, 0, 1 << 40)],
)
def test_shapes_that_nothing_could_hold(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match=r"^input 'x' shape: "):
        element_count(shape, "input 'x' shape")


@given(st.lists(st.integers(-1, 1 << 64), max_size=5))
def test_an_accepted_empty_shape_is_one_numpy_takes(shape: list[int]) -> None:
    try:
        count = element_count(shape)
    except InvalidArgument:
        return
    assert 0 <= count <= MAX_ELEMENTS
    if count == 0:
        assert array(b"", "FP64", shape).shape == tuple(shape)
