"""Gives the tests' daemons GPU workers although the host has no GPU: ``pytest --on-stub``, or ``GPU_WORKERS`` for one daemon.

``--on-gpus`` puts the daemons on this host's GPUs instead. On the stub the driver and JAX's plugin are the tests' stand-ins
(``tests/cuda_stub``), and each queued copy takes a while, so that a copy that is not waited for has not happened yet. A test that
needs a CPU worker says so: ``@pytest.mark.cpu_workers(reason)``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_stub.library import CudaStub

#: What ``workers`` of a daemon's options have then. XLA:CPU plays XLA on a GPU, where small programs have no client of their own.
GPU_WORKERS = {"device": "cuda", "single_thread_flops": 0}
_VARIABLE = "PYTEST_TENSORD_ON_STUB"
_ON_GPUS = "PYTEST_TENSORD_ON_GPUS"
#: What ``workers`` of a daemon's options have on real GPUs, which daemons of several tests share.
_HARDWARE = {"device": "cuda", "gpu_memory_fraction": 0.05, "gpu_preallocate": False}
_DEVICES = 8
#: Of each queued copy, in microseconds, where the command line says nothing else.
_DELAY = 300


def daemon_on(kind: str, stub: CudaStub) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns options and environment of a daemon with "cpu" or "cuda" workers whose clients have memory on the stub's GPUs."""
    return ({"workers": GPU_WORKERS}, stub.gpu_environment) if kind == "cuda" else ({}, stub.environment)


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--on-stub", action="store_true", help="daemons have GPU workers, on the stand-in for the driver")
    parser.addoption("--on-gpus", action="store_true", help="daemons have workers on this host's GPUs")
    parser.addoption(
        "--stub-delay", type=int, default=_DELAY, metavar="US", help="how long each copy that is queued takes then"
    )


def configure(config: pytest.Config) -> None:
    """Sets this process and those that it starts to GPU workers if the command line says so."""
    if config.getoption("--on-stub"):
        os.environ[_VARIABLE] = str(config.getoption("--stub-delay"))
        config.add_cleanup(lambda: os.environ.pop(_VARIABLE, None))
    if config.getoption("--on-gpus"):
        os.environ[_ON_GPUS] = "1"
        config.add_cleanup(lambda: os.environ.pop(_ON_GPUS, None))


def wanted() -> bool:
    """Returns whether daemons are to have GPU workers on the stub."""
    return _VARIABLE in os.environ


def devices(folder: Path, count: int) -> dict[str, str]:
    """Returns an environment with ``count`` stub devices; a daemon that is started with it has a worker on each."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}
    return CudaStub(folder, count, _delay()).environment | visible


def _delay() -> int:
    return int(os.environ[_VARIABLE])


def skip(items: list[pytest.Item]) -> None:
    """Skips tests of CPU workers if daemons have GPU workers."""
    if wanted() or _ON_GPUS in os.environ:
        for item in items:
            for mark in item.iter_markers("cpu_workers"):
                item.add_marker(pytest.mark.skip(reason=f"about CPU workers: {mark.args[0]}"))


def move(folder: Path, workers: dict[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """Changes a daemon's options from CPU workers to GPU workers, and returns its environment.

    Args:
      folder: the daemon's own.
      environment: variables that the daemon has besides this process's. Devices of a stub that it names stay the same.
    """
    if _ON_GPUS in os.environ and workers.get("device") != "auto" and "CUDA_STUB_DIR" not in environment:
        if workers.get("devices_per_worker", 1) > 1:
            pytest.skip("several GPUs for one worker: --on-gpus knows of one")
        workers |= _HARDWARE | {"per_gpu": workers.get("cpu", 1)}
        return dict(environment)
    if "CUDA_STUB_UNIFIED" in environment or not wanted() or workers.get("device") == "auto":
        return dict(environment)
    given = dict(environment)
    if "CUDA_STUB_DIR" not in environment:
        # Of each daemon that is started there.
        made = Path(tempfile.mkdtemp(prefix="gpus-", dir=folder))
        given |= CudaStub(made, _DEVICES, _delay()).environment
    # Tests of every kind of model; plugin.py says of which kinds it cannot delay the results.
    given["CUDA_STUB_XLA_AT_ONCE"] = "1"
    count = workers.get("cpu", 1) * workers.get("devices_per_worker", 1)
    workers |= GPU_WORKERS
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))} | CudaStub.on_gpu(given)
