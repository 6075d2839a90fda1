"""Where CPU workers and the loops of all run and with how many threads, in a real daemon, as the kernel sees it."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from config.core_list import describe
from tests.daemon_process import ROOT, DaemonProcess, tensorctl_status, wait_until
from tests.repositories import write_model

#: They double any number of values. The worker's loop runs the first two, the second one with Python in its midst.
ANY_LENGTH = """
inputs = {"x": "FP32[n]"}
outputs = {"y": "FP32[n]"}

def create(path, config, device):
    return (lambda params, inputs: {"y": inputs["x"] * 2}), None
"""
ASKS_BACK = """
import jax
import numpy as np

inputs = {"x": "FP32[n]"}
outputs = {"y": "FP32[n]"}

def create(path, config, device):
    def apply(params, inputs):
        x = inputs["x"]
        return {"y": jax.pure_callback(lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)}
    return apply, None
"""
#: Each of its instances has a thread besides its own.
PYTHON = """
import threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 2)]) for x in inputs]
"""
PYTHON_CONFIG = """
backend: "python"
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [ { count: 2 kind: KIND_CPU } ]
"""


def test_workers_run_on_their_cores_and_tensorctl_says_so(tmp_path: Path) -> None:
    ours = sorted(os.sched_getaffinity(0))
    cores = [str(ours[-1]), describe(ours)]
    control = tmp_path / "control.sock"
    sections = {
        "repository": {"control_mode": "explicit"},
        "workers": {"cpu": 2, "pin": True, "cores": cores, "threads": 1},
        "lanes": {"apart": False},
        "supervisor": {"control_socket": str(control)},
    }
    with DaemonProcess(tmp_path, [ROOT / "examples" / "models"], sections) as daemon:
        wait_until(lambda: all(worker["ready"] for worker in tensorctl_status(control)["workers"]), "workers", daemon)
        for worker in daemon.workers:
            wanted = cores[int(worker.cmdline()[-1].removeprefix("cpu:"))]
            for task in Path(f"/proc/{worker.pid}/task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since
                    assert f"\nCpus_allowed_list:\t{wanted}\n" in (task / "status").read_text()
        shown = {worker["device"]: worker for worker in tensorctl_status(control)["workers"]}
        assert [shown[f"cpu:{i}"]["cores"] for i in (0, 1)] == cores
        assert all(worker["threads"] > 1 for worker in shown.values())


def test_a_core_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, [ROOT / "examples" / "models"], {"workers": {"cores": ["8191"], "pin": True}})
    command = [sys.executable, "-m", "daemon", "serve", "--config", str(daemon.config)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1
    assert "workers.cores: worker 0 is to run on cores 8191" in done.stderr
    assert f"this process may use {describe(os.sched_getaffinity(0))}" in done.stderr


@contextlib.contextmanager
def two_cores() -> Iterator[tuple[int, int]]:
    """What is started inside may use these only."""
    ours = os.sched_getaffinity(0)
    if len(ours) < 2:
        pytest.skip("there is one core: no loop can be kept off another")
    first, last, *_ = sorted(ours)
    os.sched_setaffinity(0, {first, last})
    try:
        yield first, last
    finally:
        os.sched_setaffinity(0, ours)


def threads(pid: int) -> tuple[set[int], list[set[int]]]:
    """The cores of the process's main thread, and of each other one."""
    others = []
    for task in os.listdir(f"/proc/{pid}/task"):
        if int(task) != pid:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                others.append(os.sched_getaffinity(int(task)))
    return os.sched_getaffinity(pid), others


def others_are_free(pid: int, cores: set[int]) -> bool:
    """Whether all threads but the main one may use these cores."""
    return all(found == cores for found in threads(pid)[1])


def up(control: Path, deaths: int = 0) -> bool:
    """Whether all fronts and workers are, and have died so often together."""
    shown = tensorctl_status(control)
    processes = [*shown["fronts"], *shown["workers"]]
    return all(process["ready"] for process in processes) and sum(p["deaths"] for p in processes) == deaths


