"""One count of the models that are not served, in every place that shows one: health, index, log, tensorctl, metrics."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tritonclient.grpc as grpcclient

from tests.daemon_process import ROOT, DaemonProcess, tensorctl_status, wait_until
from tests.repositories import scale_model, write_model
from tests.scrapes import scrape

Start = Callable[..., DaemonProcess]
BROKEN = "def create(path, config, device):\n    raise OSError('no')\n"


def index(daemon: DaemonProcess) -> list[dict[str, Any]]:
    return list(json.loads(daemon.request("POST", "/v2/repository/index", b"")[1]))


def grpc_ready(daemon: DaemonProcess) -> bool:
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        return bool(client.is_server_ready())


def test_one_count_everywhere(start_daemon: Start, tmp_path: Path) -> None:
    """
    1. Of five models one does not load, one has no version, one cannot be read, and one is in two repositories.
    2. They are taken away, and the daemon is told.
    Result: the same four names and numbers in each place; then ready, and nobody speaks of them any more.
    """
    models, others, control = tmp_path / "models", tmp_path / "others", tmp_path / "control.sock"
    scale_model(models)
    write_model(models, "broken", "inputs = outputs = {'x': 'FP32[1]'}\n" + BROKEN)
    (models / "empty").mkdir()
    (models / "empty" / "config.pbtxt").write_text('backend: "jax"')
    write_model(models, "unreadable", "", "nonsense: 1")
    for repository in (models, others):
        write_model(repository, "twice", "")
    daemon = start_daemon(models, others, supervisor={"control_socket": str(control)})
    daemon.wait_log(r"ready: 1 models")
    sentence = "4 of 5 models are not served: broken, empty, twice, unreadable"
    assert f"not ready: 1 models (scale 1) on {daemon.platform}:0; {sentence}" in daemon.log
    status, body = daemon.get("/v2/health/ready")
    assert (status, json.loads(body)) == (400, {"ready": False, "error": sentence})
    assert not grpc_ready(daemon)
    reasons = {entry["name"]: (entry["state"], entry.get("reason", "")) for entry in index(daemon)}
    assert reasons["scale"] == ("READY", "")
    for name, words in (
        ("broken", "OSError: no"),
        ("empty", "it has no version folder"),
        ("twice", "model appears in two or more repositories"),
        ("unreadable", "line 1, column 1"),
    ):
        assert reasons[name][0] == "UNAVAILABLE"
        assert words in reasons[name][1]
    told = tensorctl_status(control)
    assert (told["phase"], told["ready"], told["models"]) == ("serving", False, {"wanted": 5, "served": 1})
    assert [model["name"] for model in told["not_served"]] == ["broken", "empty", "twice", "unreadable"]
    command = [sys.executable, "-m", "tensord.daemon.ctl", "--socket", str(control), "status"]
    text = subprocess.check_output(command, cwd=ROOT, text=True)
    assert "serving, not ready, 1 of 5 models served" in text
    assert "not served: broken: version 1: OSError: no" in text
    samples = scrape(daemon.metrics_url)
    served = {"broken": 0, "empty": 0, "scale": 1, "twice": 0, "unreadable": 0}
    assert samples.of("tensord_model_served", "model") == served
    assert samples.value("tensord_ready") == 0

    shutil.rmtree(others)
    others.mkdir()
    for name in ("broken", "empty", "twice", "unreadable"):
        shutil.rmtree(models / name)
    daemon.signal(signal.SIGHUP)
    daemon.wait_ready()
    assert grpc_ready(daemon)
    assert index(daemon) == [{"name": "scale", "version": "1", "state": "READY"}]
    told = tensorctl_status(control)
    assert (told["ready"], told["not_served"]) == (True, [])
    assert scrape(daemon.metrics_url).of("tensord_model_served", "model") == {"scale": 1}
    daemon.wait_log(r"\] ready: 1 of 1 models are served; gone: ")


def test_a_bad_new_version_takes_no_host_out(start_daemon: Start, tmp_path: Path) -> None:
    """
    1. A new version cannot be loaded. 2. It is taken away again.
    Result: the old one answers and the host is ready all the while; the version is known with its reason, then not at all.
    """
    models, control = tmp_path / "models", tmp_path / "control.sock"
    scale_model(models)
    daemon = start_daemon(models, supervisor={"control_socket": str(control)})
    daemon.wait_ready()
    version = write_model(models, "scale", "inputs = outputs = {'x': 'FP32[4]'}\n" + BROKEN, version=2)
    daemon.signal(signal.SIGHUP)
    daemon.wait_log("version 2 failed to load")
    daemon.wait_ready()
    assert [(entry["version"], entry["state"]) for entry in index(daemon)] == [("1", "READY"), ("2", "UNAVAILABLE")]
    (behind,) = tensorctl_status(control)["not_served"]
    assert (behind["name"], behind["served"]) == ("scale", [1])
    assert "version 2: OSError: no" in behind["reason"]
    given = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0, 1, 2, 3]}
    assert daemon.infer("scale", [given])[1]["outputs"][0]["data"] == [1, 4, 7, 10]
    shutil.rmtree(version)
    daemon.signal(signal.SIGHUP)
    wait_until(lambda: len(index(daemon)) == 1, "the version to be forgotten", daemon)
    wait_until(lambda: not tensorctl_status(control)["not_served"], "the model to be loaded again", daemon)
    assert index(daemon) == [{"name": "scale", "version": "1", "state": "READY"}]
    assert daemon.get("/v2/health/ready") == (200, b'{"ready":true}')


def test_a_refused_model_takes_no_host_out_after_a_crash(tmp_path: Path) -> None:
    """
    1. Beside a model that is served comes one that cannot be loaded. 2. The daemon is killed and started again, twice.
    3. It is stopped and started again.
    Result: it is ready but for the last start, which waits for all that is wanted.
    """
    models, kept = tmp_path / "models", {"RUNTIME_DIRECTORY": str(tmp_path)}
    scale_model(models)

    def started(name: str) -> DaemonProcess:
        (tmp_path / name).mkdir()
        return DaemonProcess(tmp_path / name, [models], environment=kept, ready=False)

    with started("first") as daemon:
        daemon.wait_ready()
        write_model(models, "refused", "inputs = outputs = {'x': 'FP32[4]'}\n" + BROKEN)
        daemon.signal(signal.SIGHUP)
        daemon.wait_log("model 'refused' version 1 failed to load")
        assert daemon.get("/v2/health/ready")[0] == 200
        daemon.signal(signal.SIGKILL)
    for name in ("second", "third"):
        with started(name) as daemon:
            daemon.wait_log("model 'refused' version 1 failed to load")
            daemon.wait_ready()
            if name == "second":
                daemon.signal(signal.SIGKILL)
    with started("fourth") as daemon:
        daemon.wait_log("not ready: 1 models .*; 1 of 2 models are not served: refused")
        assert daemon.get("/v2/health/ready")[0] == 400


def test_a_new_name_takes_no_host_out(start_daemon: Start, tmp_path: Path) -> None:
    """
    1. A daemon that serves polls its folder; a model comes that loads for as long as it may, and one that cannot be loaded.
    2. What was wanted at the start is broken, and its worker is killed.
    Result: the host is ready all the while, and whoever asks is told what is not served.
    """
    models, control, begun = tmp_path / "models", tmp_path / "control.sock", tmp_path / "begun"
    scale_model(models)
    polled = {"control_mode": "poll", "poll_interval": 0.2}
    daemon = start_daemon(models, supervisor={"control_socket": str(control)}, repository=polled)
    daemon.wait_ready()
    declared = "inputs = outputs = {'x': 'FP32[1]'}\nhost = True\n"
    write_model(models, "broken", declared + BROKEN)
    daemon.wait_log("model 'broken' version 1 failed to load")
    assert daemon.get("/v2/health/ready") == (200, b'{"ready":true}')
    endless = f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\nwhile True: time.sleep(1)\n" + BROKEN
    write_model(models, "endless", declared + endless)
    wait_until(begun.exists, "the load to begin", daemon)
    assert daemon.get("/v2/health/ready") == (200, b'{"ready":true}')
    assert grpc_ready(daemon)
    assert [model["name"] for model in tensorctl_status(control)["not_served"]] == ["broken", "endless"]
    (worker,) = daemon.workers
    worker.kill()
    daemon.wait_log("the worker on .* is gone")
    assert daemon.get("/v2/health/ready") == (200, b'{"ready":true}')


def test_after_the_start_the_log_says_what_is_new(start_daemon: Start, tmp_path: Path) -> None:
    """
    1. Of nine models one is broken at the start; it is edited twice, and good then. 2. Another comes, is edited, and goes.
    Result: one short line for each that is served now or no longer, none for a load that changes nothing; no other is named.
    """
    models, declared = tmp_path / "models", "inputs = outputs = {'x': 'FP32[1]'}\nhost = True\n"
    good = declared + "def create(path, config, device):\n    return (lambda params, inputs: inputs), None\n"
    for number in range(8):
        write_model(models, f"ordinary{number}", good)
    write_model(models, "edited", declared + BROKEN)
    daemon = start_daemon(models, repository={"control_mode": "poll", "poll_interval": 0.2})
    daemon.wait_log(r"\] not ready: 8 models \(ordinary0 1, .*; 1 of 9 models are not served: edited\n")
    write_model(models, "edited", declared + "# still\n" + BROKEN)
    daemon.wait_log(r"(?s)'edited' version 1 failed to load.*'edited' version 1 failed to load")
    write_model(models, "edited", good)
    daemon.wait_log(r"\] ready: 9 of 9 models are served; served now: edited\n")
    write_model(models, "late", good)
    daemon.wait_log(r"\] ready: 10 of 10 models are served; served now: late\n")
    write_model(models, "late", "# again\n" + good)
    daemon.wait_log(r"(?s)'late' version 1 is loaded.*'late' version 1 is loaded")
    shutil.rmtree(models / "late")
    daemon.wait_log(r"\] ready: 9 of 9 models are served; gone: late\n")
    write_model(models, "edited", "def create(:")
    daemon.wait_log(
        r"'edited' cannot be loaded: model.py of version 1 is not valid Python.*; version 1 is still served\n"
    )
    said = [line for line in daemon.log.splitlines() if "ready: " in line]
    assert len(said) == 4
    assert not any("ordinary" in line for line in said[1:])


def test_what_is_required_alone_is_waited_for(start_daemon: Start, tmp_path: Path) -> None:
    """The daemon is not ready until a client has loaded the one that is required, whatever else is broken."""
    models = tmp_path / "models"
    scale_model(models)
    write_model(models, "broken", "inputs = outputs = {'x': 'FP32[1]'}\n" + BROKEN)
    explicit = {"control_mode": "explicit", "load": ["broken"], "required": ["scale"], "exit_on_error": False}
    daemon = start_daemon(models, repository=explicit)
    daemon.wait_log(r"\] not ready: 0 models")
    status, body = daemon.get("/v2/health/ready")
    assert (status, json.loads(body)["error"]) == (400, "2 of 2 models are not served: scale, broken")
    assert daemon.request("POST", "/v2/repository/models/scale/load", b"{}")[0] == 200
    assert daemon.get("/v2/health/ready") == (200, b'{"ready":true}')


def test_workers_killed_from_outside_while_they_load(start_daemon: Start, tmp_path: Path) -> None:
    """
    1. Whoever loads a model is killed, as for want of memory, until the model is given up. 2. There is memory again.
    Result: the log and the index name the model, how its workers ended and when it is tried again; it is served without a word.
    """
    models, control, memory = tmp_path / "models", tmp_path / "control.sock", tmp_path / "memory"
    scale_model(models)
    write_model(
        models,
        "hungry",
        f"""
        import os, pathlib, signal
        inputs = outputs = {{"x": "FP32[1]"}}
        host = True

        def create(path, config, device):
            if not pathlib.Path({str(memory)!r}).exists():
                os.kill(os.getpid(), signal.SIGKILL)
            return (lambda params, inputs: inputs), None
        """,
    )
    daemon = start_daemon(models, supervisor={"control_socket": str(control)})
    daemon.wait_log(r"was killed by SIGKILL while loading model 'hungry' version 1")
    daemon.wait_log(
        r"model 'hungry' version 1 is given up for now: 2 worker processes died while loading it, .* by SIGKILL"
    )
    daemon.wait_log(
        rf"\] not ready: 1 models \(scale 1\) on {daemon.platform}:0; 1 of 2 models are not served: hungry\n"
    )
    (hungry,) = [entry for entry in index(daemon) if entry["name"] == "hungry"]
    assert hungry["state"] == "UNAVAILABLE"
    assert "the last one was killed by SIGKILL; it is tried again in " in hungry["reason"]
    memory.touch()
    daemon.wait_ready()
    assert index(daemon)[0] == {"name": "hungry", "version": "1", "state": "READY"}
    assert tensorctl_status(control)["not_served"] == []
    given = {"name": "x", "datatype": "FP32", "shape": [1], "data": [3]}
    assert daemon.infer("hungry", [given])[0] == 200
