"""The measurement of several fronts, at a real daemon: it counts every request, and every front's part."""

from __future__ import annotations

from pathlib import Path

from bench.closed_loop import rows
from bench.fronts import Server, closed, opened
from bench.open_loop import arrivals
from tests.daemon_process import ROOT, DaemonProcess


def test_nothing_is_lost(tmp_path: Path, leaves_nothing: None) -> None:
    small = next(row for row in rows() if row.name == "small-http-c4")
    options = {"http": {"port": 0, "processes": 2}, "grpc": {"enabled": False}}
    with DaemonProcess(tmp_path, [ROOT / "bench" / "models"], options) as daemon:
        daemon.wait_ready()
        server = Server(2, daemon.pid, daemon.url)
        run = server.run(opened(small, arrivals(500, 1.0)))
        assert run.lost == 0
        # What was still on its way when the loop ended may be counted by the daemon, and not by the loop.
        run = server.run(closed(small, 1.0))
        assert run.lost <= 0
        assert 0.5 <= run.busiest <= 1
        assert min(run.rate, run.p50_us) > 0
