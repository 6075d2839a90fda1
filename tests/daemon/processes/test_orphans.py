"""Orphans of a container whose first process is the daemon."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.daemon_process import DaemonProcess, wait_until
from tests.repositories import applying, write_model

#: Becomes the parent of orphans as the first process of a container is, and has one child of its own, which ends among them.
REAPS = """
import asyncio, ctypes, os, subprocess, sys
from types import SimpleNamespace
from tensord.daemon.processes.worker_pool import Orphans

async def main():
    own = subprocess.Popen(["sh", "-c", "read line; exit 7"], stdin=subprocess.PIPE)
    orphans = Orphans(lambda: [SimpleNamespace(pid=own.pid)])
    def children():
        return set(map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split()))
    async def gone(left):
        while children() != left:
            await asyncio.sleep(0.01)
    def leave():
        subprocess.run(["sh", "-c", "for i in 1 2 3 4 5 6 7 8; do (sleep 0.05; exit 3) & done"], check=True)
    leave()
    orphans.watch()
    leave()
    await gone({own.pid})
    own.stdin.close()
    await asyncio.sleep(0.1)
    leave()
    while len(children()) > 1 + 8:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(own.wait)
    await gone(set())
    print(own.returncode)

ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
asyncio.run(main())
"""


def test_all_that_the_daemon_did_not_start_are_reaped() -> None:
    """The status of its own child, which ends before some of them, is left for who waits for it."""
    done = subprocess.run([sys.executable, "-c", REAPS], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


LEAVES = applying(
    """
    subprocess.run(["sh", "-c", "(exit 3) & (sleep 0.01) &"], check=True)
    return {"y": inputs["x"]}
    """,
    "x FP32[1]",
    "y FP32[1]",
    more="import subprocess\nhost = True",
)


def test_a_daemon_that_is_the_first_process(tmp_path: Path) -> None:
    unshared = ["unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*unshared, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace can be made here")
    write_model(tmp_path / "models", "leaves", LEAVES)
    (tmp_path / "daemon").mkdir()
    daemon = DaemonProcess(tmp_path / "daemon", [tmp_path / "models"])
    daemon.program = [*unshared, sys.executable, "-m", "tensord"]
    daemon.start()
    (first,) = psutil.Process(daemon.pid).children()
    try:
        daemon.wait_ready()
        for _ in range(20):
            assert daemon.infer("leaves", [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}])[0] == 200

        def have_been_reaped() -> bool:
            try:
                return all(each.status() != psutil.STATUS_ZOMBIE for each in first.children())
            except psutil.NoSuchProcess:  # reaped while it was looked at: there may be others
                return False

        wait_until(have_been_reaped, "no process that nobody waits for", daemon)
        first.send_signal(signal.SIGTERM)
        daemon.wait_log("stopped")
    finally:
        # The program that made the namespace ends with it.
        first.kill()
        daemon.stop()
