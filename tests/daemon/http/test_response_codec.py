"""Answers as bytes: rows of tensors and JSON, binary parts, heads, errors; and that numbers survive the way and back."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.front.status import http_status
from tensord.daemon.http.decoded_request import DecodedRequest
from tensord.daemon.http.request_codec import decode
from tensord.daemon.http.response_codec import CLOSE, encode, error_response, response_head
from tensord.shm.arrays import DTYPES, array, byte_content
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import RegionSlice, Slice
from tests.records import Tensor, WholeAnswer


def no_view(place: Slice) -> memoryview:
    raise AssertionError(f"{place} is not expected")


def output(datatype: str, values: list[Any], name: str = "y", shape: tuple[int, ...] | None = None) -> Tensor:
    elements = np.empty(len(values), DTYPES[datatype])
    elements[:] = values
    content = byte_content(elements) if datatype == "BYTES" else elements.tobytes()
    return Tensor(name, datatype, (len(values),) if shape is None else shape, content)


def answer_of(*outputs: Tensor, **fields: Any) -> WholeAnswer:
    return WholeAnswer(1, version=3, outputs=outputs, **fields)


def encoded(
    answer: WholeAnswer, model: str, client_id: str, binary: dict[str, bool], all_binary: bool, view: Any
) -> tuple[bytes, list[Any]]:
    asked = DecodedRequest("", [], (), binary, all_binary, {})
    return encode(answer.prepared, answer.contents, model, client_id, asked, view)


def json_of(*outputs: Tensor, **fields: Any) -> bytes:
    head, parts = encoded(answer_of(*outputs, **fields), "m", "", {}, False, no_view)
    assert not parts
    return head


@pytest.mark.parametrize(
    ("tensor", "entry"),
    [
        (output("BOOL", [True, False]), b'"BOOL","shape":[2],"data":[true,false]'),
        (output("INT8", [-128]), b'"INT8","shape":[1],"data":[-128]'),
        (output("UINT64", [2**64 - 1]), b'"UINT64","shape":[1],"data":[18446744073709551615]'),
        (output("INT64", [-(2**63)]), b'"INT64","shape":[1],"data":[-9223372036854775808]'),
        (output("FP32", [3.0, 0.1]), b'"FP32","shape":[2],"data":[3.0,0.1]'),
        (output("FP64", [0.1]), b'"FP64","shape":[1],"data":[0.1]'),
        (output("FP32", [math.nan, math.inf, -math.inf]), b'"FP32","shape":[3],"data":[NaN,Infinity,-Infinity]'),
        (output("INT32", [1, 2, 3, 4], shape=(2, 2)), b'"INT32","shape":[2,2],"data":[1,2,3,4]'),
        (output("FP32", [], shape=(0, 2)), b'"FP32","shape":[0,2],"data":[]'),
        (output("UINT8", [7], shape=()), b'"UINT8","shape":[],"data":[7]'),
        (output("BYTES", [b'a"/', "ä".encode(), b"\x1f\n"]), '"BYTES","shape":[3],"data":["a\\"/","ä","\\u001f\\n"]'.encode()),
        (output("BYTES", [b"a"], shape=(1, 1)), b'"BYTES","shape":[1,1],"data":["a"]'),
    ],
)  # fmt: skip
def test_json_answers(tensor: Tensor, entry: bytes) -> None:
    expected = b'{"model_name":"m","model_version":"3","outputs":[{"name":"y","datatype":' + entry + b"}]}"
    assert json_of(tensor) == expected


def test_the_order_of_keys_and_the_id() -> None:
    completion = answer_of(output("UINT8", [1]), parameters={"a": 1, "b": "x"})
    head, _ = encoded(completion, "m", "my id", {}, False, no_view)
    assert head == (
        b'{"id":"my id","model_name":"m","model_version":"3","parameters":{"a":1,"b":"x"},'
        b'"outputs":[{"name":"y","datatype":"UINT8","shape":[1],"data":[1]}]}'
    )


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_only_in_binary(datatype: str) -> None:
    for values in ([1.0], []):
        with pytest.raises(
            InvalidArgument,
            match=f"sending {datatype} data via JSON is not supported. Please use the binary data format for output",
        ):
            json_of(output(datatype, values))
    _, parts = encoded(answer_of(output(datatype, [1.0])), "m", "", {"y": True}, False, no_view)
    assert [len(part) for part in parts] == [2]


def test_bytes_that_are_no_text_only_in_binary() -> None:
    with pytest.raises(InvalidArgument, match="Please use the binary data format for output"):
        json_of(output("BYTES", [b"\xff"]))


def test_parts_in_the_order_of_outputs() -> None:
    content = memoryview(b"0123456789")
    outputs = (
        Tensor("a", "UINT8", (2,), Slice(0, 4, 2)),
        Tensor("b", "UINT8", (1,), b"\x05"),
        Tensor("c", "UINT8", (4,), RegionSlice("r", 0, 4)),
        Tensor("d", "UINT8", (3,), Slice(0, 7, 3)),
    )
    head, parts = encoded(
        answer_of(*outputs),
        "m",
        "",
        {"b": False},
        True,
        lambda place: content[place.offset : place.offset + place.byte_size],
    )
    assert [bytes(part) for part in parts] == [b"45", b"789"]
    assert json.loads(head)["outputs"] == [
        {"name": "a", "datatype": "UINT8", "shape": [2], "parameters": {"binary_data_size": 2}},
        {"name": "b", "datatype": "UINT8", "shape": [1], "data": [5]},
        {"name": "c", "datatype": "UINT8", "shape": [4]},
        {"name": "d", "datatype": "UINT8", "shape": [3], "parameters": {"binary_data_size": 3}},
    ]


def test_what_single_outputs_say_beats_the_whole() -> None:
    outputs = (output("UINT8", [1], "a"), output("UINT8", [2], "b"))
    assert len(encoded(answer_of(*outputs), "m", "", {"a": True}, False, no_view)[1]) == 1
    assert len(encoded(answer_of(*outputs), "m", "", {"a": False}, True, no_view)[1]) == 1


@pytest.mark.parametrize(
    ("parts", "keep_alive", "text"),
    [
        ([], True, "Content-Type: application/json\r\nContent-Length: 9"),
        ([b""], True, "Content-Type: application/json\r\nContent-Length: 9"),
        ([], False, "Content-Type: application/json\r\nConnection: close\r\nContent-Length: 9"),
        (
            [b"ab", memoryview(b"c")],
            True,
            "Content-Type: application/octet-stream\r\nInference-Header-Content-Length: 9\r\nContent-Length: 12",
        ),
        (
            [b"ab"],
            False,
            "Content-Type: application/octet-stream\r\nInference-Header-Content-Length: 9\r\n"
            "Connection: close\r\nContent-Length: 11",
        ),
    ],
)
def test_heads(parts: list[bytes | memoryview], keep_alive: bool, text: str) -> None:
    assert (
        response_head(9, sum(map(len, parts)), b"" if keep_alive else CLOSE)
        == f"HTTP/1.1 200 OK\r\n{text}\r\n\r\n".encode()
    )


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (400, "Bad Request"),
        (404, "Not Found"),
        (405, "Method Not Allowed"),
        (413, "Content Too Large"),
        (431, "Request Header Fields Too Large"),
        (500, "Internal Server Error"),
        (408, "Request Timeout"),
        (501, "Not Implemented"),
        (505, "HTTP Version Not Supported"),
    ],
)
def test_errors(status: int, reason: str) -> None:
    assert error_response(status, 'no "x"') == (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n".encode()
        + b'{"error":"no \\"x\\""}'
    )


def test_a_retry_is_offered_where_it_is_safe() -> None:
    text = error_response(503, "busy", CLOSE).decode()
    assert "\r\nRetry-After: 1\r\nConnection: close\r\n" in text
    assert error_response(http_status("UNAVAILABLE"), "busy", CLOSE).decode() == text


@given(
    st.sampled_from(["FP32", "FP64", "INT64", "UINT64", "INT8", "BOOL", "BYTES"]).flatmap(
        lambda datatype: st.tuples(
            st.just(datatype),
            st.lists(
                {
                    "FP32": st.floats(width=32),
                    "FP64": st.floats(),
                    "INT64": st.integers(-(2**63), 2**63 - 1),
                    "UINT64": st.integers(0, 2**64 - 1),
                    "INT8": st.integers(-128, 127),
                    "BOOL": st.booleans(),
                    "BYTES": st.text().map(lambda text: text.encode("utf-8", "replace")),
                }[datatype]
            ),
        )
    )
)
def test_an_answer_sent_back_as_a_request_has_the_same_values(given_values: tuple[str, list[Any]]) -> None:
    datatype, values = given_values
    sent = output(datatype, values)
    (entry,) = json.loads(json_of(sent))["outputs"]
    request = json.dumps({"inputs": [entry]}).encode()
    ((_, _, shape, source),) = decode(request, 0, "m").inputs
    assert isinstance(source, bytes)
    assert isinstance(sent.place, bytes)
    np.testing.assert_array_equal(array(source, datatype, shape), array(sent.place, datatype, sent.shape))
