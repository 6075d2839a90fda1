"""Tests where CPU workers run and with how many threads, in a real daemon, as the kernel sees it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensord.config.core_list import describe
from tests.daemon_process import ROOT, DaemonProcess, tensorctl_status, wait_until

pytestmark = pytest.mark.cpu_workers("their cores")


def test_workers_run_on_their_cores_and_tensorctl_says_so(tmp_path: Path) -> None:
    ours = sorted(os.sched_getaffinity(0))
    cores = [str(ours[-1]), describe(ours)]
    control = tmp_path / "control.sock"
    sections = {
        "repository": {"control_mode": "explicit"},
        "workers": {"cpu": 2, "pin": True, "cores": cores, "threads": 1},
        "supervisor": {"control_socket": str(control)},
    }
    with DaemonProcess(tmp_path, [ROOT / "examples" / "models"], sections) as daemon:
        wait_until(lambda: all(worker["ready"] for worker in tensorctl_status(control)["workers"]), "workers", daemon)
        for worker in daemon.workers:
            wanted = cores[int(worker.cmdline()[-1].removeprefix("cpu:"))]
            for task in Path(f"/proc/{worker.pid}/task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since
                    assert f"\nCpus_allowed_list:\t{wanted}\n" in (task / "status").read_text()
        shown = {worker["device"]: worker for worker in tensorctl_status(control)["workers"]}
        assert [shown[f"cpu:{i}"]["cores"] for i in (0, 1)] == cores
        assert all(worker["threads"] > 1 for worker in shown.values())


def test_a_core_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, [ROOT / "examples" / "models"], {"workers": {"cores": ["8191"], "pin": True}})
    command = [sys.executable, "-m", "tensord", "serve", "--config", str(daemon.config)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1
    assert "workers.cores: worker 0 is to run on cores 8191" in done.stderr
    assert f"this process may use {describe(os.sched_getaffinity(0))}" in done.stderr
