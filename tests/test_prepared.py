"""Daemons of the tests begin where their imports are done, and so do their children: else the suite takes twice as long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests import prepared, repositories
from tests.daemon_process import DaemonProcess, wait_until


def test_all_processes_of_a_daemon_are_forked(tmp_path: Path, start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon(repositories.scale_model(tmp_path / "models"), workers={"cpu": 2, "device": "cpu"})
    wait_until(lambda: len(daemon.workers) == 2, "both workers", daemon)
    daemon.wait_ready()
    (front,) = daemon.fronts
    (grpc,) = daemon.children("tensord.daemon.grpc")
    first, second = daemon.workers
    assert all(map(prepared.is_forked, (daemon.pid, front.pid, grpc.pid, first.pid, second.pid)))
    first.kill()
    wait_until(lambda: {one.pid for one in daemon.workers} - {first.pid, second.pid}, "its replacement", daemon)
    assert all(prepared.is_forked(one.pid) for one in daemon.workers)
