"""The most, and far more than the most, of everything that a client may repeat, beside ordinary clients who go on.

Far more parameters, inputs and settings than are taken, and names of many bytes, are sent to a daemon whose watchdog ends a front
that is busy for too long. They are refused with both numbers; ordinary clients are answered meanwhile, by the same processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tensord.daemon.front.entries import MAX_ENTRIES
from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess
from tests.faults.ordinary import Ordinary

_X = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    repository = tmp_path_factory.mktemp("repository")
    repositories.scale_model(repository)
    options = {"repository": {"strict_readiness": False, "control_mode": "explicit", "load": ["*"]}}
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [repository], options) as running:
        before = {process.pid for process in running.family()}
        with Ordinary(running):
            yield running
        assert {process.pid for process in running.family()} == before
        assert "Traceback" not in running.log


@pytest.mark.parametrize("method", ["ModelMetadata", "ModelInfer", "SystemSharedMemoryStatus"])
def test_a_name_of_many_bytes(daemon: DaemonProcess, method: str) -> None:
    with grpc.insecure_channel(daemon.grpc_url) as channel:
        call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"\x0a\x80\x80\x80\x0f" + b"a" * (30 << 20), timeout=PATIENCE)
    assert (refused.value.code().name, refused.value.details()) == (
        "INVALID_ARGUMENT",
        "the request message has 31457285 bytes besides its tensors, at most 1048576 are allowed",
    )


def asked(**changes: Any) -> bytes:
    return json.dumps({"inputs": [_X], **changes}).encode()


PARAMETERS = {f"p{number}": 1 for number in range(60_000)}
INFER, GENERATE = "/v2/models/scale/infer", "/v2/models/scale/generate"
BODIES: dict[str, tuple[str, bytes, str]] = {
    "parameters": (INFER, asked(parameters=PARAMETERS), "60000 parameters"),
    "inputs": (INFER, asked(inputs=[_X] * 9000), "9000 inputs"),
    "outputs": (INFER, asked(outputs=[{"name": "y"}] * 9000), "9000 outputs"),
    "parameters of an input": (
        INFER,
        asked(inputs=[{**_X, "parameters": {f"p{number}": 1 for number in range(9000)}}]),
        "9000 parameters of a tensor",
    ),
    "generate": (GENERATE, json.dumps(PARAMETERS).encode(), "60000 members of an object"),
    "generate parameters": (GENERATE, json.dumps({"parameters": PARAMETERS}).encode(), "60000 members of an object"),
    "load": (
        "/v2/repository/models/scale/load",
        json.dumps({"parameters": PARAMETERS}).encode(),
        "60000 members of an object",
    ),
    "logging": ("/v2/logging", json.dumps(PARAMETERS).encode(), "60000 settings"),
    "trace": ("/v2/trace/setting", json.dumps(PARAMETERS).encode(), "60000 settings"),
    "levels": ("/v2/trace/setting", json.dumps({"trace_level": ["OFF"] * 9000}).encode(), "9000 values of a setting"),
    "region": (
        "/v2/systemsharedmemory/region/r/register",
        json.dumps(PARAMETERS).encode(),
        "60000 members of an object",
    ),
}


@pytest.mark.parametrize(("path", "body", "what"), list(BODIES.values()), ids=list(BODIES))
def test_whatever_repeats_in_a_body(daemon: DaemonProcess, path: str, body: bytes, what: str) -> None:
    status, answer = daemon.request("POST", path, body)
    assert status == 400
    assert f"{what} are given, at most {MAX_ENTRIES} are allowed" in json.loads(answer)["error"]
