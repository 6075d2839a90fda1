"""Connections that cost the gRPC front something and ask nothing: they go, and who asks does not notice. The daemon is real."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from tritonclient.grpc import service_pb2

from tensord.daemon.grpc import frames
from tests import repositories
from tests.daemon.grpc.frame_client import INFER, STREAM, FrameClient, prefixed
from tests.daemon_process import DaemonProcess, wait_until
from tests.faults.ordinary import Ordinary


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("connections")
    repository = repositories.scale_model(folder / "repository")
    with DaemonProcess(folder, [repository]) as daemon:
        yield daemon


def front(daemon: DaemonProcess) -> psutil.Process:
    """Returns the process of the gRPC front."""
    (process,) = daemon.children("tensord.daemon.grpc")
    return process


def port(daemon: DaemonProcess) -> int:
    return int(daemon.grpc_url.rpartition(":")[2])


def scale(count: int = 1) -> bytes:
    """Builds a request to ``scale``."""
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[count, 4])
    asked = service_pb2.ModelInferRequest(model_name="scale", inputs=[tensor], raw_input_contents=[bytes(16 * count)])
    return prefixed(asked)


@pytest.mark.parametrize("path", [INFER, STREAM])
@pytest.mark.parametrize("half", [True, False])
def test_a_client_without_a_window_that_goes_away(daemon: DaemonProcess, path: str, half: bool) -> None:
    """
    1. Clients that give no window ask, and end their sending side once their answers wait for it. 2. Some close, some stay.
    Result: the front lets all of them go, descriptors included.
    """
    with Ordinary(daemon) as ordinary:
        process = front(daemon)
        before = process.num_fds()
        clients = [FrameClient(port(daemon), ((frames.INITIAL_WINDOW_SIZE, 0),)) for _ in range(20)]
        for client in clients:
            client.data(client.open(path), scale(), end=True)
        for client in clients:
            # Its answer has begun.
            while client.step() != frames.HEADERS:
                pass
            client.sock.shutdown(socket.SHUT_WR) if half else client.sock.close()
        # A segment of an arena or a connection of this test's own may have come meanwhile.
        wait_until(lambda: process.num_fds() <= before + 5, "the descriptors to be back", daemon)
        for client in clients:
            assert not half or client.ends()
            client.sock.close()
        ordinary.go_on()


def flood(client: FrameClient, burst: bytes) -> tuple[int, int, bytes]:
    """Sends that again and again until the front ends the connection; its GOAWAY."""
    sender = threading.Thread(target=_send_on, args=(client.sock, burst))
    sender.start()
    try:
        assert client.ends()
    finally:
        # The reader has seen the end: the sender does so with its next bytes, whatever is in the buffers.
        client.sock.close()
        sender.join()
    return client.goaways[0]


def _send_on(sock: socket.socket, burst: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            sock.sendall(burst)


#: Frames that do nothing, on a connection where stream 1 is open.
FLOODS = {
    "unknown": frames.frame(77, 0, 0),
    "PRIORITY": frames.frame(frames.PRIORITY, 0, 3, bytes(5)),
    "empty DATA": frames.frame(frames.DATA, 0, 1),
    "padded DATA": frames.frame(frames.DATA, frames.PADDED, 1, b"\0"),
    "WINDOW_UPDATE": frames.window_update(1, 1),
    "SETTINGS": frames.settings(()),
    "larger SETTINGS": frames.settings([(frames.INITIAL_WINDOW_SIZE, 1), (frames.INITIAL_WINDOW_SIZE, 2)] * 500),
    "GOAWAY": frames.goaway(0, frames.NO_ERROR),
    "PING": frames.frame(frames.PING, 0, 0, bytes(8)),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_floods_of_frames(daemon: DaemonProcess, kind: str) -> None:
    """Two connections at a time send frames that do nothing, as fast as they can, until they are told to keep calm."""
    with Ordinary(daemon) as ordinary:
        # A stream that is open lets a client ping as it likes.
        clients = [FrameClient(port(daemon)) for _ in range(2)]
        for client in clients:
            client.open(STREAM)
        burst = FLOODS[kind] * (16384 // len(FLOODS[kind]) or 1)
        with ThreadPoolExecutor(2) as pool:
            for _, code, reason in pool.map(flood, clients, [burst] * 2):
                assert code == frames.ENHANCE_YOUR_CALM
                assert b"frames came" in reason
        ordinary.go_on()


def test_calls_that_are_taken_back(daemon: DaemonProcess) -> None:
    """Rapid resets: far more calls than anybody wants the answers of."""
    with Ordinary(daemon) as ordinary, FrameClient(port(daemon)) as client:
        content = scale()
        with contextlib.suppress(OSError):
            for number in range(1, 200_000, 2):
                client.send(
                    frames.frame(frames.HEADERS, frames.END_HEADERS, number, client.block(INFER))
                    + frames.frame(frames.DATA, frames.END_STREAM, number, content)
                    + frames.rst_stream(number, frames.CANCEL)
                )
        assert client.ends()
        assert client.goaways[0][1] == frames.ENHANCE_YOUR_CALM
        assert b"calls were taken back" in client.goaways[0][2]
        ordinary.go_on()


def test_calls_with_names_that_nobody_has_seen(daemon: DaemonProcess) -> None:
    """Two connections ask for unknown methods, each with fifty new header names: all are answered, and so are the others."""
    count = 500

    def ask(client: FrameClient, of: str) -> None:
        with client:
            for number in range(count):
                fields = {f"{of}-{number}-{n}": "value" for n in range(50)}
                client.data(client.open(f"/nothing/{number}", **fields), b"", end=True)
            for number in range(count):
                assert client.answer(2 * number + 1).text == f"Method not found: /nothing/{number}"

    with Ordinary(daemon) as ordinary, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, FrameClient(port(daemon)), of) for of in ("a", "b")]
        ordinary.go_on()
        for each in asked:
            each.result()
        ordinary.go_on()
