"""Tests that requests of the stock clients fit the published schemas, as far as the schemas fit the clients."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests import kserve_package
from tests.conformance import published
from tests.protocol.tensors import TENSORS

pytestmark = pytest.mark.skipif(not published.validators(), reason="no schemas: ../shared/seeds is absent")

REQUESTS = (published.TRITON_REQUEST, published.KSERVE_REQUEST)


def triton_request(inputs: list[httpclient.InferInput], **options: Any) -> dict[str, Any]:
    """Returns the JSON part of a request that tritonclient sends."""
    body, size = httpclient.InferenceServerClient.generate_request_body(inputs, **options)
    document: dict[str, Any] = json.loads(body if size is None else body[:size])
    return document


def binary_input(datatype: str = "FP32") -> httpclient.InferInput:
    made = httpclient.InferInput("x", [len(TENSORS[datatype])], datatype)
    made.set_data_from_numpy(TENSORS[datatype])
    return made


def json_input() -> httpclient.InferInput:
    made = httpclient.InferInput("x", [1, 2], "FP64")
    made.set_data_from_numpy(np.array([[1.0, 2.5]]), binary_data=False)
    return made


def region_input() -> httpclient.InferInput:
    made = httpclient.InferInput("x", [4], "FP32")
    made.set_shared_memory("region", 16, 64)
    return made


def region_output() -> httpclient.InferRequestedOutput:
    made = httpclient.InferRequestedOutput("y")
    made.set_shared_memory("region", 16)
    return made


@pytest.mark.parametrize("schema", REQUESTS)
@pytest.mark.parametrize(
    "document",
    [
        pytest.param(lambda: triton_request([json_input()]), id="json"),
        *[pytest.param(lambda name=name: triton_request([binary_input(name)]), id=name) for name in sorted(TENSORS)],
        pytest.param(lambda: triton_request([region_input()], outputs=[region_output()]), id="regions"),
        pytest.param(
            lambda: triton_request([json_input()], outputs=[httpclient.InferRequestedOutput("y", class_count=3)]),
            id="classification",
        ),
        pytest.param(
            lambda: triton_request(
                [json_input()],
                request_id="a",
                sequence_id=7,
                sequence_start=True,
                priority=1,
                timeout=1000,
                parameters={"text": "t", "number": 3, "flag": True},
            ),
            id="parameters",
        ),
        pytest.param(
            lambda: kserve_package.InferRequest(
                "m", [kserve_package.InferInput("x", [2], "INT32", data=[1, 2])], parameters={"k": "v"}
            ).to_rest()[0],
            id="kserve",
        ),
    ],
)
def test_stock_clients_requests_fit(schema: str, document: Any) -> None:
    assert published.violations(schema, document()) == set()


def test_base64_data_is_kserves() -> None:
    request = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP16", "data": "AAA="}]}
    assert published.violations(published.KSERVE_REQUEST, request) == set()


def test_what_fits_neither_is_noticed() -> None:
    for schema in REQUESTS:
        request = {"inputs": [{"name": 5, "shape": [1], "datatype": "FP31", "data": [1]}]}
        assert published.violations(schema, request) == {"inputs/*/name: type", "inputs/*/datatype: enum: FP31"}
