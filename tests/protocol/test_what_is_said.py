"""Tests what an operator is told without asking: how far a load is, who killed a worker and where, which parts are off."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.daemon_process import ROOT, DaemonProcess, tensorctl_status, wait_until
from tests.repositories import scale_model, write_model
from tests.scrapes import scrape

Start = Callable[..., DaemonProcess]


def test_a_program_that_calls_python_is_compiled_at_every_start(start_daemon: Start, tmp_path: Path) -> None:
    write_model(
        tmp_path / "models",
        "caller",
        """
        import jax
        import numpy as np

        inputs, outputs = {"x": "FP32[4]"}, {"y": "FP32[4]"}

        def create(path, config, device):
            shape = jax.ShapeDtypeStruct((4,), np.float32)
            return (lambda params, i: {"y": jax.pure_callback(lambda x: np.asarray(x) * 2, shape, i["x"])}), {}
        """,
    )
    daemon = start_daemon(tmp_path / "models", executables={"cache_directory": str(tmp_path / "cache")})
    daemon.wait_ready()
    words = "program for 1 rows of [4] is not cached, and is compiled at every start: it calls Python\n"
    assert f"model 'caller', {words}" in daemon.log


def test_a_failed_load_says_what_is_still_served(start_daemon: Start, tmp_path: Path) -> None:
    """A file that is no Python; code that raises when it is loaded; a version beside the one that is served."""
    models = tmp_path / "models"
    scale_model(models)
    good = (models / "scale" / "1" / "model.py").read_text()
    daemon = start_daemon(models, repository={"control_mode": "explicit", "load": ["scale"]})
    daemon.wait_ready()

    def load() -> int:
        return daemon.request("POST", "/v2/repository/models/scale/load", b"{}")[0]

    write_model(models, "scale", "def create(:")
    assert load() != 200
    daemon.wait_log(
        r"'scale' cannot be polled: model.py of version 1 is not valid Python.*; version 1 is still served\n"
    )
    write_model(models, "scale", good + "\nraise OSError('no')\n")
    assert load() != 200
    daemon.wait_log(r"model 'scale' version 1 failed to load: OSError: no .*; version 1 is still served\n")
    (models / "scale" / "2").mkdir()
    (models / "scale" / "2" / "model.py").write_text(good + "\nraise OSError('neither')\n")
    assert load() != 200
    daemon.wait_log(r"model 'scale' version 2 failed to load: OSError: neither .*; version 1 is still served\n")
    given = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    assert daemon.infer("scale", [given])[0] == 200


def test_how_far_a_load_is(start_daemon: Start, tmp_path: Path) -> None:
    """
    1. A model with four buckets waits in the second for a file. 2. The file comes. 3. Another daemon with the same cache.
    Result: the state says which of how many, the log has a line for each that was compiled and one of what came of all.
    """
    control, gate, cache = tmp_path / "control.sock", tmp_path / "gate", tmp_path / "cache"
    write_model(
        tmp_path / "models",
        "slow",
        f"""
        import pathlib, time
        inputs = {{"x": "FP32[4]"}}
        outputs = {{"y": "FP32[4]"}}
        max_batch_size = 8

        def create(path, config, device):
            def apply(params, inputs):
                while inputs["x"].shape[0] > 1 and not pathlib.Path({str(gate)!r}).exists():
                    time.sleep(0.01)
                return {{"y": 2 * inputs["x"]}}
            return apply, {{}}
        """,
    )
    options = {"supervisor": {"control_socket": str(control)}, "executables": {"cache_directory": str(cache)}}
    daemon = start_daemon(tmp_path / "models", **options)
    state = "compiling slow 2/4, 0 from the cache"
    wait_until(lambda: tensorctl_status(control)["workers"][0]["state"].startswith(state), "the state", daemon)
    wait_until(lambda: f"slow ({state})" in daemon.get("/v2/health/ready")[1].decode(), "the readiness", daemon)
    at = {"worker": "worker-0", "device": f"{daemon.platform}:0", "model": "slow", "version": "1"}
    assert [
        scrape(daemon.metrics_url).value("tensord_worker_load_programs", **at, state=of) for of in ("made", "all")
    ] == [1, 4]
    daemon.wait_log(r"model 'slow' version 1: 1 of 4 compiled in [\d.]+ s: 1 rows of \[4\]")
    assert "2 of 4 compiled" not in daemon.log
    gate.touch()
    daemon.wait_ready()
    daemon.wait_log(r"model 'slow' version 1: 4 executables compiled, 0 from the cache, in [\d.]+ s")
    assert tensorctl_status(control)["workers"][0]["state"] == "idle"
    command = [sys.executable, "-m", "tensord.daemon.ctl", "--socket", str(control), "--json", "models", "list"]
    (listed,) = json.loads(subprocess.check_output(command, cwd=ROOT))
    figures = scrape(daemon.metrics_url)
    for column, metric in (
        *(("programs", "tensord_model_programs"), ("program_bytes", "tensord_model_program_bytes")),
        *(("parameters", "tensord_model_parameter_bytes"), ("largest_batch", "tensord_model_largest_batch_bytes")),
    ):
        assert figures.value(metric, model="slow", version="1") == listed[column]
    assert (listed["programs"], listed["parameters"]) == (4, 0)
    assert min(listed["program_bytes"], listed["largest_batch"] - 2 * 8 * 16 + 1) > 0
    daemon.stop()
    again = start_daemon(tmp_path / "models", **options)
    again.wait_log(r"model 'slow' version 1: 0 executables compiled, 4 from the cache, in [\d.]+ s")
    assert "of 4 compiled" not in again.log


CRASHES = """
import ctypes
inputs = {"x": "FP32[1]"}
outputs = {"y": "FP32[1]"}
host = True

