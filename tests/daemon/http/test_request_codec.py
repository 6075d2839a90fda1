"""The JSON head of a request: where its tensors are, and that nothing but a request or an error ever comes of it."""

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

from tensord.daemon.http.decoded_request import BinaryPart
from tensord.shm.arrays import DTYPES
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.messages import RegionSlice
from tensord.shm.record import encoder
from tests.daemon.http.heads import decode, request_of, tensor
from tests.records import Tensor, WholeRequest


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
        BinaryPart(0, 4),
        struct.pack("<f", 2.0),
        RegionSlice("r", 0, 4),
        BinaryPart(4, 0),
        BinaryPart(4, 8),
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
    """Checks that any text gives either a request that can be sent on a lane or a ServingError."""
    try:
        decoded = decode(head, tail_size)
    except ServingError as error:
        msgspec.json.encode(error.message)
        return
    inputs = tuple(Tensor(name, datatype, shape, RegionSlice("r", 0, 0)) for name, datatype, shape, _ in decoded.inputs)
    encoder.encode(
        WholeRequest(
            1, "m", 0, inputs, decoded.outputs, decoded.parameters, decoded.id, 0, 0, 0, *decoded.scheduling
        ).record
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


def test_bf16_parts_are_two_bytes_an_element() -> None:
    values = np.array([1.5, -2], ml_dtypes.bfloat16)
    decoded = decode(request_of(tensor(datatype="BF16", shape=(2,), parameters={"binary_data_size": values.nbytes})), 4)
    assert decoded.inputs == [("x", "BF16", (2,), BinaryPart(0, 4))]
