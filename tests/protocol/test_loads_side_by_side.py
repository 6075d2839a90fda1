"""Loads do not stand before each other: models are initialised at the same time, and beside one that is traced and compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.daemon_process import DaemonProcess
from tests.repositories import fields, write_model

#: Goes on when the files of all the others are there.
TRITON = """
import pathlib, time
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        folder = pathlib.Path(FOLDER)
        (folder / args["model_name"]).touch()
        until = time.monotonic() + 120
        while not all((folder / name).exists() for name in OTHERS):
            if time.monotonic() > until:
                raise TimeoutError("nobody else is being loaded")
            time.sleep(0.01)
    def execute(self, requests):
        return []
"""
IO = fields("x FP32 4", "y FP32 4")
JAX = """
import pathlib, time
inputs = {"x": "FP32[4]"}
outputs = {"y": "FP32[4]"}
def create(path, config, device):
    def apply(params, inputs):
        (pathlib.Path(FOLDER) / "a_jax").touch()
        until = time.monotonic() + 120
        while not all((pathlib.Path(FOLDER) / name).exists() for name in OTHERS):
            assert time.monotonic() < until, "nobody else is being loaded"
            time.sleep(0.01)
        return {"y": inputs["x"]}
    return apply, {}
"""


def test_models_are_loaded_at_the_same_time(tmp_path: Path, start_daemon: Callable[..., DaemonProcess]) -> None:
    """One is traced until two others are being initialised, which wait for each other and for that one."""
    names = ["a_jax", "b_python", "c_python"]
    told = f"FOLDER, OTHERS = {str(tmp_path)!r}, {names}\n"
    write_model(tmp_path / "models", "a_jax", told + JAX)
    for name in names[1:]:
        write_model(tmp_path / "models", name, told + TRITON, IO)
    write_model(tmp_path / "models", "d_jax", told + JAX)
    cache = {"cache_directory": str(tmp_path / "cache")}
    daemon = start_daemon(tmp_path / "models", executables=cache)
    daemon.wait_log("ready: ")
    index = json.loads(daemon.request("POST", "/v2/repository/index", b"")[1])
    assert {entry["name"]: entry["state"] for entry in index} == dict.fromkeys([*names, "d_jax"], "READY")
