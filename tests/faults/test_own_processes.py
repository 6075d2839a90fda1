"""Processes that a model starts, in whatever way, end with the model, and those of others beside it go on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.repositories import fields, write_model

#: Each way leaves its process in a list, so that nobody ends it by forgetting it.
MODEL = """
import multiprocessing, os, subprocess, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(9999)"]
STUBBORN = [sys.executable, "-S", "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(9999)"]

def note(*pids):
    with open(FILE, "a") as file:
        file.write("".join(f"{pid}\\n" for pid in pids))

def popen(**more):
    return subprocess.Popen(SLEEP, **more).pid

def in_a_thread(function):
    found = []
    thread = threading.Timer(0, lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]

def forked():
    pid = os.fork()
    if pid == 0:
        # And what it executes, once it is nobody's child any more.
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.execv(SLEEP[0], SLEEP)
        time.sleep(9999)
    return pid

def stubborn():
    process = subprocess.Popen(STUBBORN, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process.pid

def system():
    os.system(" ".join(f"'{word}'" for word in SLEEP) + " & echo $! > " + FILE + "." + NAME)
    return int(open(FILE + "." + NAME).read())

def pool():
    global kept
    kept = multiprocessing.get_context("spawn").Pool(2)
    return [process.pid for process in kept._pool]

def fork_server():
    global served
    served = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(9999,))
    served.start()
    return served.pid

class TritonPythonModel:
    def initialize(self, args):
        note(popen(), popen(env={}), popen(start_new_session=True), popen(close_fds=False))
        note(os.posix_spawn(SLEEP[0], SLEEP, os.environ), os.spawnv(os.P_NOWAIT, SLEEP[0], SLEEP))
        note(in_a_thread(popen), forked(), stubborn(), system(), *pool(), fork_server(), 0)
    def execute(self, requests):
        y = pb_utils.Tensor("y", np.ones(4, np.float32))
        return [pb_utils.InferenceResponse([y]) for _ in requests]
    def finalize(self):
        note(popen())
"""
IO = fields("x FP32 4", "y FP32 4")
#: The last one that a model notes is 0.
WAYS = 13
X = [{"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}]


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def daemon(tmp_path: Path, leaves_nothing: None) -> DaemonProcess:
    """Returns a daemon that is started without a fork, because a forked process has not its own environment in /proc."""
    for name in ("one", "other"):
        told = f"FILE, NAME = {str(tmp_path / name)!r}, {name!r}\n"
        write_model(tmp_path / "models", name, told + MODEL, IO)
    options = {"repository": {"control_mode": "explicit", "load": ["one"]}}
    made = DaemonProcess(tmp_path, [tmp_path / "models"], options)
    made.program = [sys.executable, "-m", "tensord"]
    return made


def started(daemon: DaemonProcess, name: str) -> list[psutil.Process]:
    """Returns the processes that a model has started by the end of ``initialize``, and their children."""
    file = daemon.folder / name
    wait_until(lambda: file.exists() and file.read_text().endswith("\n0\n"), "a model's processes", daemon)
    found = [psutil.Process(int(pid)) for pid in file.read_text().split()[:-1]]
    assert len(found) == WAYS, file.read_text()
    # One of the ways: a fork of a fork, which executes.
    wait_until(lambda: any("-S" in each.cmdline() for each in found[7].children()), "the fork's child", daemon)
    return [*found, *found[7].children()]


def both_started(daemon: DaemonProcess) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Starts both models one after the other; returns their processes.

    A fork while another thread starts a program would hold that program up.
    """
    daemon.wait_ready()
    one = started(daemon, "one")
    assert daemon.request("POST", "/v2/repository/models/other/load", b"{}")[0] == 200
    return one, started(daemon, "other")


def test_they_end_with_their_model(daemon: DaemonProcess) -> None:
    """
    1. Two models start processes in every way there is. 2. One is unloaded, which starts one more.
    Result: all of it is gone, also what takes no notice of SIGTERM, and nothing of the other one.
    """
    with daemon:
        one, other = both_started(daemon)
        assert all(map(lives, [*one, *other]))
        assert daemon.request("POST", "/v2/repository/models/one/unload", b"{}")[0] == 200
        daemon.wait_log("model 'one' left .* processes running: they are ended")
        daemon.wait_log("model 'one' version 1 is unloaded")
        late = int((daemon.folder / "one").read_text().split()[-1])
        assert late
        assert not any(map(lives, one))
        assert not psutil.pid_exists(late) or psutil.Process(late).status() == psutil.STATUS_ZOMBIE
        assert all(map(lives, other))
        assert daemon.infer("other", X)[0] == 200
        assert daemon.stop() == 0
    psutil.wait_procs(other, timeout=PATIENCE)
    assert not any(map(lives, other))


def test_a_load_that_fails(tmp_path: Path, start_daemon: Callable[..., DaemonProcess]) -> None:
    """Processes that the load had started are ended as well."""
    source = f"""
        import subprocess
        inputs = outputs = {{"x": "FP32[4]"}}
        def create(path, config, device):
            with open({str(tmp_path / "pid")!r}, "w") as file:
                file.write(str(subprocess.Popen(["sleep", "9999"]).pid))
            raise ValueError("no")
    """
    write_model(tmp_path / "models", "fails", source)
    daemon = start_daemon(tmp_path / "models", repository={"control_mode": "explicit"})
    daemon.wait_ready()
    assert daemon.request("POST", "/v2/repository/models/fails/load", b"{}")[0] == 400
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "its end")
    index = json.loads(daemon.request("POST", "/v2/repository/index", b"")[1])
    assert index[0]["state"] == "UNAVAILABLE"
