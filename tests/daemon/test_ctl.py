"""tensorctl against a running supervisor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.fake_daemon import ROOT, FakeDaemon, write_model


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    folder = tmp_path_factory.mktemp("ctl")
    write_model(folder / "models", "good")
    write_model(folder / "models", "fails")
    running = FakeDaemon(folder, {"repository": {"control_mode": "explicit"}, "workers": {"cpu": 1}})
    running.wait_ready()
    yield running
    assert running.stop() == 0


def tensorctl(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tensord.daemon.ctl", "--socket", str(path), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)


def test_models(daemon: FakeDaemon) -> None:
    assert tensorctl(daemon.control, "models", "list").stdout.splitlines() == [
        "name   version  state  parameters  programs  program_bytes  largest_batch  reason",
        "fails",
        "good",
    ]
    assert tensorctl(daemon.control, "models", "load", "good").returncode == 0
    assert "good   1        READY" in tensorctl(daemon.control, "models", "list").stdout
    failed = tensorctl(daemon.control, "models", "load", "fails")
    assert failed.returncode == 1
    assert failed.stderr.startswith("tensorctl: load failed for model 'fails'")
    statistics = json.loads(tensorctl(daemon.control, "--json", "models", "statistics", "good").stdout)
    assert statistics["model_stats"][0]["inference_count"] == 3
    assert tensorctl(daemon.control, "models", "unload", "good").returncode == 0


def test_status_and_regions(daemon: FakeDaemon) -> None:
    text = tensorctl(daemon.control, "status").stdout
    assert text.startswith("tensord: serving, ready, 0 of 1 models served, http://127.0.0.1:")
    assert "worker-0" in text
    assert f"clients: 0 connected, 0 lanes, on {daemon.control.with_name('clients.sock')}\n" in text
    assert json.loads(tensorctl(daemon.control, "--json", "status").stdout)["phase"] == "serving"
    assert tensorctl(daemon.control, "regions", "list").stdout.split()[:5] == [
        "name",
        "kind",
        "key",
        "offset",
        "byte_size",
    ]
    assert tensorctl(daemon.control, "regions", "unregister", "x").returncode == 0


def test_a_daemon_started_by_hand_is_found(tmp_path: Path) -> None:
    """No path is named on either side."""
    write_model(tmp_path / "models", "good")
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    running = FakeDaemon(tmp_path, {"supervisor": {"control_socket": ""}}, environment)
    try:
        running.wait_ready()
        command = [sys.executable, "-m", "tensord.daemon.ctl"]
        found = subprocess.check_output([*command, "status"], cwd=ROOT, env=os.environ | environment, text=True)
        assert found.startswith("tensord: serving, ready, 1 of 1 models served, http://127.0.0.1:")
        assert re.search(r", no grpc, http://127\.0\.0\.1:\d+/metrics\n", found)
    finally:
        assert running.stop() == 0


def test_nobody_there(tmp_path: Path) -> None:
    done = tensorctl(tmp_path / "nothing.sock", "status")
    assert done.returncode == 2
    assert "no tensord answers at" in done.stderr
