"""The first ten minutes on a GPU, tried on a host without one: all of it comes to its end and is said. No figure counts."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.report import markdown
from bench.server import ROOT
from tests import run_folder
from tests.cuda_stub.library import CudaStub


def free_ports(count: int) -> int:
    """Returns the first of ``count`` free ports in a row, below those that tests get which ask for any port."""
    first_of_any = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(first_of_any // 2, first_of_any - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for number in range(port, port + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
            return port


@pytest.mark.release("on a host with a GPU, where it is used, somebody looks at it")
def test_dry(tmp_path: Path) -> None:
    folder = tmp_path / "cuda"
    folder.mkdir()
    stub = CudaStub(folder, delay_us=100)
    # Small programs have no other client of XLA there.
    environment = os.environ | stub.gpu_environment
    environment |= {
        "TENSORD_WORKERS_SINGLE_THREAD_FLOPS": "0",
        "TENSORD_EXECUTABLES_CACHE_DIRECTORY": run_folder.programs(),
    }
    command = [sys.executable, "-m", "bench.gpu", "--out", str(tmp_path / "out"), "--seconds", "0.1", "--largest", "1"]
    command += ["--port", str(free_ports(3))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["host"]["gpus"] == ["0"]
    served = report["serve"]
    assert "stopped" not in served, served
    killed = served["kill -9 under four clients"]
    assert (killed["clients"]["errors"], len(set(killed["before"]) | set(killed["after"]))) == (0, 2)
    assert served["1MiB-grpc-cuda-c1 on cuda"]["errors"] == 0
    # What is beside the CPU's was measured; of tensors of 16 MiB there were none.
    written = (tmp_path / "out" / "gpu.md").read_text()
    rows = {
        line.split(" | ")[0].removeprefix("| "): line for line in written.splitlines()[::-1] if line.startswith("| ")
    }
    assert (
        "not measured" not in rows["small-http-c1, above the CPU worker's"] + rows["mlp-grpc-c32, of the CPU worker's"]
    )
    assert rows["kill -9 under four clients"].endswith("| 0 errors | yes |")
    assert "not measured" in rows["16 MiB CUDA region, by gRPC"]


def test_what_is_reached_is_said() -> None:
    served = {
        "small-http-c1 on cuda": {"p50_us": 120.0},
        "small-http-c1 on cpu": {"p50_us": 59.0},
        "16MiB-http-system-c4 on cuda": {"rate": 2500.0},
        "in the worker, of a batch of mlp, on cuda": {
            "1": {"batches": 2, "compute_input": 1.0, "compute_infer": 1.0, "compute_output": 1.0},
            "32": {"batches": 7, "compute_input": 100.0, "compute_infer": 150.0, "compute_output": 50.0},
        },
    }
    host = dict.fromkeys(("date", "cards", "gpus", "cores", "processor", "kernel", "python", "commit"), "")
    written = markdown(host | {"packages": {"jax": "0.11"}}, served | {"stopped": "a |\nb"})
    for line in (
        "| small-http-c1, above the CPU worker's | <= 60 us | 61 us | **no** |",
        "| 16 MiB system region, four clients | >= 2500 /s | 2500 /s | yes |",
        "| 32 small requests together, in the worker | <= 300 us | 300 us | yes |",
        "| 16 MiB CUDA region, by gRPC | <= 200 us | not measured | |",
        '| small-http-c1 on cpu | {"p50_us": 59.0} |',
        "| stopped | a \\| b |",
    ):
        assert line in written.splitlines()