def the_guilty_function():
    ctypes.string_at(0)

def create(path, config, device):
    def apply(params, inputs):
        the_guilty_function()
    return apply, {}
"""


def test_who_killed_the_worker(start_daemon: Start, tmp_path: Path) -> None:
    """A request's model does, with a fault: the log names the model, and the process with its stack."""
    write_model(tmp_path / "models", "crashes", CRASHES)
    scale_model(tmp_path / "models")
    daemon = start_daemon(tmp_path / "models")
    daemon.wait_ready()
    status, answer = daemon.infer("crashes", [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}])
    assert (status, "worker processes ended while they had it" in answer["error"]) == (500, True)
    gone = rf"http-0\W+the worker on {daemon.platform}:0 is gone with 1 requests; it was executing 1 of model 'crashes'"
    daemon.wait_log(gone, 2)
    daemon.wait_log(r"worker-0 \(process \d+\) died: Fatal Python error: Segmentation fault", 2)
    daemon.wait_log(
        r"worker-0 \(process \d+\) died:   File \".*/crashes/1/model.py\", line \d+ in the_guilty_function", 2
    )


def test_where_a_worker_hung(start_daemon: Start, tmp_path: Path) -> None:
    """A worker that is killed because a load takes too long says where it was."""
    write_model(
        tmp_path / "models",
        "hangs",
        """
        inputs = outputs = {"x": "FP32[1]"}

        def never_returns():
            while True:
                pass

        def create(path, config, device):
            never_returns()
        """,
    )
    daemon = start_daemon(tmp_path / "models", workers={"load_timeout": 0.5})
    daemon.wait_log(r"worker-0 \(process \d+\) loads one model for more than 0.5 s: killing it")
    daemon.wait_log(r"worker-0 \(process \d+\) died:   File \".*/hangs/1/model.py\", line \d+ in never_returns")
    daemon.wait_log(r"worker-0 \(process \d+\) was killed by SIGKILL while loading model 'hangs' version 1")


def test_a_front_that_dies_says_where(start_daemon: Start, tmp_path: Path) -> None:
    scale_model(tmp_path / "models")
    daemon = start_daemon(tmp_path / "models")
    daemon.wait_ready()
    daemon.fronts[0].send_signal(signal.SIGSEGV)
    daemon.wait_log(r"http-0 \(process \d+\) died: Fatal Python error: Segmentation fault")
    daemon.wait_log(r"http-0 \(process \d+\) was killed by SIGSEGV; its replacement starts")


@pytest.mark.parametrize("broken", [False, True])
def test_parts_in_c_that_are_missing(start_daemon: Start, tmp_path: Path, broken: bool) -> None:
    """Said once, with the reason and what to do, in the log and by tensorctl; everything works all the same."""
    error = "ImportError('GLIBC_9.99 not found')" if broken else "ModuleNotFoundError(name)"
    (tmp_path / "sitecustomize.py").write_text(
        dedent(
            f"""
            import sys

            class Without:
                @staticmethod
                def find_spec(name, path=None, target=None):
                    own = name.startswith(("tensord.daemon.grpc._", "tensord.workers.native._")) and "__" not in name
                    if own or name == "tensord.shm._guard":
                        raise {error}

            sys.meta_path.insert(0, Without)
            """
        )
    )
    control = tmp_path / "control.sock"
    scale_model(tmp_path / "models")
    folder = tmp_path / "daemon"
    folder.mkdir()
    options = {"supervisor": {"control_socket": str(control)}, "workers": {"cpu": 2}}
    daemon = DaemonProcess(folder, [tmp_path / "models"], options, environment={"PYTHONPATH": str(tmp_path)})
    with daemon:
        daemon.wait_ready()
        reason = "GLIBC_9.99 not found" if broken else "it was not built"
        off = r"supervisor\W+parts of tensord that are written in C are off: (.*)\n"
        # A front's line may come after it is ready.
        wait_until(lambda: len(re.findall(off, daemon.log)) > 1, "both lines", daemon)
        both = re.findall(off, daemon.log)
        (of_front,) = [each for each in both if "walk" in each]
        (said,) = [each for each in both if "walk" not in each]
        advice = (
            "to build them, install a C compiler and Python's headers, then install tensord again "
            "(in a checkout: make serve, or pip install -e .)"
        )
        assert of_front == (
            f"header blocks are decoded in Python (tensord.daemon.grpc._hpack: {reason}); "
            f"every message is decoded in full (tensord.daemon.grpc._walk: {reason}); {advice}"
        )
        for part in ("tensord.shm._guard", "tensord.workers.native._native"):
            assert f"({part}: {reason})" in said
        assert said.endswith(f"; {advice}")
        assert "takes its memory in another way" not in daemon.log
        with grpc.insecure_channel(daemon.grpc_url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for number in range(3):
                metadata = (("traceparent", f"00-{number:032x}-{number:016x}-01"),)
                assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=30 + number, metadata=metadata).live
        command = [sys.executable, "-m", "tensord.daemon.ctl", "--socket", str(control), "status"]
        status = subprocess.check_output(command, cwd=ROOT, text=True)
        assert f"off: {said}\n" in status
        assert f"off: {of_front}\n" in status
        given = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0, 1, 2, 3]}
        assert daemon.infer("scale", [given])[1]["outputs"][0]["data"] == [1, 4, 7, 10]
