"""Clients that take their memory away: it costs them their own requests and nobody else anything."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from shm import guard
from tests import repositories
from tests.daemon_process import DaemonProcess
from tests.faults.load import CheckedLoad

pytestmark = pytest.mark.skipif(not guard.available, reason="the C extension was not built")

SIZE = 1 << 20


@contextlib.contextmanager
def hostile_object(client: httpclient.InferenceServerClient) -> Iterator[tuple[str, Path]]:
    """A region of a megabyte that is about to lose its memory."""
    name = f"tensord-test-{uuid.uuid4().hex}"
    path = Path("/dev/shm", name)
    path.write_bytes(np.arange(SIZE // 4, dtype=np.float32).tobytes())
    client.register_system_shared_memory(name, "/" + name, SIZE)
    try:
        yield name, path
    finally:
        client.unregister_system_shared_memory(name)
        path.unlink(missing_ok=True)


def whole(region: str) -> httpclient.InferInput:
    made = httpclient.InferInput("x", [SIZE // 4], "FP32")
    made.set_shared_memory(region, SIZE)
    return made


@pytest.fixture
def daemon(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> DaemonProcess:
    repository = repositories.echo_models(tmp_path / "repository")
    repositories.scale_model(repository)
    daemon = start_daemon(repository)
    daemon.wait_ready()
    return daemon


def test_a_truncated_input(daemon: DaemonProcess) -> None:
    """
    1. A region is registered and used. 2. Its owner truncates it and uses it again.
    Result: an error that says so, for that region alone; registering it again heals it; the worker is the same.
    """
    workers = {worker.pid for worker in daemon.workers}
    with (
        httpclient.InferenceServerClient(daemon.url) as client,
        CheckedLoad(daemon, 4) as load,
        hostile_object(client) as (region, path),
    ):
        values = client.infer("echo_fp32", [whole(region)]).as_numpy("y")
        assert values.tolist() == list(range(SIZE // 4))
        os.truncate(path, 4096)
        for _ in range(3):
            with pytest.raises(InferenceServerException, match=f"'{region}' lost its memory"):
                client.infer("echo_fp32", [whole(region)])
        path.write_bytes(bytes(SIZE))
        client.unregister_system_shared_memory(region)
        client.register_system_shared_memory(region, "/" + region, SIZE)
        assert not client.infer("echo_fp32", [whole(region)]).as_numpy("y").any()
    assert {worker.pid for worker in daemon.workers} == workers
    assert load.errors == []
    assert load.wrong == 0


def test_a_truncated_output(daemon: DaemonProcess) -> None:
    """
    1. The region named for the output is truncated to nothing before the request.
    Result: an error; nothing was written anywhere else.
    """
    with httpclient.InferenceServerClient(daemon.url) as client, hostile_object(client) as (region, path):
        os.truncate(path, 0)
        body = httpclient.InferInput("x", [SIZE // 4], "FP32")
        body.set_data_from_numpy(np.ones(SIZE // 4, np.float32))
        wanted = httpclient.InferRequestedOutput("y")
        wanted.set_shared_memory(region, SIZE)
        with pytest.raises(InferenceServerException, match="lost its memory"):
            client.infer("echo_fp32", [body], outputs=[wanted])
        assert path.stat().st_size == 0


def test_truncated_and_grown_all_the_time(daemon: DaemonProcess) -> None:
    """
    1. An attacker truncates and grows its object without pause while it uses it; others do their work.
    Result: the attacker gets answers or errors, everybody else right answers, and no worker dies.
    """
    workers = {worker.pid for worker in daemon.workers}
    stop = threading.Event()
    with (
        httpclient.InferenceServerClient(daemon.url) as client,
        CheckedLoad(daemon, 4) as load,
        hostile_object(client) as (region, path),
    ):

        def attack() -> None:
            while not stop.is_set():
                os.truncate(path, 0)
                os.truncate(path, SIZE)

        attacker = threading.Thread(target=attack)
        attacker.start()
        refused = 0
        for _ in range(100):
            try:
                client.infer("echo_fp32", [whole(region)])
            except InferenceServerException as error:
                refused += 1
                assert region in error.message()
                client.unregister_system_shared_memory(region)
                with contextlib.suppress(InferenceServerException):
                    client.register_system_shared_memory(region, "/" + region, SIZE)
        stop.set()
        attacker.join()
        assert refused
    assert {worker.pid for worker in daemon.workers} == workers
    assert load.errors == []
    assert load.wrong == 0
