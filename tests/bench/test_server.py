from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.server import Usage, children, serving
from tests.daemon_process import wait_until


def test_usage_counts_work_and_sleeps() -> None:
    before = Usage.of(os.getpid())
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    used = Usage.of(os.getpid()).since(before)
    assert used.user_us + used.kernel_us >= 100_000
    # Waiting sleeps. Not every sleep counts: on a busy core it may be over before the process has left the processor.
    wait_until(lambda: Usage.of(os.getpid()).since(before).sleeps >= 20, "twenty sleeps")


def test_children_are_named_by_the_module_they_run() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            wait_until(lambda: children(os.getpid()).get(process.pid) == "http.server", "the child's command line")
        finally:
            process.kill()


def test_nobody_else_is_measured_in_a_servers_place(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        # It would be started, and another one found at its address.
        with (
            pytest.raises(SystemExit, match=f"cannot serve on {address}: somebody else does"),
            serving([sys.executable, "-c", ""], address, tmp_path / "log"),
        ):
            pass
    assert not (tmp_path / "log").exists()
