"""Tensors as JSON: rows of text and value, what is refused with which sentence, and every value there and back."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.http.decoded_request import BinaryPart
from tensord.shm.arrays import DTYPES, array
from tensord.shm.errors import InvalidArgument
from tests.daemon.http.heads import content, decode, input_text, request_of, tensor


@pytest.mark.parametrize(
    ("datatype", "text", "values"),
    [
        ("BOOL", "[true,false]", [True, False]),
        ("INT8", "[-128,127]", [-128, 127]),
        ("INT16", "[-32768,32767]", [-32768, 32767]),
        ("INT32", "[-2147483648,2147483647]", [-(2**31), 2**31 - 1]),
        ("INT64", "[-9223372036854775808,9223372036854775807]", [-(2**63), 2**63 - 1]),
        ("UINT8", "[0,255]", [0, 255]),
        ("UINT16", "[0,65535]", [0, 65535]),
        ("UINT32", "[0,4294967295]", [0, 2**32 - 1]),
        ("UINT64", "[0,18446744073709551615]", [0, 2**64 - 1]),
        ("FP32", "[1,-2.5]", [1.0, -2.5]),
        ("FP32", "[1e39,-1e39]", [math.inf, -math.inf]),
        ("FP64", "[0.1,1e308]", [0.1, 1e308]),
        ("FP32", "[NaN,Infinity]", [math.nan, math.inf]),
        ("FP64", "[-Infinity,1]", [-math.inf, 1.0]),
        ("FP64", "[[NaN],[2]]", [math.nan, 2.0]),
        ("INT32", "[[1],[2]]", [1, 2]),
        ("INT32", " [ [ 1 , 2 ] ] ", [1, 2]),
    ],
)
def test_numbers_become_wire_bytes(datatype: str, text: str, values: list[Any]) -> None:
    wire = content(decode(input_text(text, datatype, "[2]"), 0))
    np.testing.assert_array_equal(array(wire, datatype, (2,)), np.array(values, DTYPES[datatype]))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('["a",""]', [b"a", b""]),
        (r'["\u0000\n","\ud83d\ude00"]', [b"\0\n", "😀".encode()]),
        ('[["ä"],["b"]]', ["ä".encode(), b"b"]),
    ],
)
def test_strings_become_wire_bytes(text: str, values: list[bytes]) -> None:
    wire = b"".join(struct.pack("<I", len(value)) + value for value in values)
    assert content(decode(input_text(text, "BYTES", "[2]"), 0)) == wire


@pytest.mark.parametrize(("shape", "data"), [("[0]", "[]"), ("[2,0]", "[[],[]]"), ("[0,3]", "[]")])
@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BYTES", "BOOL"])
def test_tensors_without_elements(datatype: str, shape: str, data: str) -> None:
    assert content(decode(input_text(data, datatype, shape), 0)) == b""


def test_a_scalar() -> None:
    assert content(decode(input_text("[7]", "UINT8", "[]"), 0)) == b"\x07"


@pytest.mark.parametrize("datatype", ["INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"])
def test_integers_out_of_range_are_refused_not_wrapped(datatype: str) -> None:
    limits = np.iinfo(DTYPES[datatype])
    sign = "unsigned" if datatype.startswith("U") else "signed"
    for value in (limits.min - 1, limits.max + 1, 10**30):
        fits_64 = (0 <= value < 2**64) if sign == "unsigned" else (-(2**63) <= value < 2**63)
        found = f"a value of input 'x' is out of the range of {datatype}"
        if not fits_64:
            found = f"Unable to parse 'data': attempt to access JSON non-{sign}-integer as {sign}-integer"
        with pytest.raises(InvalidArgument, match=found):
            decode(input_text(f"[{value}]", datatype), 0)


SIGNED = "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"
NUMBER = "Unable to parse 'data': attempt to access JSON non-number as double"
BOOLEAN = "Unable to parse 'data': attempt to access JSON non-boolean as boolean"
STRING = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
ARRAY = "Unable to parse 'data': attempt to access JSON non-array as array"
TOO_BIG = "failed to parse the request JSON buffer: Number too big to be stored in double. at "
NESTED = "Unable to parse 'data': input 'x' is nested, but not as its shape "


@pytest.mark.parametrize(
    ("datatype", "data", "found"),
    [
        ("INT32", "[1.5]", SIGNED),
        ("INT32", "[2.0]", SIGNED),
        ("INT32", "[1e2]", SIGNED),
        ("INT32", '["1"]', SIGNED),
        ("INT32", "[true]", SIGNED),
        ("INT32", "[null]", SIGNED),
        ("INT32", "[NaN]", SIGNED),
        ("INT32", "[1" + "0" * 5000 + "]", "failed to parse the request JSON buffer: "),
        ("UINT8", "[-1]", "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ("FP32", '["1"]', NUMBER),
        ("FP32", "[NaN,true]", NUMBER),
        ("FP32", '[[NaN],["1"]]', NESTED),
        ("FP32", '[["1"]]', NUMBER),
        ("FP64", "[1e999]", TOO_BIG),
        ("FP64", "[1" + "0" * 400 + "]", "Unable to parse 'data': a value of input 'x' is out of the range of FP64"),
        ("BOOL", "[1]", BOOLEAN),
        ("BOOL", "[0]", BOOLEAN),
        ("BOOL", '["true"]', BOOLEAN),
        ("BYTES", "[1]", STRING),
        ("BYTES", "[NaN]", STRING),
        ("FP32", "1", ARRAY),
        ("FP32", "null", ARRAY),
        ("FP32", '"["', ARRAY),
        ("FP32", "{}", ARRAY),
        ("FP32", "[{}]", NUMBER),
        ("FP32", "[[1],2]", NESTED),
        ("FP32", "[1,[2]]", NESTED),
        ("FP32", "[" * 70 + "1" + "]" * 70, NESTED),
    ],
)
def test_data_of_another_kind(datatype: str, data: str, found: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode(input_text(data, datatype), 0)
    assert caught.value.message.startswith(found)


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ("[2,3]", "[[1,2,3],[4,5,6]]"),
        ("[2,3]", "[1,2,3,4,5,6]"),
        ("[1,2,3]", "[[1,2,3],[4,5,6]]"),
        ("[2,3]", "[[[1,2,3],[4,5,6]]]"),
        ("[6]", "[[1],[2],[3],[4],[5],[6]]"),
    ],
)
def test_nested_as_the_shape_says(shape: str, data: str) -> None:
    assert content(decode(input_text(data, "UINT8", shape), 0)) == bytes(range(1, 7))


@pytest.mark.parametrize(
    "data",
    [
        "[[1,2],[3,4],[5,6]]",
        "[[1,2,3],[4,5,6,7]]",
        "[[1,2,3],4,5,6]",
        "[[1,2,3,4,5,6]]",
        "[[1,[2],3],[4,5,6]]",
        "[[],[1,2,3,4,5,6]]",
    ],
)
def test_ragged_and_otherwise_nested_data(data: str) -> None:
    with pytest.raises(InvalidArgument, match=r"is nested, but not as its shape \[2, 3\] says"):
        decode(input_text(data, "UINT8", "[2,3]"), 0)


@pytest.mark.parametrize(
    ("datatype", "shape", "wire"),
    [
        ("FP32", "[2]", struct.pack("<2f", 1.5, math.inf)),
        ("FP16", "[1]", b"\0\x3c"),
        ("BF16", "[2]", b"\x80\x3f\0\0"),
        ("BYTES", "[2]", b"\1\0\0\0\xff\0\0\0\0"),
        ("BOOL", "[1]", b"\1"),
    ],
)
def test_a_string_is_base64_of_the_binary_form(datatype: str, shape: str, wire: bytes) -> None:
    text = json.dumps(base64.b64encode(wire).decode())
    assert content(decode(input_text(text, datatype, shape), 0)) == wire
    for wrong in (text[:-2] + '"', '"' + text[5:], '"!' + text[1:], '""'):
        with pytest.raises(InvalidArgument, match=ARRAY):
            decode(input_text(wrong, datatype, shape), 0)


@pytest.mark.parametrize("data", ["[]", "[1,2]"])
def test_another_number_of_values_than_the_shape_has(data: str) -> None:
    with pytest.raises(InvalidArgument, match="Shape does not match true shape of 'data' field"):
        decode(input_text(data), 0)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_only_in_binary(datatype: str) -> None:
    with pytest.raises(
        InvalidArgument,
        match=f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input x",
    ):
        decode(input_text("[1]", datatype), 0)
    part = decode(request_of(tensor(datatype=datatype, parameters={"binary_data_size": 2})), 2)
    assert part.inputs[0][3] == BinaryPart(0, 2)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, tuple[int, ...], np.ndarray[Any, Any]]:
    """Draws a datatype, a shape, and values that JSON can represent."""
    datatype = draw(st.sampled_from([name for name in DTYPES if name not in ("FP16", "BF16")]))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    dtype = DTYPES[datatype]
    element: st.SearchStrategy[Any]
    if datatype == "BYTES":
        element = st.text().map(lambda text: text.encode("utf-8", "replace"))
    elif datatype == "BOOL":
        element = st.booleans()
    elif dtype.kind == "f":
        element = st.floats(width=32 if datatype == "FP32" else 64)
    else:
        element = st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    count = math.prod(shape)
    values = np.empty(count, dtype)
    values[:] = draw(st.lists(element, min_size=count, max_size=count))
    return datatype, shape, values.reshape(shape)


@given(tensors(), st.booleans())
def test_what_was_encoded_is_decoded(given_tensor: tuple[str, tuple[int, ...], Any], nested: bool) -> None:
    datatype, shape, values = given_tensor
    data = values.tolist() if nested and shape else values.ravel().tolist()

    def text(value: Any) -> Any:
        return (
            [text(item) for item in value]
            if isinstance(value, list)
            else value.decode()
            if isinstance(value, bytes)
            else value
        )

    decoded = decode(request_of(tensor(datatype=datatype, shape=shape, data=text(data))), 0)
    np.testing.assert_array_equal(array(content(decoded), datatype, shape), values)
