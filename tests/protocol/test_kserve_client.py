"""KServe's own clients, as they are: every call of it that exists in version 2 of the protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest

from tests import kserve_package
from tests.daemon_process import DaemonProcess
from tests.protocol.tensors import JSON_DATATYPES, TENSORS, same

#: The client knows no BF16.
DATATYPES = sorted(set(TENSORS) - {"BF16"})


@pytest.fixture
async def client() -> AsyncIterator[kserve_package.InferenceRESTClient]:
    async with kserve_package.InferenceRESTClient(kserve_package.RESTConfig(protocol="v2")) as client:
        yield client


def request_of(
    datatype: str, binary: bool, outputs: list[kserve_package.RequestedOutput] | None = None
) -> kserve_package.InferRequest:
    values = TENSORS[datatype]
    tensor = kserve_package.InferInput("x", list(values.shape), datatype)
    tensor.set_data_from_numpy(values, binary_data=binary)
    return kserve_package.InferRequest(f"echo_{datatype.lower()}", [tensor], request_id="k", request_outputs=outputs)


async def test_health(daemon: DaemonProcess, client: kserve_package.InferenceRESTClient) -> None:
    url = f"http://{daemon.url}"
    assert await client.is_server_live(url) is True
    assert await client.is_server_ready(url) is True
    assert await client.is_model_ready(url, "scale") is True
    assert await client.is_model_ready(url, "nothing") is False


@pytest.mark.parametrize("datatype", sorted(set(JSON_DATATYPES) & set(DATATYPES)))
async def test_json(daemon: DaemonProcess, client: kserve_package.InferenceRESTClient, datatype: str) -> None:
    request = request_of(datatype, binary=False)
    answer = await client.infer(f"http://{daemon.url}", request, model_name=request.model_name)
    assert isinstance(answer, kserve_package.InferResponse)
    assert (answer.id, answer.model_name) == ("k", request.model_name)
    got, sent = answer.outputs[0].as_numpy(), TENSORS[datatype]
    assert same(got, sent) or got.tolist() == [element.decode() for element in sent]


@pytest.mark.parametrize("datatype", DATATYPES)
async def test_binary_both_ways(
    daemon: DaemonProcess, client: kserve_package.InferenceRESTClient, datatype: str
) -> None:
    request = request_of(datatype, binary=True, outputs=[kserve_package.RequestedOutput("y", {"binary_data": True})])
    answer = await client.infer(f"http://{daemon.url}", request, model_name=request.model_name)
    got, sent = answer.outputs[0].as_numpy(), TENSORS[datatype]
    assert same(got, sent) or got.tolist() == [element.decode() for element in sent]


async def test_a_plain_dictionary_and_the_headers(
    daemon: DaemonProcess, client: kserve_package.InferenceRESTClient
) -> None:
    request = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [[1, 2, 3, 4]]}]}
    headers: dict[str, str] = {}
    answer = await client.infer(f"http://{daemon.url}", request, model_name="scale", response_headers=headers)
    assert np.array_equal(answer.outputs[0].as_numpy(), [[4, 7, 10, 13]])
    assert headers["content-type"] == "application/json"


async def test_errors_carry_our_text(daemon: DaemonProcess, client: kserve_package.InferenceRESTClient) -> None:
    request = request_of("FP32", binary=False)
    with pytest.raises(httpx.HTTPStatusError, match="unknown model: 'nothing'") as caught:
        await client.infer(f"http://{daemon.url}", request, model_name="nothing")
    assert caught.value.response.status_code == 404
    with pytest.raises(httpx.HTTPStatusError, match="400") as caught:
        await client.infer(f"http://{daemon.url}", request, model_name="echo_fp64")
    assert caught.value.response.status_code == 400


async def test_the_grpc_client(daemon: DaemonProcess) -> None:
    async with kserve_package.InferenceGRPCClient(daemon.grpc_url) as client:
        assert await client.is_server_ready() is True
        assert await client.is_model_ready("scale") is True
        tensor = kserve_package.InferInput("x", [1, 4], "FP32")
        tensor.set_data_from_numpy(np.full((1, 4), 2, np.float32))
        answer = await client.infer(kserve_package.InferRequest("scale", [tensor]))
        assert answer.outputs[0].as_numpy().tolist() == [[7.0] * 4]
