"""The measurement of steps, at a real daemon: each connection steps through a sequence, and every answer is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fronts import Server
from bench.sequence_steps import compare, probe, write_stateless
from bench.server import answered
from tests.daemon_process import ROOT, DaemonProcess


def test_steps_and_stateless_requests_are_answered_rightly(tmp_path: Path, leaves_nothing: None) -> None:
    write_stateless(tmp_path / "models")
    options = {"repository": {"control_mode": "explicit", "load": ["rnn", "rnn_alone"]}}
    with DaemonProcess(tmp_path, [ROOT / "bench" / "models", tmp_path / "models"], options) as daemon:
        daemon.wait_ready()
        for protocol, address in (("http", daemon.url), ("grpc", daemon.grpc_url)):
            before = [answered(daemon.url, model) for model in ("rnn_alone", "rnn")]
            ((alone, step),) = compare(Server(protocol, 1, daemon.pid, address, daemon.url), 3, 1, 0.1)
            assert min(alone.rate, step.rate) > 0
            now = [answered(daemon.url, model) for model in ("rnn_alone", "rnn")]
            assert all(later > earlier for later, earlier in zip(now, before, strict=True))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_probe_finds_every_sequence(workers: int) -> None:
    best, median = probe(workers, rounds=2)
    assert 0 < best <= median
