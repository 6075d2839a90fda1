"""The JSON head of a request: rows of text and value, what is refused with which sentence, and that nothing else ever happens."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from daemon.http import request_codec
from daemon.http.decoded_request import DecodedRequest, Part
from daemon.http.request_codec import Recognised
from shm.arrays import DTYPES, array
from shm.errors import InvalidArgument, ServingError, Unsupported
from shm.messages import RegionSlice, RequestedOutput, Submit, Tensor, encoder

LENGTH = struct.Struct("<I")


def decode(head: bytes | memoryview, tail_size: int) -> DecodedRequest:
    return request_codec.decode(head, tail_size, "m")


def input_text(data: str, datatype: str = "FP32", shape: str = "[1]") -> bytes:
    return f'{{"inputs":[{{"name":"x","datatype":"{datatype}","shape":{shape},"data":{data}}}]}}'.encode()


def request_of(*inputs: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"inputs": inputs, **fields}).encode()


def tensor(name: str = "x", datatype: str = "FP32", shape: tuple[int, ...] = (1,), **fields: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, **fields}


def content(decoded: DecodedRequest) -> bytes:
    ((_, _, _, source),) = decoded.inputs
    assert isinstance(source, bytes)
    return source


# ---------------------------------------------------------------------------------------------------------- JSON data


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
    wire = b"".join(LENGTH.pack(len(value)) + value for value in values)
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
    assert part.inputs[0][3] == Part(0, 2)


# ------------------------------------------------------------------------------------------------------ text and form


PARSE = "failed to parse the request JSON buffer: "
NO_INPUTS = "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (b"", PARSE + "The document is empty. at 0"),
        (b"{", PARSE + "Missing a name for object member. at 1"),
        (b'{"inputs":[', PARSE + "Invalid value. at 11"),
        (b"   ", PARSE + "The document is empty. at 3"),
        (b"\0", PARSE + "The document is empty. at 0"),
        (b'{"inputs":[]} x', PARSE + "The document root must not be followed by other values. at 14"),
        (b'{"inputs":[]}\0\xff', PARSE + "The document root must not be followed by other values. at 13"),
        (b"\xfe\xff", PARSE),
        (b'{"inputs":[],"id":"\xff"}', PARSE + "Invalid encoding in string. at 19"),
        (b'{"inputs":[],"id":"\\ud800"}', PARSE + "The surrogate pair in string is invalid. at "),
        (b'{"inputs":[],"id":"\\ud800","x":NaN}', PARSE + "The surrogate pair in string is invalid. at "),
        (b'{"inputs":[],"id":"NaN"', PARSE + "Missing a comma or '}' after an object member. at 23"),
        (b'{"inputs":' + b"[" * 100_000, PARSE + "it is nested too deeply"),
        (b"null", NO_INPUTS),
        (b"[]", NO_INPUTS),
        (b"{}", NO_INPUTS),
        (b'{"inputs":null}', "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        (b'{"inputs":{}}', "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        (b'{"inputs":5,"x":NaN}', "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        (b'{"inputs":[5],"x":NaN}', "Unable to parse 'name': attempt to access non-existing object member 'name'"),
        (b'{"inputs":[{"name":"x"}]}', "Unable to parse 'datatype': attempt to access non-existing object member"),
        (b'{"inputs":[],"id":7}', "Unable to parse 'id': attempt to access JSON non-string as string"),
        (b'{"inputs":[],"id":null}', "Unable to parse 'id': attempt to access JSON non-string as string"),
        (b'{"inputs":[],"parameters":[]}', "failed to get request params.: attempt to get members for non-object"),
        (b'{"inputs":[],"outputs":{}}', "Unable to parse 'outputs': attempt to access JSON non-array as array"),
        (b'{"inputs":[],"outputs":["y"]}', "Unable to parse 'name': attempt to access non-existing object member"),
        (
            b'{"inputs":[],"outputs":[{"name":"y","parameters":[]}]}',
            "Unable to parse 'parameters': attempt to get members for non-object",
        ),
    ],
)
def test_what_is_not_a_request(head: bytes, found: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode(head, 0)
    assert caught.value.message.startswith(found)


@pytest.mark.parametrize(
    ("name", "datatype", "shape", "found"),
    [
        ("1", '"FP32"', "[1]", "Unable to parse 'name': attempt to access JSON non-string as string"),
        ('"x"', "5", "[1]", "Unable to parse 'datatype': attempt to access JSON non-string as string"),
        ('"x"', '"FP32"', "1", "Unable to parse 'shape': attempt to access JSON non-array as array"),
        *(
            ('"x"', '"FP32"', shape, "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as")
            for shape in ("[1.0]", '["1"]', "[true]", "[-1]", "[[1]]", "[null]")
        ),
    ],
)
def test_fields_of_an_input_that_have_another_kind(name: str, datatype: str, shape: str, found: str) -> None:
    with pytest.raises(InvalidArgument, match=found):
        decode(f'{{"inputs":[{{"name":{name},"datatype":{datatype},"shape":{shape},"data":[1]}}]}}'.encode(), 0)


def test_the_first_mistake_is_the_one_that_is_told() -> None:
    good = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}
    for request, found in (
        ({"id": 1, "parameters": 1, "inputs": 1}, "'id'"),
        ({"parameters": 1, "inputs": 1}, "request params"),
        ({"parameters": {"triton_x": 1}, "inputs": 1}, "reserved for Triton"),
        ({"inputs": [{**good, "data": [1, 2]}, {"name": 1}], "outputs": 1}, "Shape does not match"),
        ({"inputs": [good, {"name": 1}], "outputs": 1}, "'name'"),
        ({"inputs": [good], "outputs": 1}, "'outputs'"),
    ):
        with pytest.raises(InvalidArgument, match=found):
            decode(json.dumps(request).encode(), 7)


def test_raw_bytes_that_are_not_text_in_data() -> None:
    with pytest.raises(InvalidArgument, match=r"Invalid encoding in string. at \d+"):
        decode(b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"data":["\xff"]}]}', 0)
    with pytest.raises(InvalidArgument, match=r"The surrogate pair in string is invalid. at \d+$"):
        decode(input_text(r'["\ud83d"]', "BYTES"), 0)


def test_extra_keys_and_blanks_are_ignored() -> None:
    decoded = decode(
        b'  {"extra":{"a":[NaN]},"inputs":[{"name":"x","datatype":"UINT8","shape":[1],"data":[1],"z":1}]}  ', 0
    )
    assert content(decoded) == b"\x01"


def test_a_memoryview_is_read_like_bytes() -> None:
    assert content(decode(memoryview(input_text("[NaN]")), 0)) == struct.pack("<f", math.nan)


@pytest.mark.parametrize("datatype", ["fp32", "TYPE_FP32", "STRING", "", "FP8"])
def test_datatypes_have_exact_names(datatype: str) -> None:
    with pytest.raises(InvalidArgument, match="invalid datatype for input x"):
        decode(input_text("[1]", datatype), 0)


@pytest.mark.parametrize("shape", [[2**63 - 1, 2], [2**32, 2**32], [0, 2**70], [1] * 33, [2**63]])
def test_shapes_that_overflow(shape: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="input 'x' shape"):
        decode(request_of(tensor(shape=tuple(shape), data=[])), 0)


# -------------------------------------------------------------------------------------------------------- data sources


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, "But no field is set"),
        ({"data": [1], "parameters": {"binary_data_size": 4}}, "But set 'data' 'binary_data_size'"),
        (
            {"data": [1], "parameters": {"shared_memory_region": "r", "binary_data_size": 4}},
            "But set 'data' 'binary_data_size' 'shared_memory_region'",
        ),
        (
            {"parameters": {"shared_memory_region": "r", "binary_data_size": 4}},
            "But set 'binary_data_size' 'shared_memory_region'",
        ),
    ],
)
def test_exactly_one_data_source(fields: dict[str, Any], found: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode(request_of(tensor(**fields)), 4)
    assert caught.value.message.endswith(found)


def test_parts_follow_in_the_order_of_their_inputs() -> None:
    decoded = decode(
        request_of(
            tensor("a", parameters={"binary_data_size": 4}),
            tensor("b", data=[2.0]),
            tensor("c", parameters={"shared_memory_region": "r", "shared_memory_byte_size": 4, "other": None}),
            tensor("d", shape=(0,), parameters={"binary_data_size": 0}),
            tensor("e", shape=(2,), parameters={"binary_data_size": 8}),
        ),
        12,
    )
    assert [source for _, _, _, source in decoded.inputs] == [
        Part(0, 4),
        struct.pack("<f", 2.0),
        RegionSlice("r", 0, 4),
        Part(4, 0),
        Part(4, 8),
    ]


def test_too_little_and_too_much_binary_data() -> None:
    head = request_of(tensor(parameters={"binary_data_size": 16}))
    with pytest.raises(
        InvalidArgument, match="unexpected size for input 'x', expecting 12 additional bytes for model 'm'"
    ):
        decode(head, 4)
    with pytest.raises(InvalidArgument, match="unexpected additional input data for model 'm'"):
        decode(head, 17)


@pytest.mark.parametrize("size", [-1, True, "4", 4.0, None, 2**64, [4]])
def test_sizes_that_are_none(size: object) -> None:
    with pytest.raises(
        InvalidArgument, match="Unable to parse 'binary_data_size': attempt to access JSON non-unsigned"
    ):
        decode(request_of(tensor(parameters={"binary_data_size": size})), 4)


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ({"shared_memory_region": 1}, "'shared_memory_region': attempt to access JSON non-string as string"),
        (
            {"shared_memory_region": "r", "shared_memory_offset": "0"},
            "'shared_memory_offset': attempt to access JSON non-uns",
        ),
        (
            {"shared_memory_region": "r", "shared_memory_byte_size": True},
            "'shared_memory_byte_size': attempt to access",
        ),
        (
            {"shared_memory_region": "r", "shared_memory_byte_size": 2**63},
            "Invalid offset [+] byte size for shared memory region: 'r'",
        ),
        (
            {"shared_memory_region": "r", "shared_memory_offset": 2**64 - 4, "shared_memory_byte_size": 8},
            "Invalid offset for shared memory region: 'r'",
        ),
    ],
)
def test_regions_that_are_none(parameters: dict[str, Any], found: str) -> None:
    for request in (
        request_of(tensor(parameters=parameters)),
        request_of(tensor(data=[1]), outputs=[{"name": "y", "parameters": parameters}]),
    ):
        with pytest.raises(InvalidArgument, match=found):
            decode(request, 0)


# ---------------------------------------------------------------------------------------------------------- parameters


def test_reserved_parameters_are_taken_out() -> None:
    decoded = decode(
        request_of(
            id="abc",
            parameters={
                "sequence_id": 2**64 - 1,
                "sequence_start": True,
                "sequence_end": True,
                "priority": 3,
                "timeout": 5,
                "binary_data_output": True,
                "a": "text",
                "b": False,
                "c": -(2**63),
                "d": 1.5,
                "e": 2**63,
            },
        ),
        0,
    )
    assert decoded.id == "abc"
    assert (decoded.sequence_id, decoded.sequence_start, decoded.sequence_end) == (2**64 - 1, True, True)
    assert (decoded.priority, decoded.timeout_us, decoded.all_binary) == (3, 5, True)
    assert decoded.parameters == {"a": "text", "b": False, "c": -(2**63), "d": 1.5, "e": float(2**63)}


@pytest.mark.parametrize("value", ["", "s" * 128, 0])
def test_sequence_ids(value: int | str) -> None:
    assert decode(request_of(parameters={"sequence_id": value}), 0).sequence_id == value


def test_a_sequence_id_that_is_too_long() -> None:
    with pytest.raises(Unsupported, match="cannot be longer than 128"):
        decode(request_of(parameters={"sequence_id": "ä" * 65}), 0)


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ({"n": None}, "parameter 'n' has invalid type"),
        ({"n": {}}, "parameter 'n' has invalid type"),
        ({"n": []}, "parameter 'n' has invalid type"),
        ({"triton_x": 1}, "parameter keys starting with 'triton_' are reserved"),
        ({"binary_data_output": 1}, "'binary_data_output': attempt to access JSON non-boolean as boolean"),
        ({"sequence_start": "true"}, "'sequence_start': attempt to access JSON non-boolean as boolean"),
        ({"sequence_end": 0}, "'sequence_end': attempt to access JSON non-boolean as boolean"),
        ({"sequence_id": -1}, "'sequence_id': attempt to access JSON non-string as string"),
        ({"sequence_id": 1.0}, "'sequence_id': attempt to access JSON non-string as string"),
        ({"sequence_id": 2**64}, "'sequence_id': attempt to access JSON non-string as string"),
        ({"priority": -1}, "'priority': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"priority": True}, "'priority': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"timeout": "5"}, "'timeout': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"n": 10**400}, "out of the range"),
    ],
)
def test_parameters_that_are_refused(parameters: dict[str, Any], found: str) -> None:
    with pytest.raises(InvalidArgument, match=found):
        decode(request_of(parameters=parameters), 0)


# ------------------------------------------------------------------------------------------------------------- outputs


def test_requested_outputs() -> None:
    decoded = decode(
        request_of(
            outputs=[
                {"name": "a"},
                {"name": "b", "parameters": {"binary_data": True, "other": {}}},
                {"name": "c", "parameters": {"binary_data": False, "classification": 3}},
                {"name": "d", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 8}},
                # The first of two entries holds.
                {"name": "a", "parameters": {"binary_data": True, "classification": 2}},
            ]
        ),
        0,
    )
    assert decoded.outputs == (
        RequestedOutput("a"),
        RequestedOutput("b"),
        RequestedOutput("c", None, 3),
        RequestedOutput("d", RegionSlice("r", 0, 8)),
    )
    assert decoded.binary == {"b": True, "c": False}


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ({"binary_data": 1}, "'binary_data': attempt to access JSON non-boolean as boolean"),
        (
            {"classification": -1},
            "Unable to set 'classification': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        ({"binary_data": True, "shared_memory_region": "r"}, "can't set both 'shared_memory_region' and 'binary_data'"),
        (
            {"classification": 1, "shared_memory_region": "r"},
            "can't set both 'shared_memory_region' and 'classification'",
        ),
    ],
)
def test_outputs_that_are_refused(parameters: dict[str, Any], found: str) -> None:
    with pytest.raises(InvalidArgument, match=found):
        decode(request_of(outputs=[{"name": "y", "parameters": parameters}]), 0)


# ---------------------------------------------------------------------------------------------------------- properties


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
odd_inputs = st.fixed_dictionaries(
    {
        "name": st.text(max_size=3) | json_values,
        "datatype": st.sampled_from([*DTYPES, "fp32"]) | json_values,
        "shape": st.lists(st.integers(-1, 3) | st.integers(), max_size=3) | json_values,
    },
    optional={
        "data": st.lists(st.integers(-300, 300) | st.floats() | st.text(max_size=3), max_size=4) | json_values,
        "parameters": st.dictionaries(
            st.sampled_from(["binary_data_size", "shared_memory_region", "shared_memory_offset"]), json_values
        )
        | json_values,
    },
)
odd_requests = st.fixed_dictionaries(
    {"inputs": st.lists(odd_inputs, max_size=3) | json_values},
    optional={
        "id": st.text() | json_values,
        "outputs": st.lists(
            st.fixed_dictionaries({"name": st.text() | json_values}, optional={"parameters": json_values})
        ),
        "parameters": st.dictionaries(
            st.sampled_from(["sequence_id", "priority", "timeout", "binary_data_output", "a"]), json_values
        ),
    },
)


def only_refuses(head: bytes, tail_size: int) -> None:
    """Whatever the text, it is a request that can travel, or one error of the family."""
    try:
        decoded = decode(head, tail_size)
    except ServingError as error:
        msgspec.json.encode(error.message)
        return
    inputs = tuple(Tensor(name, datatype, shape, RegionSlice("r", 0, 0)) for name, datatype, shape, _ in decoded.inputs)
    encoder.encode(
        Submit(
            1,
            "m",
            0,
            inputs,
            decoded.outputs,
            decoded.parameters,
            decoded.id,
            priority=decoded.priority,
            timeout_us=decoded.timeout_us,
            sequence_id=decoded.sequence_id,
        )
    )


@given(st.binary(), st.integers(0, 100))
def test_any_bytes(head: bytes, tail_size: int) -> None:
    only_refuses(head, tail_size)


@given(json_values)
def test_any_json(value: Any) -> None:
    only_refuses(json.dumps(value).encode(), 0)


@given(odd_requests, st.integers(0, 20), st.booleans())
@example({"inputs": [], "id": "\ud800", "x": math.nan}, 0, True)
@example({"inputs": [{"name": "x", "datatype": "FP32", "shape": [0, 2**80], "data": []}]}, 0, True)
def test_anything_like_a_request(request: dict[str, Any], tail_size: int, ascii_only: bool) -> None:
    only_refuses(json.dumps(request, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"), tail_size)


@given(odd_requests, st.data())
def test_a_request_with_one_byte_changed(request: dict[str, Any], draw: st.DataObject) -> None:
    head = bytearray(json.dumps(request).encode())
    head[draw.draw(st.integers(0, len(head) - 1))] = draw.draw(st.integers(0, 255))
    only_refuses(bytes(head), 0)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, tuple[int, ...], np.ndarray[Any, Any]]:
    """A datatype, a shape, and values that JSON can carry."""
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


def test_bf16_parts_are_two_bytes_an_element() -> None:
    values = np.array([1.5, -2], ml_dtypes.bfloat16)
    decoded = decode(request_of(tensor(datatype="BF16", shape=(2,), parameters={"binary_data_size": values.nbytes})), 4)
    assert decoded.inputs == [("x", "BF16", (2,), Part(0, 4))]


def test_recognised_heads_are_decoded_as_the_first_time() -> None:
    recognised = Recognised()
    heads = [request_of(tensor(f"x{number}", parameters={"binary_data_size": 4})) for number in range(2000)]
    for head in (heads[0], heads[0], *heads, heads[0]):
        assert recognised.decode(memoryview(head), 4, "m") == decode(head, 4)
        with pytest.raises(InvalidArgument, match="expecting 1 additional bytes"):
            recognised.decode(head, 3, "m")
    assert len(recognised._decoded) <= Recognised.MAX_COUNT
