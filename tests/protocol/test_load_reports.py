"""Load reports of a real daemon: whoever asks gets one with the answer, in the format that was asked for; others get none."""

from __future__ import annotations

import base64
import json
import re
import struct
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess

ASKED = "endpoint-load-metrics-format"
TEXT = r"TEXT application_utilization=(0\.\d{3}|1\.000), named_metrics\.in_flight=\d+"


@pytest.fixture
def daemon(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> DaemonProcess:
    repositories.scale_model(tmp_path / "models")
    running = start_daemon(tmp_path / "models")
    running.wait_ready()
    return running


def over_http(daemon: DaemonProcess, wanted: str) -> dict[str, str]:
    """Sends a request; returns the headers of its answer that report a load, names in lower case."""
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0] * 4}]}
    headers = {ASKED: wanted} if wanted else {}
    request = urllib.request.Request(
        f"http://{daemon.url}/v2/models/scale/infer", json.dumps(body).encode(), headers, method="POST"
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        assert json.loads(answer.read())["outputs"][0]["data"] == [4.0] * 4
        return {
            name.lower(): value for name, value in answer.headers.items() if name.lower().startswith("endpoint-load")
        }


def read_message(content: bytes) -> tuple[float, dict[str, float]]:
    """Parses an OrcaLoadReport by its field numbers; returns utilization and named metrics."""
    utilization, named, at = 0.0, {}, 0
    while at < len(content):
        field, kind = content[at] >> 3, content[at] & 7
        if (field, kind) == (9, 1):
            (utilization,) = struct.unpack_from("<d", content, at + 1)
            at += 9
            continue
        assert (field, kind) == (8, 2)
        size = content[at + 1]
        entry = content[at + 2 : at + 2 + size]
        assert (entry[0] >> 3, entry[0] & 7) == (1, 2)
        name, rest = entry[2 : 2 + entry[1]].decode(), entry[2 + entry[1] :]
        assert (rest[0] >> 3, rest[0] & 7) == (2, 1)
        (named[name],) = struct.unpack_from("<d", rest, 1)
        at += 2 + size
    return utilization, named


def test_over_http(daemon: DaemonProcess) -> None:
    """The third and later requests of a kind take the short way where nobody asks; those who ask are told each time."""
    for _ in range(4):
        assert over_http(daemon, "") == {}
        assert over_http(daemon, "yaml") == {}
        assert re.fullmatch(TEXT, over_http(daemon, "text")["endpoint-load-metrics"])
        assert re.fullmatch(TEXT, over_http(daemon, "TEXT")["endpoint-load-metrics"])
    said = over_http(daemon, "json")["endpoint-load-metrics"]
    report = json.loads(said.removeprefix("JSON "))
    assert report.keys() == {"application_utilization", "named_metrics"}
    assert report["named_metrics"].keys() == {"in_flight"}
    value = over_http(daemon, "bin")["endpoint-load-metrics-bin"]
    utilization, named = read_message(base64.b64decode(value + "=" * (-len(value) % 4)))
    assert 0 <= utilization <= 1
    assert named == {"in_flight": pytest.approx(0, abs=1)}


def test_over_grpc(daemon: DaemonProcess) -> None:
    """In the trailers of good and bad answers, of calls with one answer and of streams."""
    asked = service_pb2.ModelInferRequest(model_name="scale")
    asked.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    asked.raw_input_contents.append(np.ones(4, np.float32).tobytes())

    def trailers(call: Any) -> dict[str, str | bytes]:
        return {name: value for name, value in call.trailing_metadata() if name.startswith("endpoint-load")}

    with grpc.insecure_channel(daemon.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(4):
            assert trailers(stub.ModelInfer.with_call(asked)[1]) == {}
            found = trailers(stub.ModelInfer.with_call(asked, metadata=[(ASKED, "text")])[1])
            assert re.fullmatch(TEXT, str(found["endpoint-load-metrics"]))
        # grpcio keeps the message for balancers of its own, and shows the trailer to nobody.
        assert stub.ModelInfer(asked, metadata=[(ASKED, "bin")]).model_name == "scale"
        stream = stub.ModelStreamInfer(iter([asked]), metadata=[(ASKED, "json")])
        assert len(list(stream)) == 1
        assert str(trailers(stream)["endpoint-load-metrics"]).startswith("JSON {")
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(service_pb2.ModelInferRequest(model_name="nobody"), metadata=[(ASKED, "text")])
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert re.fullmatch(TEXT, str(trailers(refused.value)["endpoint-load-metrics"]))