def test_loops_of_fronts_and_workers_are_kept_on_different_cores_and_their_other_threads_nowhere(
    tmp_path: Path,
) -> None:
    """
    1. Models of every kind are loaded and used, shapes are compiled that none had before, traces are written.
       Result: each loop is on its core, and whatever thread that started may use both.
    2. A front and a worker are killed.
       Result: their replacements are kept where they were.
    """
    models, control, traces = tmp_path / "models", tmp_path / "control.sock", tmp_path / "traces"
    write_model(models, "any_length", ANY_LENGTH)
    write_model(models, "asks_back", ASKS_BACK)
    write_model(models, "two", ANY_LENGTH, "instance_group [ { count: 2 kind: KIND_CPU } ]")
    write_model(models, "python", PYTHON, PYTHON_CONFIG)
    sections = {
        "http": {"processes": 2},
        "repository": {"control_mode": "explicit"},
        "lanes": {"apart": True},
        "workers": {"pin": True},
        "supervisor": {"control_socket": str(control)},
        "trace": {"level": ["TIMESTAMPS"], "rate": 1, "file": str(traces)},
    }
    with contextlib.ExitStack() as stack:
        with two_cores() as (first, last):
            daemon = stack.enter_context(DaemonProcess(tmp_path, [models], sections))
        wait_until(lambda: up(control), "fronts and workers", daemon)

        def check() -> None:
            shown = tensorctl_status(control)
            wanted = {"http-0": first, "http-1": last, "grpc-0": first, "worker-0": last}
            for process in (*shown["fronts"], *shown["workers"]):
                loop, _ = threads(process["pid"])
                assert (process["name"], loop) == (process["name"], {wanted[process["name"]]})
                assert process["loop"] == str(wanted[process["name"]])
                # One that writes traces leaves the loop's core as its first step.
                free = functools.partial(others_are_free, process["pid"], {first, last})
                wait_until(free, f"free threads of {process['name']}", daemon)
                if process["name"] == "worker-0":
                    assert process["cores"] == describe((first, last))
                    assert process["threads"] > 1

        check()
        before = sum(len(threads(front.pid)[1]) for front in daemon.fronts)
        for model in ("any_length", "asks_back", "two", "python"):
            assert daemon.request("POST", f"/v2/repository/models/{model}/load", b"{}")[0] == 200
            for length in (1, 7, 4096):
                values = {"name": "x", "shape": [length], "datatype": "FP32", "data": [2.0] * length}
                status, answer = daemon.infer(model, [values])
                assert (status, answer["outputs"][0]["data"]) == (200, [4.0] * length)
        wait_until(lambda: traces.exists() and traces.stat().st_size, "traces", daemon)
        check()
        # Those that write traces came by request.
        assert sum(len(threads(front.pid)[1]) for front in daemon.fronts) > before
        (worker,) = daemon.workers
        worker.kill()
        daemon.fronts[1].kill()
        wait_until(lambda: up(control, deaths=2), "their replacements", daemon)
        check()


@pytest.mark.parametrize(
    "section",
    [{"lanes": {"apart": False}, "workers": {"pin": True}}, {"lanes": {"apart": True}, "workers": {"pin": False}}],
)
def test_loops_run_where_the_kernel_puts_them_if_they_are_not_to_be_kept(
    tmp_path: Path, section: dict[str, dict[str, Any]]
) -> None:
    control = tmp_path / "control.sock"
    sections = section | {"repository": {"control_mode": "explicit"}, "supervisor": {"control_socket": str(control)}}
    with contextlib.ExitStack() as stack:
        with two_cores() as both:
            daemon = stack.enter_context(DaemonProcess(tmp_path, [ROOT / "examples" / "models"], sections))
        wait_until(lambda: up(control), "fronts and workers", daemon)
        shown = tensorctl_status(control)
        for process in (*shown["fronts"], *shown["workers"]):
            loop, others = threads(process["pid"])
            assert all(cores == set(both) for cores in (loop, *others))
            assert process["cores"] == process["loop"] == describe(both)
