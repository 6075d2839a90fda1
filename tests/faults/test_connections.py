"""Connections that cost the gRPC front something and ask nothing: they go, and who asks does not notice. The daemon is real."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import psutil
import pytest
from tritonclient.grpc import service_pb2

from daemon.grpc import frames
from tests import repositories
from tests.daemon.grpc.frame_client import INFER, STREAM, FrameClient, prefixed
from tests.daemon_process import DaemonProcess, wait_until
from tests.faults.ordinary import Ordinary


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("connections")
    repository = repositories.scale_model(folder / "repository")
    with DaemonProcess(folder, [repository]) as daemon:
        daemon.wait_ready()
        yield daemon


def front(daemon: DaemonProcess) -> psutil.Process:
    """The gRPC front."""
    (process,) = daemon.children("daemon.grpc")
    return process


def port(daemon: DaemonProcess) -> int:
    return int(daemon.grpc_url.rpartition(":")[2])


def scale(count: int = 1) -> bytes:
    """A request for ``scale``."""
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
        wait_until(lambda: process.num_fds() <= before, "the descriptors to be back", daemon)
        for client in clients:
            assert not half or client.ends()
            client.sock.close()
        ordinary.go_on()
