"""The measurement of several fronts, at a real daemon: it counts every request, and every front's part."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from bench import closed_loop, grpc_connection
from bench.fronts import Server, closed, flags, opened
from bench.open_loop import arrivals
from tensord.config import layers
from tensord.config.options import Options
from tensord.daemon.flags import FlagCommand, settings
from tests.daemon_process import ROOT, DaemonProcess


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_nothing_is_lost(protocol: str, tmp_path: Path, leaves_nothing: None) -> None:
    rows = {row.name: row for row in [*closed_loop.rows(), *grpc_connection.rows()]}
    small = rows[f"small-{protocol}-c4"]
    options = {protocol: {"processes": 2}, "repository": {"control_mode": "explicit", "load": ["addsub"]}}
    with DaemonProcess(tmp_path, [ROOT / "bench" / "models"], options) as daemon:
        daemon.wait_ready()
        address = daemon.grpc_url if protocol == "grpc" else daemon.url
        server = Server(protocol, 2, daemon.pid, address, daemon.url)
        run = server.run(opened(small, arrivals(500, 1.0)))
        assert run.lost == 0
        # What was still on its way when the loop ended may be counted by the daemon, and not by the loop.
        run = server.run(closed(small, 1.0))
        assert run.lost <= 0
        assert 0.5 <= run.busiest <= 1
        assert min(run.rate, run.p50_us) > 0


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_daemons_beside_each_other_share_no_port(protocol: str) -> None:
    def ports(options: Options) -> set[int]:
        listeners = (options.http, options.grpc, options.metrics)
        return {listener.port for listener in listeners if listener.enabled}

    config = ROOT / "bench" / "serve.toml"
    every = []
    for fronts in (1, 2, 64):
        with FlagCommand("serve").make_context("serve", list(flags(protocol, fronts))) as context:
            every.append(layers.load(config, {}, settings(context)))
    for one, other in itertools.combinations(every, 2):
        assert not ports(one) & ports(other)
    assert [getattr(options, protocol).processes for options in every] == [1, 2, 64]
