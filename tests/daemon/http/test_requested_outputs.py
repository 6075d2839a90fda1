"""Outputs that are asked for: how, and into which region."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import RegionSlice, RequestedOutput
from tests.daemon.http.heads import decode, request_of, tensor


def test_requested_outputs() -> None:
    decoded = decode(
        request_of(
            outputs=[
                {"name": "a"},
                {"name": "b", "parameters": {"binary_data": True, "other": {}}},
                {"name": "c", "parameters": {"binary_data": False, "classification": 3}},
                {"name": "d", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 8}},
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
        (
            {"shared_memory_region": "r", "shared_memory_offset": 32, "shared_memory_byte_size": 2**64 - 32},
            "Integer overflow detected: byte_size .18446744073709551584. [+] offset .32. exceeds maximum value",
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
