"""Datatypes as arrays, and the BYTES encoding read both ways."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.shm.arrays import DTYPES, array, byte_content, datatype_of
from tensord.shm.common.arrays import bfloat16_bits
from tensord.shm.datatypes import ELEMENT_SIZES, byte_size, element_count, from_model_config, to_model_config
from tensord.shm.errors import InvalidArgument


@pytest.mark.parametrize("datatype", sorted(set(DTYPES) - {"BYTES"}))
def test_fixed_size_datatypes_are_views(datatype: str) -> None:
    size = ELEMENT_SIZES[datatype]
    assert size is not None
    content = bytearray(6 * size)
    values = array(memoryview(content), datatype, (2, 3))
    assert values.shape == (2, 3)
    assert values.dtype == DTYPES[datatype]
    assert np.shares_memory(values, np.frombuffer(content, np.uint8))
    assert datatype_of(values.dtype) == datatype
    assert byte_size(datatype, (2, 3)) == 6 * size
    assert from_model_config(to_model_config(datatype)) == datatype


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_bfloat16_bits(shape: tuple[int, ...]) -> None:
    values = np.full(shape, 0.1, np.float32)
    bits = bfloat16_bits(values)
    assert isinstance(bits, np.ndarray)
    assert bits.dtype == np.uint16
    np.testing.assert_array_equal(bits.view(DTYPES["BF16"]), values.astype(DTYPES["BF16"]))


@given(st.lists(st.one_of(st.binary(max_size=40), st.text(max_size=10)), max_size=12))
def test_bytes_both_ways(values: list[bytes | str]) -> None:
    elements = np.empty(len(values), np.object_)
    elements[:] = values
    content = byte_content(elements)
    expected = [v if isinstance(v, bytes) else v.encode() for v in values]
    assert array(content, "BYTES", (len(values),)).tolist() == expected


@given(st.binary(max_size=64), st.integers(0, 5))
def test_any_bytes_are_parsed_or_refused(content: bytes, count: int) -> None:
    try:
        values = array(content, "BYTES", (count,), "input 'x'")
    except InvalidArgument as error:
        assert "input 'x'" in error.message
    else:
        assert byte_content(values) == content


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\x01\x00", "expecting 4 bytes but only 2 bytes available"),
        (
            b"\x00\x00\x00\x00\x64\x00\x00\x00a",
            "incomplete string data for inference input 'x', expecting string of length 100 but only 1 bytes available",
        ),
        (b"\x64\x00\x00\x00a", "expected 2 string elements for inference input 'x' for model 'm', got 1"),
        (
            b"\x01\x00\x00\x00a" * 3,
            "unexpected number of string elements 3 for inference input 'x' for model 'm', expecting 2",
        ),
        (b"\x01\x00\x00\x00a", "expected 2 string elements for inference input 'x' for model 'm', got 1"),
    ],
)
def test_what_is_wrong_with_bytes(content: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        array(content, "BYTES", (2,), "input 'x'", " for model 'm'")
    assert text in raised.value.message


def test_sizes_are_named_with_both_numbers() -> None:
    with pytest.raises(InvalidArgument, match=r"input 'x': 12 bytes given, FP32\[2, 2\] needs 16"):
        array(bytes(12), "FP32", (2, 2), "input 'x'")


@pytest.mark.parametrize("shape", [(-1,), (2**62, 4), (2**32, 2**32), (1,) * 33])
def test_shapes_that_cannot_be(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument):
        element_count(shape)


def test_unknown_datatypes() -> None:
    with pytest.raises(InvalidArgument):
        byte_size("FP8", (1,))
    with pytest.raises(InvalidArgument):
        from_model_config("TYPE_FP8")
    assert datatype_of(np.dtype(np.complex64)) is None
    assert datatype_of(np.dtype("S3")) == "BYTES"
