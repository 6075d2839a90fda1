"""The rows of GPU memory: they measure where there is a device, if only a stand-in, and say so where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.server import ROOT
from tests.cuda_stub.library import CudaStub
from tests.daemon_process import DaemonProcess


def rows(address: str, environment: dict[str, str]) -> str:
    """Prints the rows in a process of its own, because a process finds its driver, or none, when it starts."""
    code = f"from bench.cuda_regions import report; report({address!r}, 0.05)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_without_a_device() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
    assert "skipped: there is no CUDA device here" in rows("127.0.0.1:1", environment | {"CUDA_VISIBLE_DEVICES": ""})


#: The model that they ask.
IDENTITY = {"repository": {"control_mode": "explicit", "load": ["identity"]}}


def test_with_one(tmp_path: Path) -> None:
    stub = CudaStub(tmp_path)
    with DaemonProcess(tmp_path, [ROOT / "bench" / "models"], IDENTITY, environment=stub.environment) as daemon:
        printed = rows(daemon.url, os.environ | stub.environment).splitlines()
    assert [line.split()[0] for line in printed] == ["1MiB-http-cuda-c1", "16MiB-http-cuda-c1"]
    for line in printed:
        assert "p50" in line, line
        assert "GB/s" in line, line


@pytest.mark.cpu_workers("those of GPUs have a driver")
def test_a_server_without_cuda(tmp_path: Path) -> None:
    stub = CudaStub(tmp_path)
    with DaemonProcess(tmp_path, [ROOT / "bench" / "models"], IDENTITY) as daemon:
        printed = rows(daemon.url, os.environ | stub.environment)
    assert "skipped: failed to register shared memory region: invalid args" in printed
