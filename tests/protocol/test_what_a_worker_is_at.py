"""``tensorctl status`` says what a worker has been executing, and loading, for longest, also while its loop stands still."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_process import ROOT, DaemonProcess, tensorctl_status, wait_until
from tests.repositories import write_model

WAITS = """
import pathlib, time
import jax, numpy as np
inputs = {"x": "FP32[4]"}
outputs = {"y": "FP32[4]"}
max_batch_size = 2
host = HOST
folder = pathlib.Path(FOLDER)

def wait(x):
    x = np.asarray(x)
    while x.any() and not (folder / "go").exists():
        time.sleep(0.01)
    return x

def create(path, config, device):
    if LOADS:
        (folder / "loads").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
    def apply(params, inputs):
        x = inputs["x"]
        return {"y": wait(x) if host else jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)}
    return apply, {}
"""
X = {"name": "x", "datatype": "FP32", "shape": [1, 4]}


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("often", [0, 40])
def test_the_oldest(tmp_path: Path, start_daemon: Callable[..., DaemonProcess], host: bool, often: int) -> None:
    """The oldest run is that of a thread's model or of the loop's, answered in Python or (asked often before) in C."""
    control = tmp_path / "control.sock"
    told = f"FOLDER, HOST, LOADS = {str(tmp_path)!r}, {host}, "
    write_model(tmp_path / "models", "waits", told + "False\n" + WAITS, version=3)
    write_model(tmp_path / "models", "other", told + "True\n" + WAITS)
    options = {"control_mode": "explicit", "load": ["waits"]}
    daemon = start_daemon(tmp_path / "models", repository=options, supervisor={"control_socket": str(control)})
    daemon.wait_ready()

    def worker() -> dict[str, Any]:
        (found,) = tensorctl_status(control)["workers"]
        return dict(found)

    for _ in range(often):
        assert daemon.infer("waits", [{**X, "data": [0, 0, 0, 0]}])[0] == 200
    assert (worker()["oldest_execution"], worker()["oldest_load"]) == (None, None)
    others = [
        threading.Thread(target=daemon.request, args=("POST", "/v2/repository/models/other/load", b"{}")),
        threading.Thread(target=daemon.infer, args=("waits", [{**X, "data": [1, 0, 0, 0]}])),
    ]
    try:
        others[0].start()
        wait_until((tmp_path / "loads").exists, "a load", daemon)
        wait_until(lambda: worker()["oldest_load"], "a load to be said", daemon)
        others[1].start()
        wait_until(lambda: (worker()["oldest_execution"] or {}).get("seconds", 0) > 0.3, "an execution", daemon)
        found = worker()
        assert (found["oldest_execution"]["model"], found["oldest_execution"]["version"]) == ("waits", 3)
        assert (found["oldest_load"]["model"], found["oldest_load"]["version"]) == ("other", 1)
        assert found["oldest_load"]["seconds"] >= found["oldest_execution"]["seconds"]
        command = [sys.executable, "-m", "tensord.daemon.ctl", "--socket", str(control), "status"]
        table = subprocess.check_output(command, cwd=ROOT, text=True)
        assert "waits 3, " in table
        assert "other 1, " in table
    finally:
        (tmp_path / "go").touch()
        for other in others:
            other.join()
    wait_until(lambda: worker()["oldest_execution"] is worker()["oldest_load"] is None, "the end of both", daemon)
