"""Requests for models that are being loaded for the first time: they wait, and are told when that takes too long."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess

GATED = """
import pathlib, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        while not pathlib.Path({gate!r}).exists():
            time.sleep(0.01)

    def execute(self, requests):
        for request in requests:
            x = pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy())
            if {streams}:
                sender = request.get_response_sender()
                if {responses}:
                    sender.send(pb_utils.InferenceResponse([x]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None if {streams} else [pb_utils.InferenceResponse([x])]
"""
CONFIG = """
backend: "python"
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 2 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }} ]
model_transaction_policy {{ decoupled: {streams} }}
"""
INFER = json.dumps({"inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]}]}).encode()
GENERATE = json.dumps({"x": [1, 2]}).encode()
RAW = {"Inference-Header-Content-Length": "0"}


def start(start_daemon: Callable[..., DaemonProcess], tmp_path: Path, seconds: float) -> DaemonProcess:
    """Starts a daemon with three models that finish loading when the file ``gate`` exists."""
    for name, streams in (("one", False), ("many", True), ("never", True)):
        source = GATED.format(gate=str(tmp_path / "gate"), streams=streams, responses=name != "never")
        repositories.write_model(tmp_path / "models", name, source, CONFIG.format(streams=str(streams).lower()))
    daemon = start_daemon(tmp_path / "models", requests={"worker_wait": seconds})
    daemon.wait_log(r"grpc-0 \(process \d+\) is up")
    return daemon


def over_grpc(daemon: DaemonProcess, model: str) -> str:
    """Makes a call; returns the name of its status."""
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[2]).contents.fp32_contents.extend([1, 2])
    with grpc.insecure_channel(daemon.grpc_url) as channel:
        try:
            channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(
                request.SerializeToString(), timeout=PATIENCE
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"  # type: ignore[attr-defined]
    return "OK"


def test_they_wait_and_are_answered(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """By each way, also where only a loaded model says what it may be asked."""
    daemon = start(start_daemon, tmp_path, PATIENCE)
    with ThreadPoolExecutor(8) as pool:
        ways = {
            "infer": pool.submit(daemon.request, "POST", "/v2/models/one/infer", INFER),
            "generate": pool.submit(daemon.request, "POST", "/v2/models/one/generate", GENERATE),
            "streamed": pool.submit(daemon.request, "POST", "/v2/models/many/generate_stream", GENERATE),
            "decoupled": pool.submit(daemon.request, "POST", "/v2/models/many/infer", INFER),
            "unanswered": pool.submit(daemon.request, "POST", "/v2/models/never/infer", INFER),
        }
        calls = {name: pool.submit(over_grpc, daemon, name) for name in ("one", "many", "never")}
        try:
            assert daemon.get("/v2/models/one")[0] == daemon.get("/v2/models/one/config")[0] == 503
            assert daemon.get("/v2/models/one/ready")[0] != 200
            assert not any(future.done() for future in (*ways.values(), *calls.values()))
        finally:
            (tmp_path / "gate").touch()
        assert ways["infer"].result(PATIENCE)[0] == ways["generate"].result(PATIENCE)[0] == 200
        assert ways["streamed"].result(PATIENCE)[0] == 200
        for way, model in (("decoupled", "many"), ("unanswered", "never")):
            status, body = ways[way].result(PATIENCE)
            assert (status, "decoupled transaction policy" in str(body)) == (501, True)
            assert calls[model].result(PATIENCE).startswith("UNIMPLEMENTED: ModelInfer RPC doesn't support")
        assert calls["one"].result(PATIENCE) == "OK"
    assert daemon.request("POST", "/v2/models/none/infer", INFER)[0] == 404


@pytest.mark.parametrize("path", ["infer", "generate", "generate_stream", "raw"])
def test_what_takes_too_long(start_daemon: Callable[..., DaemonProcess], tmp_path: Path, path: str) -> None:
    daemon = start(start_daemon, tmp_path, 0.2)
    try:
        if path == "raw":
            status, body = daemon.request("POST", "/v2/models/one/infer", b"\0" * 8, RAW)
        else:
            status, body = daemon.request("POST", f"/v2/models/one/{path}", INFER if path == "infer" else GENERATE)
        assert status == 503
        assert b"model 'one' is " in body
        assert b"being loaded" in body
        assert over_grpc(daemon, "one").startswith("UNAVAILABLE: model 'one' is still being loaded")
    finally:
        (tmp_path / "gate").touch()
