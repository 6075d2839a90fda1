from __future__ import annotations

import os
import subprocess
import sys
import time

from bench.server import Usage, children
from tests.daemon_process import wait_until


def test_usage_counts_work_and_sleeps() -> None:
    before = Usage.of(os.getpid())
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    for _ in range(20):
        time.sleep(0.001)
    used = Usage.of(os.getpid()).since(before)
    assert used.user_us + used.kernel_us >= 100_000
    assert used.sleeps >= 20


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
