"""A process has as many files open as it may while others die: nothing more dies, and everything comes back by itself."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tensord_client
import tritonclient.http as httpclient
from tensord_client.errors import DeadlineExceeded, Unavailable
from tritonclient.utils import InferenceServerException

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.open_files import no_descriptors_left

VALUES = np.array([[1, 2, 3, 4]], np.float32)


@pytest.fixture
def daemon(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> DaemonProcess:
    """Runs a daemon whose requests wait for a worker for a moment only."""
    started = start_daemon(
        repositories.scale_model(tmp_path / "repository"),
        requests={"worker_wait": 0.5},
        clients={"socket": str(tmp_path / "clients.sock")},
    )
    started.wait_ready()
    return started


@contextlib.contextmanager
def asked(daemon: DaemonProcess) -> Iterator[Callable[[], None]]:
    """Connects to the daemon. Yields a function that asks over that connection and checks the answer."""
    with httpclient.InferenceServerClient(daemon.url, connection_timeout=PATIENCE, network_timeout=PATIENCE) as client:
        given = httpclient.InferInput("x", VALUES.shape, "FP32")
        given.set_data_from_numpy(VALUES)

        def ask() -> None:
            assert client.infer("scale", [given]).as_numpy("y").tolist() == [[4, 7, 10, 13]]

        yield ask


def is_answered(ask: Callable[[], None]) -> bool:
    try:
        ask()
    except InferenceServerException as error:
        assert error.status() == "503"
        return False
    return True


def end(process: psutil.Process) -> None:
    process.kill()
    psutil.wait_procs([process], timeout=PATIENCE)


def test_the_supervisor_replaces_no_front(daemon: DaemonProcess) -> None:
    """
    1. The supervisor may open no more files, and a front is killed, which it cannot replace. It says so once.
    2. It may again. Result: a new front answers, and all others are as they were.
    """
    (front,), (worker,) = daemon.fronts, daemon.workers
    with no_descriptors_left(daemon.pid, whatever_closes=True):
        end(front)
        daemon.wait_log("http-0 cannot be started: Too many open files")
    with asked(daemon) as ask:
        ask()
    assert [process.pid for process in daemon.workers] == [worker.pid]
    assert daemon.log.count("cannot be started") == 1
    assert "Traceback" not in daemon.log


def test_who_starts_while_the_limit_is_lowered_does_not_keep_it(daemon: DaemonProcess) -> None:
    former = {process.pid for process in (*daemon.fronts, *daemon.workers)}
    most = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (256, most))
    for process in (*daemon.fronts, *daemon.workers):
        end(process)
    with asked(daemon) as ask:
        wait_until(lambda: is_answered(ask), "answers", daemon)
    new = (*daemon.fronts, *daemon.workers)
    assert not former & {process.pid for process in new}
    assert {resource.prlimit(process.pid, resource.RLIMIT_NOFILE) for process in new} == {(most, most)}


def test_the_supervisor_opens_no_lane(daemon: DaemonProcess) -> None:
    """
    1. The supervisor may open no more files but those of the worker that is killed: it cannot connect fronts with the next one.
    2. Who asks over a connection to the front gets 503. 3. It may again: over the same connection it is answered.
    """
    (front,), (worker,) = daemon.fronts, daemon.workers
    with asked(daemon) as ask:
        ask()
        with no_descriptors_left(daemon.pid):
            end(worker)
            daemon.wait_log("http-0 gets no lane to worker-0 yet: Too many open files")
            assert not is_answered(ask)
        wait_until(lambda: is_answered(ask), "answers", daemon)
    assert [process.pid for process in daemon.fronts] == [front.pid]
    assert daemon.log.count("http-0 gets no lane") == 1
    assert "Traceback" not in daemon.log


def test_a_front_lacks_them(daemon: DaemonProcess) -> None:
    """
    1. A front may open no more files, and the worker is replaced: the front cannot take the lane to the new one.
    2. Who asks over a connection to the front gets 503. 3. It may again: over the same connection it is answered.
    """
    (front,), (worker,) = daemon.fronts, daemon.workers
    with asked(daemon) as ask:
        ask()
        with no_descriptors_left(front.pid, whatever_closes=True):
            end(worker)
            daemon.wait_log("cannot be opened: no descriptor is left")
            assert not is_answered(ask)
        wait_until(lambda: is_answered(ask), "answers", daemon)
    assert [process.pid for process in daemon.fronts] == [front.pid]
    assert "Traceback" not in daemon.log


def test_a_worker_lacks_them(daemon: DaemonProcess, tmp_path: Path) -> None:
    """
    1. A worker may open no more files, and the front is replaced: the worker cannot take the lane to the new one.
    2. Who asks the front gets 503, and a program that asks gets no lane in its time. 3. It may again: both are answered.
    """
    (front,), (worker,) = daemon.fronts, daemon.workers
    with tensord_client.connect(str(tmp_path / "clients.sock")) as client:
        with no_descriptors_left(worker.pid, whatever_closes=True):
            end(front)
            daemon.wait_log("a lane of a front was not opened")
            with httpclient.InferenceServerClient(daemon.url) as anew:
                given = httpclient.InferInput("x", VALUES.shape, "FP32")
                given.set_data_from_numpy(VALUES)
                assert not is_answered(lambda: anew.infer("scale", [given]))
            with pytest.raises((Unavailable, DeadlineExceeded)):
                client.model("scale", timeout=1)({"x": VALUES})
        with asked(daemon) as ask:
            wait_until(lambda: is_answered(ask), "answers", daemon)
        assert client.model("scale")({"x": VALUES})["y"].tolist() == [[4, 7, 10, 13]]
    assert [process.pid for process in daemon.workers] == [worker.pid]
    assert "Traceback" not in daemon.log
