"""Requests that are wrong in every way we could think of: the right status, a clear text, and an unharmed server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess

GOOD = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    repository = tmp_path_factory.mktemp("repository")
    repositories.scale_model(repository)
    repositories.faulty_models(repository)
    options = {"repository": {"strict_readiness": False}, "http": {"port": 0, "max_body_byte_size": 1 << 20}}
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [repository], options) as running:
        running.wait_ready()
        yield running


@pytest.fixture(autouse=True)
def unharmed(daemon: DaemonProcess) -> Iterator[None]:
    """Checks at its end that a right request is answered, by the same processes."""
    before = {process.pid for process in daemon.family()}
    yield
    assert daemon.infer("scale", [GOOD])[1]["outputs"][0]["data"] == [4, 7, 10, 13]
    assert {process.pid for process in daemon.family()} == before


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", ""),
        (b"{", ""),
        (b"[]", ""),
        (b'{"inputs": null}', ""),
        (b'{"inputs": [1]}', ""),
        (b"\xff\xfe", ""),
        (b"[" * 100_000, ""),
        (b'{"id": 7, "inputs": []}', ""),
    ],
)
def test_bad_json(daemon: DaemonProcess, body: bytes, words: str) -> None:
    status, answer = daemon.request("POST", "/v2/models/scale/infer", body)
    assert status == 400, answer
    assert words in json.loads(answer)["error"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [1, 5], "data": [1, 2, 3, 4, 5]}, "unexpected shape for input 'x' for model 'scale'"),
        ({"shape": [4], "data": [1, 2, 3, 4]}, "unexpected shape for input 'x'"),
        ({"shape": [1, -4]}, ""),
        ({"shape": [1, 4.5]}, ""),
        ({"shape": "4"}, ""),
        ({"shape": [1, True]}, ""),
        ({"shape": [2**62, 4]}, ""),
        ({"shape": [2**63, 2**63]}, ""),
        ({"shape": [10**9, 4]}, ""),
        ({"shape": [9, 4], "data": [0] * 36}, "batch-size must be <= 8 for 'scale'"),
        ({"shape": [0, 4], "data": []}, ""),
        ({"data": [1, 2, 3]}, ""),
        ({"data": [1, 2, 3, 4, 5]}, ""),
        ({"data": [1, 2, 3, "4"]}, ""),
        ({"data": [[[[1, 2, 3, None]]]]}, ""),
        ({"data": {"a": 1}}, ""),
        ({"datatype": "INT32"}, "data-type is 'INT32', but model 'scale' expects 'FP32'"),
        ({"datatype": "FP33"}, "invalid datatype for input"),
        ({"datatype": "fp32"}, "invalid datatype for input"),
        ({"datatype": 3}, ""),
        ({"name": "z"}, "unexpected inference input 'z' for model 'scale'"),
        ({"name": ""}, ""),
        ({"name": 4}, ""),
        ({"parameters": {"binary_data_size": 16}}, ""),
        ({"parameters": {"shared_memory_region": "r"}}, ""),
        ({"parameters": []}, ""),
    ],
)
def test_bad_inputs(daemon: DaemonProcess, change: dict[str, Any], words: str) -> None:
    status, answer = daemon.infer("scale", [{**GOOD, **change}])
    assert status == 400, answer
    assert words in answer["error"]


def test_missing_and_duplicate_inputs(daemon: DaemonProcess) -> None:
    status, answer = daemon.infer("scale", [])
    assert status == 400
    assert "expected 1 inputs but got 0 inputs for model 'scale'" in answer["error"]
    status, answer = daemon.infer("scale", [GOOD, GOOD])
    assert status == 400
    assert "input 'x' already exists in request" in answer["error"]


def test_bad_outputs_and_parameters(daemon: DaemonProcess) -> None:
    status, answer = daemon.infer("scale", [GOOD], outputs=[{"name": "nope"}])
    assert status == 400
    assert "unexpected inference output 'nope' for model 'scale'" in answer["error"]
    status, answer = daemon.infer("scale", [GOOD], parameters={"p": None})
    assert status == 400
    assert "parameter 'p' has invalid type" in answer["error"]
    status, answer = daemon.infer("scale", [GOOD], parameters={"triton_x": 1})
    assert status == 400


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/v2/models/nothing/infer", 404, "Request for unknown model: 'nothing' is not found"),
        ("/v2/models/scale/versions/7/infer", 404, "version 7"),
        ("/v2/models/scale/versions/x/infer", 404, "Not Found"),
        ("/v2/models/does_not_load/infer", 404, "no available versions"),
        ("/v2/models/scale/inferno", 404, "Not Found"),
    ],
)
def test_unknown_places(daemon: DaemonProcess, path: str, status: int, words: str) -> None:
    """Found before the body is looked at."""
    got, answer = daemon.request("POST", path, b"{")
    assert got == status, answer
    assert words in json.loads(answer)["error"]


def test_wrong_method(daemon: DaemonProcess) -> None:
    status, answer = daemon.request("GET", "/v2/models/scale/infer")
    assert status == 405
    assert json.loads(answer) == {"error": "Method Not Allowed"}


def test_a_body_over_the_limit(daemon: DaemonProcess) -> None:
    """Refused by its length alone, with both numbers, before it is sent."""
    with socket.create_connection(("127.0.0.1", daemon.port), PATIENCE) as connection:
        connection.sendall(b"POST /v2/models/scale/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n")
        answer = connection.recv(65536).decode()
    assert " 413 " in answer.splitlines()[0]
    assert "2000000" in answer
    assert str(1 << 20) in answer


@pytest.mark.parametrize("length", ["-1", "+5", "5x", "", "4294967296", "99", "1e2"])
def test_length_header(daemon: DaemonProcess, length: str) -> None:
    body = json.dumps({"inputs": [GOOD]}).encode()[:50]
    status, answer = daemon.request("POST", "/v2/models/scale/infer", body, {"Inference-Header-Content-Length": length})
    assert status == 400, answer
    assert json.loads(answer)["error"]


@pytest.mark.parametrize(
    ("size", "sent", "words"),
    [
        (16, 12, ""),
        (16, 20, ""),
        (12, 12, ""),
        (20, 20, ""),
        (-1, 16, ""),
        (2**64, 16, ""),
        ("16", 16, ""),
        (True, 16, ""),
    ],
)
def test_binary_sizes(daemon: DaemonProcess, size: Any, sent: int, words: str) -> None:
    head = json.dumps(
        {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": size}}]}
    ).encode()
    status, answer = daemon.request(
        "POST", "/v2/models/scale/infer", head + bytes(sent), {"Inference-Header-Content-Length": str(len(head))}
    )
    assert status == 400, answer
    assert words in json.loads(answer)["error"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("raises", "raises"),
        ("wrong_shape", "y"),
        ("wrong_datatype", "y"),
        ("missing_output", "y"),
    ],
)
def test_a_faulty_model_harms_itself_alone(daemon: DaemonProcess, model: str, words: str) -> None:
    status, answer = daemon.infer(model, [{"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]}])
    assert status == 500, answer
    assert words in answer["error"]
    assert "/" not in answer["error"]
    assert "Traceback" not in answer["error"]


def test_a_model_that_does_not_load_says_so(daemon: DaemonProcess) -> None:
    status, answer = daemon.request("POST", "/v2/repository/index", b"")
    assert status == 200
    (entry,) = [entry for entry in json.loads(answer) if entry["name"] == "does_not_load"]
    assert entry["state"] == "UNAVAILABLE"
    assert entry["reason"]
    assert daemon.get("/v2/models/does_not_load/ready")[0] == 400
    assert daemon.get("/v2/models/scale/ready")[0] == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"\r\n\r\n\r\n",
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v2/models/scale/infer HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: 0\r\n\r\n",
        b"POST /v2/models/scale/infer HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
        b"POST /v2/models/scale/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST /v2/models/scale/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc",
        b"GET /v2 HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        bytes(range(256)) * 20,
    ],
)
def test_bytes_that_are_hardly_http(daemon: DaemonProcess, raw: bytes) -> None:
    """Answered with 4xx or hung up on, never with 2xx or 5xx."""
    with socket.create_connection(("127.0.0.1", daemon.port), PATIENCE) as connection:
        try:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65536)
        except ConnectionError:
            return
    assert not answer or answer.startswith(b"HTTP/1.1 4"), answer
