"""Signals that come at any time, and processes that models start: nothing is lost, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import repositories
from tests.daemon_process import PATIENCE, ROOT, DaemonProcess, wait_until

ASK = [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_first_moment(tmp_path: Path, number: signal.Signals, leaves_nothing: None) -> None:
    """
    1. A daemon that has just begun reads its configuration, which is a pipe. 2. It is told to stop; then the configuration comes.
    Result: it says so, and ends with status 0 and without a process left.
    """
    repository, pipe = repositories.scale_model(tmp_path / "models"), tmp_path / "tensord.toml"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "tensord", "serve", f"--model-repository={repository}", "--config", str(pipe)]
    daemon = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with daemon, open(pipe, "w") as configuration:
        for passed_over in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            daemon.send_signal(passed_over)
        daemon.send_signal(number)
        configuration.write('[http]\nport = 0\n[grpc]\nport = 0\n[metrics]\nport = 0\n[workers]\ndevice = "cpu"\n')
        configuration.close()
        _, said = daemon.communicate(timeout=PATIENCE)
    assert f"stopping: {number.name} came while the daemon was started" in said
    assert daemon.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("module", ["tensord.workers", "tensord.daemon.http"])
def test_a_signal_to_all_while_one_imports(
    tmp_path: Path, module: str, number: signal.Signals, leaves_nothing: None
) -> None:
    """
    1. A daemon has just started a process, which imports its modules. 2. Ctrl-C in a terminal goes to the whole process group.
    Result: the daemon stops, with status 0; no process dies of the signal, with a stack trace or a replacement that is announced.
    """
    repository = repositories.scale_model(tmp_path / "models")
    arguments = [f"--model-repository={repository}", *(f"--{name}-port=0" for name in ("http", "grpc", "metrics"))]
    command = [sys.executable, "-m", "tensord", "serve", *arguments, "--device=cpu"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as daemon:
        family = psutil.Process(daemon.pid)
        wait_until(lambda: any(module in child.cmdline() for child in family.children()), "a process of the daemon")
        os.killpg(daemon.pid, number)
        _, said = daemon.communicate(timeout=PATIENCE)
    assert "Traceback" not in said
    assert "replacement" not in said
    assert daemon.returncode == 0


def test_signals_that_mean_nothing(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """SIGUSR1 and SIGUSR2 to every process, as to a whole control group: all go on."""
    daemon = start_daemon(repositories.scale_model(tmp_path / "repository"))
    daemon.wait_ready()
    family = daemon.family()
    for process in family:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(number)
    assert daemon.infer("scale", ASK)[0] == 200
    assert daemon.family() == family


STARTER = """
    import os, subprocess, sys
    inputs = outputs = {{"x": "FP32[4]"}}
    max_batch_size = 8
    host = True

    def create(path, config, device):
        code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(9999)'])"
        started = subprocess.Popen([sys.executable, "-c", code + "; time.sleep(9999)"], start_new_session=True)
        with open({file!r}, "a") as file:
            file.write(f"{{started.pid}}\\n")
        return (lambda params, inputs: inputs), None
"""


def test_what_models_started_ends_with_them(tmp_path: Path, leaves_nothing: None) -> None:
    """
    1. A model starts a process with a session of its own, which starts another.
    2. Its worker is killed. 3. The daemon is stopped.
    Result: both are gone with the worker that the model ran in, each time.
    """
    repository, file = tmp_path / "models", tmp_path / "started"
    repositories.write_model(repository, "starter", STARTER.format(file=str(file)))
    daemon = DaemonProcess(tmp_path, [repository])
    # Not as the tests start one else: what they have prepared has no environment of its own.
    daemon.program = [sys.executable, "-m", "tensord"]

    def started(row: int) -> list[psutil.Process]:
        wait_until(lambda: len(file.read_text().split()) > row, "the model to start a process", daemon)
        first = psutil.Process(int(file.read_text().split()[row]))
        wait_until(lambda: first.children(), "its process to start another", daemon)
        return [first, *first.children()]

    with daemon:
        daemon.wait_ready()
        before = started(0)
        daemon.workers[0].kill()
        psutil.wait_procs(before, timeout=PATIENCE)
        assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in before)
        daemon.wait_log("left 2 processes behind that its models had started")
        after = started(1)
        daemon.wait_ready()
        assert daemon.stop() == 0
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in after)


FORKER = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils
from tensord import models

class TritonPythonModel:
    def execute(self, requests):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            said = []
            x = np.ones((1, 4), np.float32)
            for way in (
                lambda: pb_utils.InferenceRequest(
                    model_name="scale", inputs=[pb_utils.Tensor("x", x)], requested_output_names=["y"]
                ).exec(),
                lambda: models.call("scale", {"x": x}),
                lambda: models.load_model("scale"),
            ):
                try:
                    way()
                except Exception as error:
                    said.append(str(error))
            os.write(writer, "|".join(said).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        answer = pb_utils.Tensor("y", np.array([said], np.object_))
        return [pb_utils.InferenceResponse([answer]) for _ in requests]
"""
FORKER_CONFIG = repositories.fields("x FP32 4", "y STRING 1")


def test_a_call_from_a_process_that_a_model_forked(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """Each way to ask for another model says at once why nobody can answer there."""
    repository = repositories.scale_model(tmp_path / "models")
    repositories.write_model(repository, "forker", FORKER, FORKER_CONFIG)
    daemon = start_daemon(repository)
    daemon.wait_ready()
    status, answer = daemon.infer("forker", [{**ASK[0], "shape": [4]}])
    assert status == 200, answer
    (text,) = answer["outputs"][0]["data"]
    said = text.split("|")
    assert len(said) == 3, said
    assert all("model 'forker' asks for another one in process" in each for each in said)
    assert daemon.infer("scale", ASK)[0] == 200
