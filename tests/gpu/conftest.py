"""Provides a daemon on the GPUs of this host, or with ``--on-stub`` on those of the stand-in.

Where there are neither, or no JAX for them, every test here is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tensord.daemon.processes.devices import visible_gpus
from tests import on_stub, repositories
from tests.cuda_owner import CudaOwner
from tests.daemon_process import DaemonProcess


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    reason = missing()
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def missing() -> str:
    """Returns what these tests need and this host lacks; "": nothing."""
    if on_stub.wanted():
        return ""
    found = visible_gpus(os.environ)
    return "" if found.entries else found.reason or "no GPU: there is no CUDA driver, or CUDA_VISIBLE_DEVICES is empty"


@pytest.fixture(scope="session")
def gpu_variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the environment variables with which a process finds the GPUs; none where they are real."""
    return on_stub.devices(tmp_path_factory.mktemp("gpus"), 2) if on_stub.wanted() else {}


@pytest.fixture(scope="session")
def gpu_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("repository")
    repositories.echo_models(repository)
    repositories.scale_model(repository)
    repositories.sleepy_model(repository)
    return repository


@pytest.fixture(scope="module")
def start_gpu_daemon(
    leaves_nothing: None, gpu_repository: Path, gpu_variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., DaemonProcess]]:
    """Yields a function that starts daemons with a worker on each GPU; they live until the module ends."""
    started: list[DaemonProcess] = []

    def start(**workers: Any) -> DaemonProcess:
        # The clients' memory is on the same GPU, and so are the daemons of tests that run beside this one.
        options: dict[str, Any] = {"workers": {"device": "cuda", "gpu_memory_fraction": 0.05, **workers}}
        folder = tmp_path_factory.mktemp("daemon")
        options["clients"] = {"socket": str(folder / "clients.sock")}
        made = DaemonProcess(folder, [gpu_repository], options, environment=gpu_variables)
        started.append(made)
        made.start()
        made.wait_ready()
        # Then every GPU has its worker.
        made.wait_log(r"ready: \d+ models")
        return made

    yield start
    for daemon in started:
        daemon.stop()


@pytest.fixture(scope="module")
def daemon(start_gpu_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    return start_gpu_daemon()


@pytest.fixture
def new_owner(gpu_variables: dict[str, str]) -> Callable[[], CudaOwner]:
    """Returns a function that starts another process with memory on the GPUs."""
    return lambda: CudaOwner(os.environ | gpu_variables)


@pytest.fixture
def owner(new_owner: Callable[[], CudaOwner]) -> Iterator[CudaOwner]:
    with new_owner() as owner:
        yield owner
