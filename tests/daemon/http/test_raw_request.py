"""Raw requests: a body and a model's own shape come to one tensor, or to Triton's sentence."""

from __future__ import annotations

import json

import pytest

from tensord.daemon.http.decoded_request import BinaryPart, DecodedRequest
from tensord.daemon.http.request_codec import decode_raw
from tensord.shm.control_records import ModelState
from tensord.shm.errors import InvalidArgument

LABEL = r"\[request id: <id_unknown>\] "


def raw(
    body: bytes, shape: list[int], datatype: str = "FP32", max_batch_size: int = 0, inputs: int = 1
) -> DecodedRequest:
    metadata = json.dumps({"inputs": [{"name": "x", "datatype": datatype, "shape": shape}] * inputs}).encode()
    config = json.dumps({"max_batch_size": max_batch_size}).encode()
    return decode_raw(ModelState("m", 1, "READY", metadata=metadata, config=config), body)


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
def test_fixed_size_datatypes(byte_size: int, shape: list[int], max_batch_size: int, told: tuple[int, ...]) -> None:
    decoded = raw(bytes(byte_size), shape, max_batch_size=max_batch_size)
    assert decoded.inputs == [("x", "FP32", told, BinaryPart(0, byte_size))]
    assert decoded.all_binary


@pytest.mark.parametrize(("shape", "max_batch_size"), [([1], 0), ([1, 1], 0), ([-1, 1], 4), ([-1], 4)])
def test_a_body_is_the_one_element(shape: list[int], max_batch_size: int) -> None:
    told = tuple(abs(dim) for dim in shape)
    decoded = raw(b"any text", shape, "BYTES", max_batch_size)
    assert decoded.inputs == [("x", "BYTES", told, b"\x08\0\0\0any text")]
    assert raw(b"", [1], "BYTES").inputs[0][3] == bytes(4)


@pytest.mark.parametrize(
    ("body", "shape", "datatype", "inputs", "text"),
    [
        (3, [4], "FP32", 1, LABEL + "input byte size mismatch for input 'raw_input' for model 'm'. Expected 16, got 3"),
        (3, [-1], "FP32", 1, LABEL + "input byte size mismatch for input 'raw_input' for model 'm'. Expected 0, got 3"),
        (9, [2, -1], "FP32", 1, "Expected 8, got 9"),
        (12, [0, -1], "FP32", 1, "Expected 0, got 12"),
        (16, [-1, -1], "FP32", 1, "raw input 'x' can not be deduced because there are more than one variable-sized"),
        (16, [-1, -1], "BYTES", 1, "more than one variable-sized dimension"),
        (16, [2], "BYTES", 1, LABEL + r"For BYTE datatype raw input 'x', the model must have input shape \[1\]"),
        (16, [-1], "BYTES", 1, "must have input shape"),
        (16, [4], "FP32", 2, r"must only have 1 input \(found 1\) to be deduced but got 2 inputs in 'm' model conf"),
    ],
)
def test_refused(body: int, shape: list[int], datatype: str, inputs: int, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        raw(bytes(body), shape, datatype, inputs=inputs)
