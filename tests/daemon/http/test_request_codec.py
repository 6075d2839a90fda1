"""The JSON head of a request: rows of text and value, what is refused with which sentence, and that nothing else ever happens."""

from __future__ import annotations

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

from daemon.http.request_codec import DecodedRequest, Part, Recognised, decode, decode_raw
from shm.arrays import DTYPES, array
from shm.errors import InvalidArgument, ServingError, Unsupported
from shm.messages import RegionSlice, RequestedOutput, Submit, Tensor, encoder

LENGTH = struct.Struct("<I")


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
    for value in (limits.min - 1, limits.max + 1, 10**30):
        with pytest.raises(InvalidArgument, match=f"a value of input 'x' is out of the range of {datatype}"):
            decode(input_text(f"[{value}]", datatype), 0)


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("INT32", "[1.5]"),
        ("INT32", "[1e2]"),
        ("INT32", '["1"]'),
        ("INT32", "[true]"),
        ("INT32", "[null]"),
        ("INT32", "[NaN]"),
        ("INT32", "[1" + "0" * 5000 + "]"),
        ("FP32", '["1"]'),
        ("FP32", "[NaN,true]"),
        ("FP32", '[[NaN],["1"]]'),
        ("FP64", "[1e999]"),
        ("FP64", "[1" + "0" * 400 + "]"),
        ("BOOL", "[1]"),
        ("BOOL", '["true"]'),
        ("BYTES", "[1]"),
        ("BYTES", "[NaN]"),
        ("FP32", "1"),
        ("FP32", "null"),
        ("FP32", '"["'),
        ("FP32", "{}"),
        ("FP32", "[[1],2]"),
        ("FP32", "[1,[2]]"),
        ("FP32", "[" * 70 + "1" + "]" * 70),
    ],
)
def test_data_of_another_kind(datatype: str, data: str) -> None:
    with pytest.raises(InvalidArgument, match="Unable to parse 'data'"):
        decode(input_text(data, datatype), 0)


@pytest.mark.parametrize("data", ["[]", "[1,2]", "[[1],[2]]"])
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


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"{}",
        b"\xfe\xff",
        b'{"inputs":null}',
        b'{"inputs":{}}',
        b'{"inputs":5,"x":NaN}',
        b'{"inputs":[5],"x":NaN}',
        b'{"inputs":[{"name":"x"}]}',
        b'{"inputs":[],"id":7}',
        b'{"inputs":[],"id":"\xff"}',
        b'{"inputs":[],"id":"\\ud800"}',
        b'{"inputs":[],"id":"\\ud800","x":NaN}',
        b'{"inputs":[],"parameters":[]}',
        b'{"inputs":[],"outputs":{}}',
        b'{"inputs":[],"id":"NaN"',
        b'{"inputs":[{"name":1,"datatype":"FP32","shape":[1],"data":[1]}]}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1.0],"data":[1]}]}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":["1"],"data":[1]}]}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[true],"data":[1]}]}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":1,"data":[1]}]}',
        b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[2],"data":["\\ud800", NaN]}]}',
        b'{"inputs":' + b"[" * 100_000,
    ],
)
def test_what_is_not_a_request(head: bytes) -> None:
    with pytest.raises(InvalidArgument, match="failed to parse the request JSON"):
        decode(head, 0)


def test_raw_bytes_that_are_not_text_in_data() -> None:
    with pytest.raises(InvalidArgument, match="Unable to parse 'data'"):
        decode(b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"data":["\xff"]}]}', 0)


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


@pytest.mark.parametrize("shape", [[-1], [2**63 - 1, 2], [2**32, 2**32], [0, 2**70], [1] * 33, [2**63]])
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
    with pytest.raises(InvalidArgument, match="unexpected size for input 'x', expecting 12 additional bytes"):
        decode(head, 4)
    with pytest.raises(InvalidArgument, match=r"unexpected additional input data: 17 bytes .* take 16"):
        decode(head, 17)


