"""HTTP clients that go away before their answer: what runs for them is told, whatever it is, and nothing further begins."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess, wait_until
from tests.repositories import answering, ensemble, fields, write_model
from tests.scrapes import scrape

#: Goes on until it is told that nobody waits, or may end: files beside the one that the request names say how it went.
WATCH = answering("""
    path = pathlib.Path(given(request, "path").ravel()[0].decode())
    path.with_suffix(".began").touch()
    while not path.exists():
        if request.is_cancelled():
            path.with_suffix(".cancelled").touch()
            break
        time.sleep(0.005)
    return response(done=given(request, "path"))
""")
STREAM = """
    import pathlib
    import time
    import triton_python_backend_utils as pb

    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                sender, told = request.get_response_sender(), pb.get_input_tensor_by_name(request, "path")
                path = pathlib.Path(told.as_numpy().ravel()[0].decode())
                path.with_suffix(".began").touch()
                while not sender.is_cancelled():
                    sender.send(pb.InferenceResponse([pb.Tensor("done", told.as_numpy())]))
                    time.sleep(0.005)
                path.with_suffix(".cancelled").touch()
                sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CALLER = answering("""
    asked = pb_utils.InferenceRequest(model_name="watch", inputs=request.inputs(), requested_output_names=["done"])
    return pb_utils.InferenceResponse(asked.exec().output_tensors())
""")
HOST_CALLER = """
    from tensord import models

    inputs, outputs, host = {"path": "BYTES[1]"}, {"done": "BYTES[1]"}, True

    def create(path, config, device):
        return (lambda params, inputs: models.call("watch", inputs)), None
"""
#: What is behind it in an ensemble.
ECHO = """
    inputs, outputs, host = {"path": "BYTES[1]"}, {"done": "BYTES[1]"}, True

    def create(path, config, device):
        return (lambda params, inputs: {"done": inputs["path"]}), None
"""
#: Each kind of request, and the model that works on it.
KINDS = [
    ("watch", "infer", "watch"),
    ("watch", "generate", "watch"),
    ("chain", "infer", "watch"),
    ("caller", "infer", "watch"),
    ("host_caller", "infer", "watch"),
    ("calling_chain", "infer", "watch"),
    ("stream", "generate_stream", "stream"),
    ("stream_chain", "generate_stream", "stream"),
]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    declared = fields("path STRING 1", "done STRING 1")
    write_model(folder, "watch", WATCH, declared)
    write_model(folder, "stream", STREAM, declared + "model_transaction_policy { decoupled: true }")
    write_model(folder, "caller", CALLER, declared)
    write_model(folder, "host_caller", HOST_CALLER)
    write_model(folder, "echo", ECHO)
    for name, first in (("chain", "watch"), ("calling_chain", "caller"), ("stream_chain", "stream")):
        steps = [(first, {"path": "path"}, {"done": "middle"}), ("echo", {"path": "middle"}, {"done": "done"})]
        ensemble(folder, name, ["path STRING 1"], ["done STRING 1"], steps)
    return folder


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, repository: Path) -> DaemonProcess:
    return daemon_of(repository)


@contextmanager
def asked(daemon: DaemonProcess, model: str, how: str, path: Path) -> Iterator[socket.socket]:
    """Yields a connection whose request has begun to run."""
    given: dict[str, Any] = {"path": str(path)}
    if how == "infer":
        given = {"inputs": [{"name": "path", "shape": [1], "datatype": "BYTES", "data": [str(path)]}]}
    body = json.dumps(given).encode()
    host, _, port = daemon.url.partition(":")
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        head = f"POST /v2/models/{model}/{how} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(path.with_suffix(".began").exists, "the request to run", daemon)
        yield connection


def failures(daemon: DaemonProcess, model: str) -> float:
    return scrape(daemon.metrics_url).model("nv_inference_request_failure", model, reason="CANCELED")


@pytest.mark.parametrize(
    ("model", "how", "works", "ends"),
    [
        *[(*kind, "closes") for kind in KINDS],
        *[(*kind, "resets") for kind in KINDS[4:7:2]],
        *[(*kind, "shuts") for kind in KINDS[5::2]],
    ],
)
def test_what_runs_for_a_client_that_has_gone_is_told(
    daemon: DaemonProcess, tmp_path: Path, model: str, how: str, works: str, ends: str
) -> None:
    before, echoed = failures(daemon, model), counted(daemon, "echo")
    path = tmp_path / "go"
    with asked(daemon, model, how, path) as connection:
        if ends == "resets":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if ends == "shuts":
            connection.shutdown(socket.SHUT_WR)
        else:
            connection.close()
        wait_until(path.with_suffix(".cancelled").exists, f"{works} to be told", daemon)
        wait_until(lambda: failures(daemon, model) == before + 1, "its request to be counted", daemon)
    if how == "infer":
        assert counted(daemon, "echo") == echoed, "no further step begins"


def counted(daemon: DaemonProcess, model: str) -> float:
    return scrape(daemon.metrics_url).model("nv_inference_request_success", model)


def test_what_waits_for_a_client_that_has_gone_never_begins(daemon: DaemonProcess, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    before = failures(daemon, "watch")
    with asked(daemon, "watch", "infer", first) as connection:
        host, _, port = daemon.url.partition(":")
        with socket.create_connection((host, int(port)), PATIENCE) as waiting:
            body = json.dumps({"path": str(second)}).encode()
            waiting.sendall(
                b"POST /v2/models/watch/generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
                % (len(body), body)
            )
            wait_until(
                lambda: scrape(daemon.metrics_url).model("nv_inference_pending_request_count", "watch") == 1,
                "it to wait",
                daemon,
            )
        wait_until(lambda: failures(daemon, "watch") == before + 1, "it to be taken back", daemon)
        first.touch()
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    assert not second.with_suffix(".began").exists()
