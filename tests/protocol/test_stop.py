"""SIGTERM while clients are connected: who waits for nothing is let go at once, who was promised an answer gets it."""

from __future__ import annotations

import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2

from tensord.daemon.grpc import frames
from tests import repositories
from tests.daemon.grpc.frame_client import INFER, STREAM, FrameClient, prefixed
from tests.daemon_process import PATIENCE, DaemonProcess, has_ended, wait_until

_CUT = "were cut at the end of the grace period"


class Streaming:
    """A client with one open stream, and what came on it."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.client = grpcclient.InferenceServerClient(daemon.grpc_url)
        self.came: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.start_stream(lambda result, error: self.came.put((result, error)))

    def ask(self, model: str, name: str, values: np.ndarray, datatype: str, **parameters: str) -> None:
        given = grpcclient.InferInput(name, list(values.shape), datatype)
        given.set_data_from_numpy(values)
        self.client.async_stream_infer(model, [given], parameters=parameters)

    def next(self) -> tuple[Any, Any]:
        return self.came.get(timeout=PATIENCE)

    def close(self) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


@pytest.fixture
def daemon(leaves_nothing: None, tmp_path: Path) -> Iterator[DaemonProcess]:
    repository = repositories.scale_model(tmp_path / "repository")
    repositories.sleepy_model(repository)
    with DaemonProcess(tmp_path, [repository]) as daemon:
        yield daemon


def test_streams_that_wait_for_nothing(daemon: DaemonProcess) -> None:
    """
    1. Open: a stream that was answered, one that never asked, the head of a unary call, health's Watch, a reflection.
    2. SIGTERM. Result: every one of them ends by itself, nothing waits for the grace period.
    """
    answered = Streaming(daemon)
    answered.ask("scale", "x", np.ones((1, 4), np.float32), "FP32")
    assert answered.next()[1] is None
    silent = FrameClient(int(daemon.grpc_url.rpartition(":")[2]))
    for path in (STREAM, INFER):
        silent.open(path)
    silent.synchronise()
    channel = grpc.insecure_channel(daemon.grpc_url)
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    hold = threading.Event()

    def questions() -> Iterator[Any]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        hold.wait(PATIENCE)

    reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(questions())
    assert next(reflected).list_services_response.service
    daemon.signal(signal.SIGTERM)
    _, error = answered.next()
    assert error.status() == "StatusCode.UNAVAILABLE"
    assert "the server is stopping" in error.message()
    assert [message.status for message in watch] == [health_pb2.HealthCheckResponse.NOT_SERVING]
    assert list(reflected) == []
    assert silent.ends()
    assert [silent.answers[number].status for number in (1, 3)] == [grpc.StatusCode.UNAVAILABLE.value[0]] * 2
    assert daemon.stop() == 0
    assert _CUT not in daemon.log
    hold.set()
    channel.close()
    silent.sock.close()
    answered.close()


def sleepy(**parameters: str) -> bytes:
    """Builds a request to ``sleepy`` as it is sent on a stream."""
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="DELAY_MS", datatype="INT32", shape=[1])
    asked = service_pb2.ModelInferRequest(model_name="sleepy", inputs=[tensor], raw_input_contents=[bytes(4)])
    for name, value in parameters.items():
        asked.parameters[name].string_param = value
    return prefixed(asked)


def test_a_stream_with_requests_in_flight(daemon: DaemonProcess, tmp_path: Path) -> None:
    """
    1. A stream has a request that runs, another stream has none. 2. SIGTERM. 3. More is asked on the first stream afterwards.
    Result: what was taken is answered, what came later is not, and that stream ends then; the other one did at once.
    """
    began, until = tmp_path / "began", tmp_path / "until"
    with FrameClient(int(daemon.grpc_url.rpartition(":")[2])) as client:
        stream, idle = client.open(STREAM), client.open(STREAM)
        client.data(stream, sleepy(began=str(began), until=str(until)))
        wait_until(began.exists, "the model to begin", daemon)
        daemon.signal(signal.SIGTERM)
        assert client.answer(idle).status == grpc.StatusCode.UNAVAILABLE.value[0]
        assert client.goaways[-1][:2] == (idle, frames.NO_ERROR)
        client.data(stream, sleepy(began=str(tmp_path / "never")))
        client.synchronise()
        until.touch()
        answer = client.answer(stream)
        assert answer.status == grpc.StatusCode.UNAVAILABLE.value[0]
        (only,) = answer.streamed()
        assert only.infer_response.raw_output_contents == [bytes(4)]
        assert client.ends()
    assert daemon.stop() == 0
    assert not (tmp_path / "never").exists()
    assert _CUT not in daemon.log


@pytest.mark.parametrize("path", [INFER, STREAM, "/inference.GRPCInferenceService/ModelStatistics"])
@pytest.mark.parametrize("part", ["prefix", "some", "large", "whole"])
def test_grpc_messages_that_are_not_finished(daemon: DaemonProcess, path: str, part: str) -> None:
    """A client begins a message, or a call, and sends nothing more: nobody waits for it until the end of the grace period."""
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="UINT8", shape=[1 << 20])
    asked = service_pb2.ModelInferRequest(model_name="nope", inputs=[tensor], raw_input_contents=[bytes(1 << 20)])
    message = prefixed(asked) if part == "large" else prefixed(service_pb2.ModelStatisticsRequest(name="scale"))
    sent = message[: {"prefix": 3, "some": len(message) - 1, "large": 300_000, "whole": len(message)}[part]]
    with FrameClient(int(daemon.grpc_url.split(":")[1])) as client:
        number = client.open(path)
        client.data(number, sent)
        client.synchronise()
        daemon.signal(signal.SIGTERM)
        assert client.ends()
    assert daemon.stop() == 0
    assert _CUT not in daemon.log


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v2/models/scale/infer HTTP/1.1\r\nHo",
        b"POST /v2/models/scale/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc",
        b"POST /v2/models/scale/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nabc",
        b"POST /v2/models/scale/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
        b"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc",
        b"POST /v2/models/scale/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc",
        b"POST /v2/models/scale/generate_stream HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
        b"POST /v2/models/scale/infer_stream HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nabc",
        b"POST /v2/models/none/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc",
    ],
    ids=[
        "head",
        "small body",
        "large body",
        "chunks",
        "index",
        "generate",
        "generate_stream",
        "infer_stream",
        "refused",
    ],
)
def test_http_requests_that_are_not_finished(daemon: DaemonProcess, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", daemon.port), PATIENCE) as connection:
        connection.sendall(sent)
        assert daemon.get("/v2/health/ready")[0] == 200
        daemon.signal(signal.SIGTERM)
        while connection.recv(4096):
            pass
    assert daemon.stop() == 0
    assert _CUT not in daemon.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_until_it_is_gone(daemon: DaemonProcess, number: signal.Signals) -> None:
    """The last ones come when there is no event loop any more; none of them changes how the daemon ends."""
    daemon.signal(signal.SIGTERM)
    while not has_ended(daemon._process):
        daemon.signal(number)
        time.sleep(0.001)
    assert daemon.stop() == 0


def test_an_answer_that_is_cut_off_has_its_trace(leaves_nothing: None, tmp_path: Path) -> None:
    """
    1. A first answer is traced. 2. A second one, of 32 MiB, is not read by its client. 3. SIGTERM; the grace period ends.
    Result: both traces are in the file.
    """
    repository = tmp_path / "repository"
    repositories.write_model(
        repository,
        "large",
        f"""
        import jax.numpy as jnp

        inputs, outputs = {{"x": "FP32[1]"}}, {{"y": "FP32[{8 << 20}]"}}

        def create(path, config, device):
            return lambda params, inputs: {{"y": jnp.zeros({8 << 20}) + inputs["x"]}}, None
        """,
    )
    path = tmp_path / "trace.json"
    options = {"supervisor": {"exit_timeout": 2.0}, "trace": {"file": str(path), "level": ["TIMESTAMPS"], "rate": 1}}
    text = (
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}],"parameters":{"binary_data_output":true}}'
    )
    with DaemonProcess(tmp_path, [repository], options) as daemon:
        assert daemon.request("POST", "/v2/models/large/infer", text)[0] == 200
        with socket.create_connection(("127.0.0.1", daemon.port), PATIENCE) as connection:
            head = b"POST /v2/models/large/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(text)
            connection.sendall(head + text)
            assert connection.recv(1) == b"H"
            assert daemon.stop() == 0
        assert _CUT in daemon.log
    assert path.read_text().count("HTTP_SEND_END") == 2
