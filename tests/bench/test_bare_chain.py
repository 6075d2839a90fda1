"""Tests that a server without checks answers rightly, too, and counts its answers: else its figures would say nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request

import numpy as np
import pytest
import tritonclient.http as httpclient

from bench.closed_loop import Connection
from tests.daemon_process import ROOT, DaemonProcess, wait_until


def _request(values: np.ndarray) -> bytes:
    """Builds a request as stock clients send it: binary tensors both ways."""
    inputs = [httpclient.InferInput(name, [1, 16], "FP32") for name in ("INPUT0", "INPUT1")]
    for tensor in inputs:
        tensor.set_data_from_numpy(values)
    body, head_size = httpclient.InferenceServerClient.generate_request_body(inputs)
    return (
        f"POST /v2/models/addsub/infer HTTP/1.1\r\nHost: test\r\nInference-Header-Content-Length: {head_size}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def _answer(connection: Connection, request: bytes) -> np.ndarray:
    connection.send(request)
    while not connection.read():
        pass
    return np.frombuffer(bytes(connection.received[-128:]), np.float32).reshape(2, 16)


def _count(address: str) -> int:
    with urllib.request.urlopen(f"http://{address}/v2/models/addsub/stats", timeout=60) as answer:
        return int(json.load(answer)["model_stats"][0]["inference_count"])


@pytest.mark.parametrize("kind", ["process", "chain"])
def test_requests_are_computed_and_counted(daemon: DaemonProcess, kind: str) -> None:
    before = _count(daemon.url)
    command = [sys.executable, "-m", "bench.bare_chain", "0", daemon.url, "addsub", kind]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as chain:
        try:
            assert chain.stdout is not None
            port = int(chain.stdout.readline().removeprefix("listening on "))
            connection = Connection(("127.0.0.1", port))
            try:
                connection.socket.settimeout(None)
                asked = 0

                def computed_here() -> bool:
                    nonlocal asked
                    asked += 1
                    values = np.full((1, 16), asked, np.float32)
                    assert np.array_equal(_answer(connection, _request(values)), np.array([[2 * asked] * 16, [0] * 16]))
                    return _count(f"127.0.0.1:{port}") > _count(daemon.url)

                wait_until(computed_here, "a request that the chain computes itself")
                assert _count(f"127.0.0.1:{port}") == before + asked
            finally:
                connection.socket.close()
        finally:
            chain.terminate()


def test_what_is_not_inference_comes_from_upstream(daemon: DaemonProcess) -> None:
    command = [sys.executable, "-m", "bench.bare_chain", "0", daemon.url, "mlp", "front"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as chain:
        try:
            assert chain.stdout is not None
            port = int(chain.stdout.readline().removeprefix("listening on "))
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/mlp/config", timeout=60) as answer:
                assert json.load(answer) == json.loads(daemon.get("/v2/models/mlp/config")[1])
        finally:
            chain.terminate()
