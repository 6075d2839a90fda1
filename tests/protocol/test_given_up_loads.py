"""A load that nobody wants any more ends at once, whatever it is in, and one that takes very long stands before nobody."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon_process import DaemonProcess, wait_until
from tests.repositories import fields, write_model

IO = """
inputs = {"x": "FP32[4]"}
outputs = {"y": "FP32[4]"}
"""
#: XLA takes some time for it, and cannot be interrupted.
ENDLESS = """
import jax.numpy as jnp

def create(path, config, device):
    def apply(params, inputs):
        x = inputs["x"]
        for step in range(2000):
            x = jnp.sort(jnp.tanh(x * step))
        return {"y": x}
    return apply, {}
"""
QUICK = """
def create(path, config, device):
    return (lambda params, inputs: {"y": inputs["x"] * 2}), {}
"""
ASKED = [{"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}]
POLL = {"control_mode": "poll", "poll_interval": 0.2}


def index(daemon: DaemonProcess) -> dict[str, str]:
    listed = json.loads(daemon.request("POST", "/v2/repository/index", b"")[1])
    return {entry["name"]: entry.get("state", "") for entry in listed}


def answers(daemon: DaemonProcess, name: str) -> bool:
    status, body = daemon.infer(name, ASKED)
    return status == 200 and body["outputs"][0]["data"] == [2, 4, 6, 8]


@pytest.fixture
def apart(tmp_path: Path) -> dict[str, dict[str, object]]:
    """Returns options for a cache of its own, and for programs that count as very long after one second."""
    return {"executables": {"cache_directory": str(tmp_path / "cache")}, "expert": {"long_compile": 1.0}}


def test_a_compilation_that_has_become_pointless(
    tmp_path: Path, start_daemon: Callable[..., DaemonProcess], apart: dict[str, dict[str, object]]
) -> None:
    """
    1. A model whose compilation takes for ever, and one behind it. 2. The first one is edited while it is compiled, to no end.
    3. It is edited again, to be quick. 4. Another endless one comes, and is removed.
    Result: the second one is served beside the first one's compilation; what was edited serves as soon as it can; what was
    removed is gone, and readiness is as if it had not been there.
    """
    models = tmp_path / "models"
    write_model(models, "a_slow", IO + ENDLESS)
    write_model(models, "b_quick", IO + QUICK)
    daemon = start_daemon(models, repository=POLL, **apart)
    wait_until(lambda: index(daemon).get("b_quick") == "READY", "the model behind it to be served", daemon)
    assert index(daemon)["a_slow"] == "LOADING"
    assert answers(daemon, "b_quick")
    write_model(models, "a_slow", IO + ENDLESS + "# edited\n")
    daemon.wait_log("the load of model 'a_slow' version 1 was given up")
    assert index(daemon)["a_slow"] == "LOADING"
    write_model(models, "a_slow", IO + QUICK)
    daemon.wait_log("model 'a_slow' version 1 is loaded")
    assert answers(daemon, "a_slow")
    daemon.wait_ready()
    write_model(models, "c_slow", IO + ENDLESS + "# another one\n")
    wait_until(lambda: index(daemon).get("c_slow") == "LOADING", "its load", daemon)
    shutil.rmtree(models / "c_slow")
    wait_until(lambda: "c_slow" not in index(daemon), "its end", daemon)
    assert daemon.infer("c_slow", ASKED)[0] == 404
    assert daemon.get("/v2/health/ready")[0] == 200


def test_an_unload_ends_a_load(
    tmp_path: Path, start_daemon: Callable[..., DaemonProcess], apart: dict[str, dict[str, object]]
) -> None:
    """The client that loads gets an error, and so does a request that waits for the model; it can be loaded again at once."""
    models = tmp_path / "models"
    write_model(models, "m", IO + ENDLESS)
    daemon = start_daemon(models, repository={"control_mode": "explicit"}, **apart)
    daemon.wait_ready()
    told: list[tuple[int, bytes]] = []
    asking = [
        threading.Thread(target=lambda: told.append(daemon.request("POST", "/v2/repository/models/m/load", b"{}"))),
        threading.Thread(target=lambda: told.append(daemon.request("POST", "/v2/models/m/infer", body))),
    ]
    body = json.dumps({"inputs": ASKED}).encode()
    asking[0].start()
    wait_until(lambda: index(daemon).get("m") == "LOADING", "its load", daemon)
    asking[1].start()
    assert daemon.request("POST", "/v2/repository/models/m/unload", b"{}")[0] == 200
    for thread in asking:
        thread.join()
    assert sorted(status for status, _ in told)[0] == 400
    assert any(b"it was unloaded before it was ready" in answer for _, answer in told)
    assert index(daemon)["m"] == "UNAVAILABLE"
    write_model(models, "m", IO + QUICK)
    status, said = daemon.request("POST", "/v2/repository/models/m/load", b"{}")
    assert status == 200, said
    assert answers(daemon, "m")
    assert daemon.get("/v2/health/ready")[0] == 200


INITIALIZES = """
import pathlib, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        pathlib.Path(FOLDER, "began").touch()
        while not pathlib.Path(FOLDER, "go").exists():
            time.sleep(0.02)
        from helper import name
        self.name = name
    def execute(self, requests):
        return []
    def finalize(self):
        pathlib.Path(FOLDER, self.name).touch()
"""
PYTHON = fields("x FP32 4", "y FP32 4")


def test_an_initialize_that_has_become_pointless(tmp_path: Path, start_daemon: Callable[..., DaemonProcess]) -> None:
    """Nobody waits for it; when it is over after all it has its code, and is finalized."""
    models = tmp_path / "models"
    folder = write_model(models, "m", f"FOLDER = {str(tmp_path)!r}\n" + INITIALIZES, PYTHON)
    (folder / "helper.py").write_text("name = 'finalized'")
    daemon = start_daemon(models, repository=POLL)
    wait_until((tmp_path / "began").exists, "initialize", daemon)
    (models / "m" / "config.pbtxt").unlink()
    write_model(models, "m", IO + QUICK)
    daemon.wait_log("model 'm' version 1 is loaded")
    assert answers(daemon, "m")
    daemon.wait_ready()
    (tmp_path / "go").touch()
    wait_until((tmp_path / "finalized").exists, "finalize", daemon)
    assert answers(daemon, "m")
