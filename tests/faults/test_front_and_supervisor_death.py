"""A killed front is replaced and the models stay; a killed supervisor leaves no orphan; a stop loses no request."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess, tensorctl_status, wait_until
from tests.faults.load import CheckedLoad

ASK = [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]


def sleep(pool: ThreadPoolExecutor, daemon: DaemonProcess, delay_ms: int, began: Path) -> Future[Any]:
    """Sends a request that takes so long; returns when the model has begun to run it."""
    given = [{"name": "DELAY_MS", "shape": [1], "datatype": "INT32", "data": [delay_ms]}]
    asked = pool.submit(daemon.infer, "sleepy", given, parameters={"began": str(began)})
    wait_until(lambda: began.exists() or asked.done(), "the model to begin", daemon)
    return asked


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    """Runs a daemon for tests that leave it as it was."""
    repository = repositories.scale_model(tmp_path_factory.mktemp("repository"))
    return daemon_of(repository)


def test_front_killed(daemon: DaemonProcess) -> None:
    """
    1. The HTTP front is killed, three times.
    Result: the listening socket never goes away, a new front answers, and the worker with its models is the same process.
    """
    workers = {worker.pid for worker in daemon.workers}
    for _ in range(3):
        (front,) = daemon.fronts
        front.kill()
        psutil.wait_procs([front], timeout=PATIENCE)
        # Connections made now wait in the socket's backlog for the next front, which knows everything once it takes them.
        status, answer = daemon.infer("scale", ASK)
        assert (status, answer["outputs"][0]["data"]) == (200, [4, 7, 10, 13])
    assert {worker.pid for worker in daemon.workers} == workers


def test_one_of_three_fronts_killed_under_load(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """
    1. Six clients keep three fronts busy; one front is killed, three times, each time when its predecessor is replaced.
    Result: a client whose connection it had gets an error for the one request that it carried, nobody else gets any; no answer is
    wrong, the other fronts and the worker are the same processes, and there are three fronts in the end.
    """
    control = tmp_path / "control.sock"
    daemon = start_daemon(
        repositories.scale_model(tmp_path / "repository"),
        http={"port": 0, "processes": 3},
        supervisor={"control_socket": str(control)},
    )
    daemon.wait_ready()

    def fronts() -> dict[int, int]:
        """The connections of each front that serves."""
        found = [front for front in tensorctl_status(control)["fronts"] if front["name"].startswith("http")]
        return {front["pid"]: front["connections"] for front in found if front["ready"]}

    workers = {worker.pid for worker in daemon.workers}
    seen: dict[int, int] = {}

    def connected(clients: int, without: int = 0) -> bool:
        seen.clear()
        seen.update(fronts())
        return len(seen) == 3 and sum(seen.values()) == clients and without not in seen

    wait_until(lambda: connected(0), "three fronts", daemon)

    with CheckedLoad(daemon, clients=6) as load:
        for _ in range(3):
            answers = load.answers
            wait_until(lambda answers=answers: load.answers > answers + 100, "answers", daemon)
            wait_until(lambda: connected(6), "all clients", daemon)
            before, errors = dict(seen), len(load.errors)
            killed = max(before, key=before.__getitem__)
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda killed=killed: connected(6, without=killed), "the replacement and all clients", daemon)
            assert seen.keys() >= before.keys() - {killed}
            assert len(load.errors) - errors <= before[killed]
    assert load.wrong == 0
    assert {worker.pid for worker in daemon.workers} == workers


def test_supervisor_killed(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """
    1. The supervisor is killed with SIGKILL while a model executes.
    Result: every process of the daemon is gone.
    """
    repository = repositories.sleepy_model(tmp_path / "repository")
    daemon = start_daemon(repository)
    daemon.wait_ready()
    family = daemon.everybody()
    assert len(family) >= 3
    with ThreadPoolExecutor(1) as pool:
        asked = sleep(pool, daemon, 600_000, tmp_path / "began")
        os.kill(daemon.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=PATIENCE)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert asked.exception(timeout=PATIENCE) is not None


def test_grpc_front_killed(daemon: DaemonProcess) -> None:
    """
    1. The gRPC front is killed.
    Result: a client with patience sees no error, the HTTP front and the worker are the same processes.
    """
    given = grpcclient.InferInput("x", [1, 4], "FP32")
    given.set_data_from_numpy(np.ones((1, 4), np.float32))
    others = {process.pid for process in daemon.family() if "tensord.daemon.grpc" not in process.cmdline()}
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        assert client.infer("scale", [given]).as_numpy("y").tolist() == [[4.0] * 4]
        (front,) = (process for process in daemon.family() if "tensord.daemon.grpc" in process.cmdline())
        front.kill()
        psutil.wait_procs([front], timeout=PATIENCE)

        def answered() -> bool:
            try:
                return bool(client.infer("scale", [given]).as_numpy("y").tolist() == [[4.0] * 4])
            except InferenceServerException as error:
                # Cut off, or the new front is still being told of the models.
                assert error.status() in ("StatusCode.UNAVAILABLE", "StatusCode.NOT_FOUND"), error
                return False

        wait_until(answered, "an answer of the next gRPC front", daemon)
    assert others < {process.pid for process in daemon.family()}
    assert daemon.infer("scale", ASK)[0] == 200


def test_a_pause_of_everybody(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """
    1. All processes stand still for longer than any of them may, as in a container that is paused. 2. They go on.
    Result: nobody is killed for it; the same processes answer.
    """
    # On a busy machine each of them may get its next turn seconds after the others: the limit is far from that.
    workers, expert = {"device": "cpu", "idle_timeout": 4.0}, {"start_timeout": PATIENCE}
    daemon = start_daemon(repositories.scale_model(tmp_path / "repository"), workers=workers, expert=expert)
    daemon.wait_ready()
    family = daemon.family()
    for process in family:
        process.suspend()
    time.sleep(7)
    for process in family:
        process.resume()
    time.sleep(2)
    assert daemon.infer("scale", ASK)[0] == 200
    assert daemon.family() == family, daemon.log
    assert "killing it" not in daemon.log
