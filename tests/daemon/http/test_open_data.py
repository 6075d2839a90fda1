"""Counting values without reading them, and what the request's shape becomes by that."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.http import request_codec
from tensord.shm.errors import InvalidArgument
from tests.daemon.http.heads import content, decode, input_text

numbers = st.one_of(st.integers(-(2**40), 2**40), st.floats(allow_nan=False, allow_infinity=False))


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(leaves, max_size=6) | st.lists(st.lists(leaves, min_size=1, max_size=4), min_size=1, max_size=4)


@given(st.sampled_from(["FP32", "BYTES"]), st.data(), st.booleans())
def test_texts_and_values(datatype: str, data: st.DataObject, blanks: bool) -> None:
    value = data.draw(nested(st.text() if datatype == "BYTES" else numbers))
    expected = sum(len(item) if isinstance(item, list) else 1 for item in value)
    text = json.dumps(value, indent=1 if blanks else None, ensure_ascii=data.draw(st.booleans())).encode(
        "utf-8", "surrogatepass"
    )
    assert request_codec.count_in_text(text, datatype, "x") == expected
    assert request_codec.count_in_value(value, datatype, "x") == expected


def test_base64() -> None:
    text = base64.b64encode(bytes(12)).decode()
    assert (
        request_codec.count_in_value(text, "FP32", "x")
        == request_codec.count_in_text(f'"{text}"'.encode(), "FP32", "x")
        == 3
    )
    for wrong in ('"***"', '"abc', '"AAAA"'):
        with pytest.raises(InvalidArgument):
            request_codec.count_in_text(wrong.encode(), "FP32", "x")


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "found"),
    [
        ("FP32", [-1], [1, 2, 3], (3,)),
        ("FP32", [-1, 2], [1, 2, 3, 4], (2, 2)),
        ("FP32", [2, -1], [[1, 2], [3, 4]], (2, 2)),
        ("FP32", [-1], [], (0,)),
        ("FP32", [-1], "AAAAAAAAAAA=", (2,)),
        ("BYTES", [1, -1], ['a,"', "\\", '\\\\"'], (1, 3)),
        ("BYTES", [-1], ["x" * 20] * 4000, (4000,)),
        ("INT32", [-1, 4], list(range(20_000)), (5000, 4)),
        ("INT32", [-1, 4], [[n] * 4 for n in range(9_000)], (9000, 4)),
        ("BOOL", [-1], [True, False], (2,)),
    ],
)
def test_a_shape_is_what_its_data_make_it(datatype: str, shape: list[int], data: Any, found: tuple[int, ...]) -> None:
    for _ in range(2):
        decoded = decode(input_text(json.dumps(data), datatype, json.dumps(shape)), 0)
        assert decoded.inputs[0][2] == found
    closed = decode(input_text(json.dumps(data), datatype, json.dumps(found)), 0)
    assert type(closed.inputs[0][3]) is type(decoded.inputs[0][3])
    if isinstance(decoded.inputs[0][3], bytes):
        assert content(decoded) == content(closed)


@pytest.mark.parametrize(
    ("shape", "data", "said"),
    [
        ("[-1,-1]", "[1,2]", "has 2 dimensions of -1"),
        ("[-1,3]", "[1,2]", r"input 'x' shape \[-1,3\] cannot have the 2 elements"),
        ("[-1,0]", "[]", "cannot have the 0 elements"),
        ("[-1]", '{"a":1}', "attempt to access JSON non-array as array"),
        ("[-1,2]", "[[1],[2],[3],[4]]", "nested, but not as its shape"),
        ("[-1,2]", "[[1,2],[3]]", "input 'x' shape"),
        ("[-1]", "[1,]", "failed to parse"),
        ("[-2]", "[1]", "Unable to parse 'shape'"),
        ("[-1]", f"[{'1,' * (1 << 19)}1]", "found from at most 1048576 bytes of JSON, 1048579 are given"),
    ],
)
def test_what_is_refused(shape: str, data: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        decode(input_text(data, "FP32", shape), 0)
