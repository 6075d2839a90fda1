"""A daemon that is restarted behind sockets that stay open: nobody is refused, and nobody is told that there is no such model."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until

#: Puts the descriptors that it is told where a service manager does, and becomes the daemon.
ACTIVATION = """
import os, sys
fds = [int(fd) for fd in sys.argv[1].split(",")]
for at, fd in enumerate(fds):
    os.dup2(fd, 100 + at)
for at in range(len(fds)):
    os.dup2(100 + at, 3 + at)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": sys.argv[2]}
os.execv(sys.executable, [sys.executable, "-m", "tensord", *sys.argv[3:]])
"""
MODELS = ("scale", "slow", "twice")
BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Writes a model, one that takes a while to load, and an ensemble that waits for both."""
    models = repositories.scale_model(tmp_path / "models")
    repositories.scale_model(models, "slow")
    file = models / "slow" / "1" / "model.py"
    file.write_text(f"import time\n{file.read_text()}".replace("    def apply", "    time.sleep(2)\n    def apply"))
    steps = [("scale", {"x": "x"}, {"y": "between"}), ("slow", {"x": "between"}, {"y": "y"})]
    repositories.ensemble(models, "twice", ["x FP32 4"], ["y FP32 4"], steps, max_batch_size=8)
    return models


@pytest.fixture
def behind_sockets(tmp_path: Path, repository: Path, leaves_nothing: None) -> Iterator[DaemonProcess]:
    """Runs a daemon whose listening sockets belong to this process. ``port`` is HTTP's."""
    with socket.create_server(("127.0.0.1", 0)) as over_http, socket.create_server(("127.0.0.1", 0)) as over_grpc:
        daemon = DaemonProcess(tmp_path, [repository])
        daemon.pass_fds = (over_http.fileno(), over_grpc.fileno())
        fds = ",".join(map(str, daemon.pass_fds))
        daemon.program = [sys.executable, "-c", ACTIVATION, fds, "http:grpc"]
        with daemon:
            daemon.wait_ready()
            yield daemon


def over_http(daemon: DaemonProcess) -> Callable[[str], str]:
    """Asks on a connection of its own each time."""

    def ask(model: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE)
        try:
            connection.request("POST", f"/v2/models/{model}/infer", BODY)
            answer = connection.getresponse()
            text = answer.read()
        except OSError as error:
            return f"cut: {type(error).__name__}"
        finally:
            connection.close()
        return "200" if answer.status == 200 else f"{answer.status}: {text.decode()}"

    return ask


#: How grpc says that the peer of a connection is gone: it was reading, or about to write.
_CUT = ("Socket closed", "Connection reset", "Broken pipe")


def over_grpc(daemon: DaemonProcess) -> Callable[[str], str]:
    """Asks on one channel, which connects again by itself."""
    call = grpc.insecure_channel(daemon.grpc_url).unary_unary("/inference.GRPCInferenceService/ModelInfer")
    return lambda model: _told(lambda: call(_request(model), timeout=PATIENCE, wait_for_ready=True))


def over_streams(daemon: DaemonProcess) -> Callable[[str], str]:
    """Asks by a stream of its own each time, on one channel."""
    call = grpc.insecure_channel(daemon.grpc_url).stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
    )

    def answered(model: str) -> None:
        answers = call(iter([_request(model)]), timeout=PATIENCE, wait_for_ready=True)
        answer = next(answers)
        assert not answer.error_message, answer
        try:
            assert not list(answers)
        except grpc.RpcError as error:
            # It has its answer, and had not said yet that it asks no more.
            if error.details() != "the server is stopping":
                raise

    return lambda model: _told(lambda: answered(model))


def _request(model: str) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model)
    made = request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    made.contents.fp32_contents.extend([1, 2, 3, 4])
    return bytes(request.SerializeToString())


def _told(call: Callable[[], object]) -> str:
    """Runs a call; returns what a client would say of it."""
    try:
        call()
    except grpc.RpcError as error:
        if any(said in error.details() for said in _CUT):
            # Until grpc's own thread has seen the end: a call right behind this one would go to the same dead connection.
            time.sleep(1)
            return "cut"
        return f"{error.code().name}: {error.details()}"
    except AssertionError as error:
        return str(error)
    return "200"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_under_load(behind_sockets: DaemonProcess, how: signal.Signals) -> None:
    """
    1. Clients of both protocols, by streams as well, ask models that load at once, for long, and after others.
    2. The daemon ends and is started again.
    Result: after SIGTERM not one request fails; after SIGKILL those that were under way are cut, and no other one fails.
    """
    daemon, stop, answers = behind_sockets, threading.Event(), Counter[str]()
    counted = [0]

    def run(ask: Callable[[str], str], model: str) -> None:
        while not stop.is_set():
            answers[ask(model)] += 1
            counted[0] += 1

    clients = [
        threading.Thread(target=run, args=(way(daemon), model))
        for way in (over_http, over_grpc, over_streams)
        for model in MODELS
    ]
    for client in clients:
        client.start()
    try:
        wait_until(lambda: counted[0] > 100, "answers", daemon)
        assert answers.keys() == {"200"}
        if how is signal.SIGTERM:
            assert daemon.stop() == 0
        else:
            os.kill(daemon.pid, how)
            daemon.stop()
        daemon.start()
        daemon.wait_ready()
        seen = counted[0]
        wait_until(lambda: counted[0] > seen + 100, "answers", daemon)
    finally:
        stop.set()
        for client in clients:
            client.join(PATIENCE)
    cut = sum(count for answer, count in answers.items() if answer.startswith("cut"))
    assert {answer for answer in answers if not answer.startswith("cut")} == {"200"}
    assert cut <= (0 if how is signal.SIGTERM else len(clients)), (answers, daemon.log)
