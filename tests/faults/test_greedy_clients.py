"""Clients that ask for much and take nothing, or announce much and send next to nothing, beside one that does as clients do.

It is judged by answers and counts: every request of the ordinary client is answered, and well, while the others go on.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2

from tensord.daemon.grpc import frames
from tests import repositories
from tests.daemon.grpc.frame_client import FrameClient, prefixed
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.faults.ordinary import Ordinary

MIB = 1 << 20
#: All that an arena holds.
ARENA = 32 * MIB
#: Answers of the model ``large``; many times as many are asked for as there is room for.
LARGE = 2 * MIB


def repository(folder: Any) -> Any:
    repositories.scale_model(folder)
    repositories.echo_models(folder, ["UINT8"])
    repositories.write_model(
        folder,
        "large",
        f"""
        import jax.numpy as jnp

        inputs = {{"x": "FP32[1]"}}
        outputs = {{"y": "FP32[{LARGE // 4}]"}}

        def create(path, config, device):
            return (lambda params, inputs: {{"y": jnp.zeros({LARGE // 4}, jnp.float32) + inputs["x"]}}), {{}}
        """,
    )
    return folder


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[DaemonProcess]:
    """Runs a daemon for each set of options that tests give."""
    options: dict[str, dict[str, Any]] = {
        "arenas": {"byte_size": MIB, "max_byte_size": ARENA, "wait": PATIENCE},
        "http": {"max_body_byte_size": 8 * MIB},
        "grpc": {"max_message_byte_size": 8 * MIB},
    }
    for section, values in getattr(request, "param", {}).items():
        options[section] = {**options.get(section, {}), **values}
    folder = repository(tmp_path_factory.mktemp("repository"))
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [folder], options) as running:
        yield running
        assert "Traceback" not in running.log


def everything_is_free(daemon: DaemonProcess) -> None:
    """Checks that all memory of the request arena and of the response arena can be used again, by one client."""
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        values = np.zeros(7 * MIB, np.uint8)
        tensor = grpcclient.InferInput("x", [len(values)], "UINT8")
        tensor.set_data_from_numpy(values)
        for _ in range(6):
            assert len(client.infer("echo_uint8", [tensor]).as_numpy("y")) == len(values)
    with httpclient.InferenceServerClient(daemon.url, concurrency=3, network_timeout=PATIENCE) as http:
        tensor = httpclient.InferInput("x", [len(values)], "UINT8")
        tensor.set_data_from_numpy(values)
        for asked in [http.async_infer("echo_uint8", [tensor]) for _ in range(6)]:
            assert len(asked.get_result().as_numpy("y")) == len(values)


def wants_large() -> Any:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1])
    return service_pb2.ModelInferRequest(model_name="large", inputs=[tensor], raw_input_contents=[bytes(4)])


def grpc_port(daemon: DaemonProcess) -> int:
    return int(daemon.grpc_url.split(":")[1])


def test_a_grpc_client_that_takes_its_answers_late(daemon: DaemonProcess) -> None:
    """All of them come in the end, though they are several times what its connection may hold."""
    with Ordinary(daemon) as neighbour:
        with FrameClient(grpc_port(daemon), ((frames.INITIAL_WINDOW_SIZE, 0),)) as client:
            calls = [client.call(wants_large()) for _ in range(40)]
            client.synchronise()
            neighbour.go_on()
            client.send(frames.settings(((frames.INITIAL_WINDOW_SIZE, 2 * LARGE),)))
            for number in calls:
                assert client.answer(number).status == 0
                client.send(frames.window_update(0, LARGE))
        neighbour.go_on()
    everything_is_free(daemon)


@pytest.mark.parametrize("daemon", [{"grpc": {"write_timeout": 1.0}, "http": {"write_timeout": 1.0}}], indirect=True)
def test_answers_that_are_not_taken_for_too_long(daemon: DaemonProcess) -> None:
    """The stream's window, the connection's or the socket may block them; the connection stays where it is the window."""
    port = grpc_port(daemon)
    with FrameClient(port, ((frames.INITIAL_WINDOW_SIZE, 0),)) as client:
        calls = [client.call(wants_large()) for _ in range(3)]
        assert [client.answer(number).reset for number in calls] == [frames.ENHANCE_YOUR_CALM] * 3
        client.send(frames.settings(((frames.INITIAL_WINDOW_SIZE, 2 * LARGE),)))
        assert client.answer(client.call(wants_large())).status == 0
    with FrameClient(port, ((frames.INITIAL_WINDOW_SIZE, 4 * LARGE),), hello=False) as client:
        # The connection's own window is as HTTP/2 begins.
        client.send(frames.PREFACE + frames.settings(((frames.INITIAL_WINDOW_SIZE, 4 * LARGE),)))
        assert client.answer(client.call(wants_large())).reset == frames.ENHANCE_YOUR_CALM
    with FrameClient(port, ((frames.INITIAL_WINDOW_SIZE, 16 * LARGE),)) as client:
        for _ in range(8):
            client.call(wants_large())
        wait_until(lambda: is_cut(daemon, client.sock), "the connection to be cut")
    with not_reading(daemon, 1, 20) as (sock,):
        wait_until(lambda: is_cut(daemon, sock), "the connection to be cut")
    everything_is_free(daemon)


def is_cut(daemon: DaemonProcess, sock: socket.socket) -> bool:
    """Returns whether the daemon has closed a connection; its client cannot see that before it has read everything."""
    ours = sock.getsockname()
    fronts = [*daemon.fronts, *daemon.children("tensord.daemon.grpc")]
    return not any(each.raddr == ours for front in fronts for each in front.connections("tcp"))


@contextlib.contextmanager
def not_reading(daemon: DaemonProcess, count: int, requests: int = 1) -> Iterator[list[socket.socket]]:
    """Opens connections that ask over HTTP for large answers, and read none."""
    asked = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}
    body = json.dumps({**asked, "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}).encode()
    head = f"POST /v2/models/large/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        socks = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", daemon.port))
            sock.sendall((head + body) * requests)
            socks.append(sock)
        yield socks


def announced(byte_size: int, binary: bool) -> bytes:
    """Builds the head of a request with a body of that size."""
    extra = "Inference-Header-Content-Length: 100\r\n" if binary else ""
    return (
        f"POST /v2/models/echo_uint8/infer HTTP/1.1\r\nHost: x\r\n{extra}Content-Length: {byte_size}\r\n\r\n".encode()
    )


SLOW = {"http": {"min_rate": 100_000}, "grpc": {"min_rate": 100_000}}


@pytest.mark.parametrize("daemon", [SLOW], indirect=True)
def test_http_bodies_below_the_least_rate(daemon: DaemonProcess) -> None:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection(("127.0.0.1", daemon.port), PATIENCE)) for _ in range(6)]
        for number, sock in enumerate(socks):
            sock.sendall(announced(8 * MIB, number % 2 == 0) + bytes(1000))
        for sock in socks[:3]:
            assert sock.recv(12) == b"HTTP/1.1 408"
            answer = sock.recv(10_000)
            assert b"the request body came at fewer than 100000 bytes a second" in answer
    everything_is_free(daemon)


def large_message() -> Any:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="UINT8", shape=[7 * MIB])
    return service_pb2.ModelInferRequest(model_name="echo_uint8", inputs=[tensor], raw_input_contents=[bytes(7 * MIB)])


@pytest.mark.parametrize("daemon", [SLOW], indirect=True)
def test_grpc_messages_below_the_least_rate(daemon: DaemonProcess) -> None:
    with FrameClient(grpc_port(daemon), ((frames.INITIAL_WINDOW_SIZE, 2 * LARGE),)) as client:
        number = client.open()
        client.data(number, prefixed(large_message())[:100_000])
        answer = client.answer(number)
        assert (answer.status, answer.text) == (14, "a message came at fewer than 100000 bytes a second")
        # What comes fast enough is answered on the same connection.
        number = client.call(wants_large())
        assert client.answer(number).status == 0
    everything_is_free(daemon)


@pytest.mark.parametrize("path", ["infer", "generate"])
@pytest.mark.parametrize("coding", ["none", "chunked", "gzip"])
def test_refused_bodies_leave_their_memory(daemon: DaemonProcess, path: str, coding: str) -> None:
    """JSON that is too long for its front, of megabytes: what was refused is not kept, whichever step found out."""
    text = b" " * (7 * MIB)
    head = b"POST /v2/models/scale/%s HTTP/1.1\r\nHost: x\r\n" % path.encode()
    if coding == "gzip":
        body = gzip.compress(text)
        head += b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    elif coding == "chunked":
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)
        head += b"Transfer-Encoding: chunked\r\n\r\n"
    else:
        body = text
        head += b"Content-Length: %d\r\n\r\n" % len(body)

    def ask() -> None:
        with socket.create_connection(("127.0.0.1", daemon.port), timeout=PATIENCE) as connection:
            connection.sendall(head + body)
            assert connection.recv(1 << 16).split()[1] in (b"400", b"415")

    (front,) = daemon.fronts
    ask()
    before = front.memory_info().rss
    for _ in range(12):
        ask()
    wait_until(lambda: front.memory_info().rss < before + 24 * MIB, "memory of the refused bodies")
