"""A compiler that dies takes one load with it: no worker, no other model, no request."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

import psutil
import pytest

from tests.daemon_process import DaemonProcess
from tests.repositories import scale_model, write_model

SLOW = """
    import jax.numpy as jnp
    inputs = {"x": "FP32[4]"}
    outputs = {"y": "FP32[4]"}
    max_batch_size = 1

    def create(path, config, device):
        def apply(params, inputs):
            y = inputs["x"]
            for step in range(STEPS):
                y = jnp.sort(jnp.tanh(y * step))
            return {"y": y}
        return apply, None
"""
X = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}


@pytest.mark.cpu_workers("GPU workers compile by themselves")
def test_a_compile_process_is_killed(tmp_path: Path) -> None:
    """
    1. A model is served; another one is being loaded, whose program takes long to compile.
    2. The process that compiles it is killed.
    Result: that load fails and says why, in the repository index as well; the worker is the same, the first model answers during
    all of it, and the second one loads when it is asked for again.
    """
    repository = tmp_path / "models"
    scale_model(repository)
    options = {
        "repository": {"paths": [str(repository)], "control_mode": "explicit", "load": ["scale"]},
        "executables": {"cache_directory": str(tmp_path / "cache")},
    }
    with DaemonProcess(tmp_path, (repository,), options) as daemon:
        daemon.wait_ready()
        (worker,) = daemon.workers
        # Compiling must take longer than a client takes to look, on however slow a machine.
        for steps in (40, 80, 160, 320):
            write_model(repository, "slow", SLOW.replace("STEPS", str(steps)))
            status, answer = load_and_kill(daemon)
            if status != 200:
                break
        said = "model 'slow', program for 1 rows of [4]: the process that compiled it was killed by SIGKILL"
        assert status == 400
        assert said in json.loads(answer)["error"]
        index = json.loads(daemon.request("POST", "/v2/repository/index", b"{}")[1])
        assert [said in model["reason"] for model in index if model["name"] == "slow"] == [True]
        assert daemon.request("POST", "/v2/repository/models/slow/load", b"{}")[0] == 200
        assert daemon.infer("slow", [X])[0] == 200
        assert daemon.workers == [worker]


def load_and_kill(daemon: DaemonProcess) -> tuple[int, bytes]:
    """Loads a model whose compile processes are killed at once; returns the load's answer.

    Other clients are answered meanwhile.
    """
    answers = []
    load = threading.Thread(
        target=lambda: answers.append(daemon.request("POST", "/v2/repository/models/slow/load", b"{}"))
    )
    load.start()
    while load.is_alive():
        # One that was not compiling is replaced in silence.
        for process in daemon.children("tensord.workers.compiling"):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert daemon.infer("scale", [X])[0] == 200
    load.join()
    (answered,) = answers
    return answered
