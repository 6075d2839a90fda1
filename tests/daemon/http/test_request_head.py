"""Tests what is a request by its form, and the first mistake of one that is none."""

from __future__ import annotations

import json
import math
import struct

import pytest

from tensord.shm.errors import InvalidArgument
from tests.daemon.http.heads import content, decode, input_text, request_of, tensor

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
            for shape in ("[1.0]", '["1"]', "[true]", "[-2]", "[[1]]", "[null]")
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


@pytest.mark.parametrize("datatype", ["fp32", "TYPE_FP32", "string", "TYPE_STRING", "", "FP8"])
def test_datatypes_have_exact_names(datatype: str) -> None:
    with pytest.raises(InvalidArgument, match="invalid datatype for input x"):
        decode(input_text("[1]", datatype), 0)


@pytest.mark.parametrize("data", ['["a","b"]', '[["a"],["b"]]', '"AQAAAGEBAAAAYg=="'])
def test_string_is_another_name_of_bytes(data: str) -> None:
    decoded = decode(input_text(data, "STRING", "[2,1]"), 0)
    assert decoded.inputs[0][:3] == ("x", "BYTES", (2, 1))
    assert content(decoded) == b"\1\0\0\0a\1\0\0\0b"


@pytest.mark.parametrize("shape", [[2**63 - 1, 2], [2**32, 2**32], [0, 2**70], [1] * 33, [2**63]])
def test_shapes_that_overflow(shape: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="input 'x' shape"):
        decode(request_of(tensor(shape=tuple(shape), data=[])), 0)
