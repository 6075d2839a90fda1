"""Every public call of the stock HTTP clients, synchronous and asyncio, with every option of an inference."""

from __future__ import annotations

import asyncio
import copy
import json
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
import tritonclient.http.aio as aioclient
from tritonclient.utils import InferenceServerException, shared_memory

from tests import repositories
from tests.daemon_process import DaemonOf, DaemonProcess
from tests.protocol.test_http_client import tensor

X = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
Y = 3 * X + 1


SCALE_BY_TWO = repositories.of_x("2 * x", more="max_batch_size = 8")


class Caller:
    """Calls the synchronous or the asyncio client in one way, and notes which methods were called."""

    def __init__(self, client: Any, runner: asyncio.Runner | None) -> None:
        self._client = client
        self._runner = runner
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)

        def run(*arguments: Any, **options: Any) -> Any:
            self.called.add(name)
            if self._runner is None:
                return call(*arguments, **options)

            async def wait() -> Any:
                return await call(*arguments, **options)

            return self._runner.run(wait())

        return run

    @property
    def calls(self) -> set[str]:
        """Returns the names of all public methods of the client."""
        return {
            name for name in dir(self._client) if not name.startswith("_") and callable(getattr(self._client, name))
        }


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    """Runs a daemon in explicit mode, with one model to load and unload."""
    repository = tmp_path_factory.mktemp("repository")
    repositories.scale_model(repository)
    repositories.scale_model(repository, "other")
    options = {"repository": {"control_mode": "explicit", "load": ["scale"]}}
    return daemon_of(repository, options)


@pytest.fixture(params=["sync", "aio"])
def client(request: pytest.FixtureRequest, daemon: DaemonProcess) -> Iterator[Caller]:
    if request.param == "sync":
        with httpclient.InferenceServerClient(daemon.url) as stock:
            yield Caller(stock, None)
        return

    async def create() -> Any:
        return aioclient.InferenceServerClient(daemon.url)

    with asyncio.Runner() as runner:
        stock = runner.run(create())
        yield Caller(stock, runner)
        runner.run(stock.close())


def test_every_call(client: Caller) -> None:
    assert client.is_server_live() is True
    assert client.is_server_ready() is True
    assert client.is_model_ready("scale") is True
    assert client.is_model_ready("scale", "1", headers={"x-any": "thing"}, query_params={"a": 1}) is True
    assert client.get_server_metadata()["name"] == "tensord"
    assert client.get_model_metadata("scale", "1")["versions"] == ["1"]
    assert client.get_model_config("scale", "1")["max_batch_size"] == 8
    assert {model["name"] for model in client.get_model_repository_index()} == {"scale", "other"}
    assert client.infer("scale", [tensor("x", "FP32", X)]).as_numpy("y").tolist() == Y.tolist()
    for which in ((), ("scale",), ("scale", "1")):
        counts = {m["name"]: m["inference_count"] for m in client.get_inference_statistics(*which)["model_stats"]}
        assert counts["scale"] >= 1

    client.load_model("other")
    assert client.infer("other", [tensor("x", "FP32", X)]).as_numpy("y").tolist() == Y.tolist()
    client.load_model("other", config=json.dumps({"backend": "jax", "max_batch_size": 4}))
    assert client.get_model_config("other")["max_batch_size"] == 4
    client.load_model("other", config=json.dumps({"backend": "jax"}), files={"file:1/model.py": SCALE_BY_TWO.encode()})
    assert client.infer("other", [tensor("x", "FP32", X)]).as_numpy("y").tolist() == (2 * X).tolist()
    client.unload_model("other")
    assert client.is_model_ready("other") is False
    client.unload_model("other", unload_dependents=True)

    key = f"/tensord-test-{uuid.uuid4().hex}"
    region = shared_memory.create_shared_memory_region("calls", key, 4096)
    try:
        client.register_system_shared_memory("calls", key, 4096)
        (status,) = client.get_system_shared_memory_status("calls")
        assert (status["key"], status["byte_size"]) == (key, 4096)
        client.unregister_system_shared_memory("calls")
        client.unregister_system_shared_memory()
        assert client.get_system_shared_memory_status() == []
    finally:
        shared_memory.destroy_shared_memory_region(region)
    with pytest.raises(InferenceServerException):
        client.register_cuda_shared_memory("calls", b"A" * 64, 0, 64)
    client.unregister_cuda_shared_memory("calls")
    client.unregister_cuda_shared_memory()
    assert client.get_cuda_shared_memory_status() == []

    level = client.get_log_settings()["log_verbose_level"]
    assert client.update_log_settings({"log_verbose_level": level})["log_verbose_level"] == level
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.update_trace_settings("scale", {"trace_rate": "500"})["trace_rate"] == "500"
    assert client.update_trace_settings("scale", {"trace_rate": None})["trace_rate"] == "1000"

    # What is left happens in the client alone, or is another way of calling infer, below.
    local = {"close", "generate_request_body", "parse_response_body", "plugin", "register_plugin", "unregister_plugin"}
    assert client.calls - client.called - local <= {"async_infer"}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"request_id": "named"}, id="request_id"),
        pytest.param({"model_version": "1"}, id="model_version"),
        pytest.param({"priority": 3}, id="priority"),
        pytest.param({"timeout": 5_000_000}, id="timeout"),
        pytest.param({"sequence_id": 5, "sequence_start": True, "sequence_end": True}, id="sequence"),
        pytest.param({"parameters": {"text": "t", "number": 4, "flag": False}}, id="parameters"),
        pytest.param({"headers": {"X-Any": "thing"}}, id="headers"),
        pytest.param({"query_params": {"q": ["a", "b"]}}, id="query_params"),
        *[
            pytest.param(
                {"request_compression_algorithm": way, "response_compression_algorithm": back}, id=f"{way}-{back}"
            )
            for way in ("gzip", "deflate", None)
            for back in ("gzip", "deflate", None)
        ],
    ],
)
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_every_option_of_an_inference(client: Caller, options: dict[str, Any], binary: bool) -> None:
    outputs = [httpclient.InferRequestedOutput("y", binary_data=binary)]
    # The asyncio client writes into the headers it is given.
    answer = client.infer("scale", [tensor("x", "FP32", X, binary)], outputs=outputs, **copy.deepcopy(options))
    assert answer.as_numpy("y").tolist() == Y.tolist()
    assert answer.get_response().get("id", "") == options.get("request_id", "")


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_classification(client: Caller, binary: bool) -> None:
    outputs = [httpclient.InferRequestedOutput("y", binary_data=binary, class_count=2)]
    answer = client.infer("scale", [tensor("x", "FP32", X)], outputs=outputs)
    rows = [[element.decode() if binary else element for element in row] for row in answer.as_numpy("y").tolist()]
    assert rows == [["13.000000:3", "10.000000:2"]]


def test_async_infer_of_the_synchronous_client(daemon: DaemonProcess) -> None:
    with httpclient.InferenceServerClient(daemon.url, concurrency=4) as client:
        asked = [client.async_infer("scale", [tensor("x", "FP32", n * X)], request_id=str(n)) for n in range(16)]
        for n, request in enumerate(asked):
            answer = request.get_result()
            assert answer.get_response().get("id", "") == str(n)
            assert answer.as_numpy("y").tolist() == (3 * n * X + 1).tolist()