@pytest.mark.parametrize("size", [-1, True, "4", 4.0, None, 2**63, [4]])
def test_sizes_that_are_none(size: object) -> None:
    with pytest.raises(InvalidArgument, match="'binary_data_size' should be an unsigned integer"):
        decode(request_of(tensor(parameters={"binary_data_size": size})), 4)


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ({"shared_memory_region": 1}, "'shared_memory_region' should be a string"),
        ({"shared_memory_region": "r", "shared_memory_offset": "0"}, "should be unsigned integers"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": True}, "should be unsigned integers"),
        (
            {"shared_memory_region": "r", "shared_memory_byte_size": -1},
            "Invalid offset [+] byte size for shared memory region: 'r'",
        ),
        (
            {"shared_memory_region": "r", "shared_memory_offset": 2**64 - 4, "shared_memory_byte_size": 8},
            "Invalid offset [+] byte size for shared memory region: 'r'",
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
        ({"binary_data_output": 1}, "parameter 'binary_data_output' has invalid type"),
        ({"sequence_start": "true"}, "parameter 'sequence_start' has invalid type"),
        ({"sequence_end": 0}, "parameter 'sequence_end' has invalid type"),
        ({"sequence_id": -1}, "'sequence_id' should be an unsigned integer or a string"),
        ({"sequence_id": 1.0}, "'sequence_id' should be an unsigned integer or a string"),
        ({"sequence_id": 2**64}, "'sequence_id' should be an unsigned integer or a string"),
        ({"priority": -1}, "'priority' should be an unsigned integer"),
        ({"priority": True}, "'priority' should be an unsigned integer"),
        ({"timeout": "5"}, "'timeout' should be an unsigned integer"),
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
                {"name": "a"},
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
        ({"binary_data": 1}, "'binary_data' has invalid type"),
        ({"classification": -1}, "'classification' should be an unsigned integer"),
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


# ----------------------------------------------------------------------------------------------------------------- raw


def raw(
    byte_size: int, shape: list[int], datatype: str = "FP32", max_batch_size: int = 0, inputs: int = 1
) -> DecodedRequest:
    metadata = json.dumps({"inputs": [{"name": "x", "datatype": datatype, "shape": shape}] * inputs}).encode()
    return decode_raw(metadata, json.dumps({"max_batch_size": max_batch_size}).encode(), byte_size)


@pytest.mark.parametrize(
    ("byte_size", "shape", "max_batch_size", "told"),
    [
        (16, [4], 0, (4,)),
        (16, [-1], 0, (4,)),
        (24, [2, -1], 0, (2, 3)),
        (16, [-1, 4], 8, (1, 4)),
        (16, [-1, -1], 8, (1, 4)),
        (0, [-1], 0, (0,)),
        (4, [], 0, ()),
    ],
)
def test_a_raw_request(byte_size: int, shape: list[int], max_batch_size: int, told: tuple[int, ...]) -> None:
    decoded = raw(byte_size, shape, max_batch_size=max_batch_size)
    assert decoded.inputs == [("x", "FP32", told, Part(0, byte_size))]
    assert decoded.all_binary


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((3, [4]), "input byte size mismatch for input 'x'"),
        ((3, [-1]), "input byte size mismatch for input 'x'"),
        ((12, [0, -1]), "input byte size mismatch for input 'x'"),
        ((16, [-1, -1]), "cannot tell the shape"),
        ((16, [4], "BYTES"), "cannot tell the shape"),
        ((16, [4], "FP32", 0, 2), "exactly one input, this one has 2"),
    ],
)
def test_raw_requests_that_are_refused(arguments: tuple[Any, ...], found: str) -> None:
    with pytest.raises(InvalidArgument, match=found):
        raw(*arguments)


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
        assert recognised.decode(memoryview(head), 4) == decode(head, 4)
        with pytest.raises(InvalidArgument, match="expecting 1 additional bytes"):
            recognised.decode(head, 3)
    assert len(recognised._decoded) <= Recognised.MAX_COUNT
