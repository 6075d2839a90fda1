"""Tests what a response says of itself to a model; what clients get of it is in tests/protocol/test_response_parameters."""

from __future__ import annotations

import json

import pytest

from tensord.workers.python_backend.interface import InferenceResponse, TritonModelException
from tensord.workers.python_backend.response import parameters_of


def test_parameters() -> None:
    assert InferenceResponse().parameters() == "{}"
    given = {"a": 1, "b": True, "c": "ä"}
    response = InferenceResponse([], parameters=given)
    given["d"] = 2
    assert json.loads(response.parameters()) == {"a": 1, "b": True, "c": "ä"}
    assert parameters_of(response) == {"a": 1, "b": True, "c": "ä"}
    with pytest.raises(TritonModelException, match="values to have type bool/int/str, found type <class 'bytes'>"):
        InferenceResponse(parameters={"a": b""})  # type: ignore[dict-item]
