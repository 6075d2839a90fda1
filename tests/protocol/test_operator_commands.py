"""Tests what an operator has a running daemon do, and what it shows of its clients."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient

from tests import repositories
from tests.daemon.clients.lane_client import LaneClient
from tests.daemon_process import PATIENCE, ROOT, DaemonProcess, tensorctl_status, wait_until
from tests.protocol import sequence_models

BODY = [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]


class Operated(DaemonProcess):
    """A daemon, and tensorctl for it."""

    def tensorctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tensord.daemon.ctl", "--socket", str(self.folder / "control.sock")]
        return subprocess.run(
            [*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE
        )

    def rows(self, command: str) -> list[dict[str, Any]]:
        return list(json.loads(self.tensorctl("--json", command).stdout))


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    folder = tmp_path_factory.mktemp("operated")
    repository = repositories.scale_model(folder / "models")
    repositories.sleepy_model(repository)
    sequence_models.python_model(repository, "sums", "oldest { max_candidate_sequences: 4 }")
    supervisor = {"control_socket": str(folder / "control.sock")}
    clients = {"socket": str(folder / "clients.sock")}
    with Operated(folder, [repository], {"supervisor": supervisor, "clients": clients}) as running:
        running.wait_ready()
        yield running


def test_a_worker_is_replaced_and_no_request_is_lost(daemon: Operated, tmp_path: Path) -> None:
    answers: list[int] = []

    def ask() -> None:
        delay = [{"name": "DELAY_MS", "shape": [1], "datatype": "INT32", "data": [0]}]
        told = {"began": str(tmp_path / "began"), "until": str(tmp_path / "until")}
        answers.append(daemon.infer("sleepy", delay, parameters=told)[0])

    (before,) = daemon.workers
    asking = threading.Thread(target=ask)
    asking.start()
    wait_until((tmp_path / "began").exists, "the request to run", daemon)
    command = [sys.executable, "-m", "tensord.daemon.ctl", "--socket", str(daemon.folder / "control.sock")]
    with subprocess.Popen([*command, "restart", "worker-0"], cwd=ROOT) as restarting:
        daemon.wait_log("worker-0 .* is restarted on request")
        (tmp_path / "until").touch()
        assert daemon.infer("scale", BODY)[0] == 200
        assert restarting.wait(PATIENCE) == 0
    asking.join(PATIENCE)
    assert answers == [200]
    (worker,) = tensorctl_status(daemon.folder / "control.sock")["workers"]
    assert (worker["ready"], worker["deaths"], worker["pid"] != before.pid) == (True, 0, True)
    unknown = daemon.tensorctl("restart", "worker-7")
    assert (unknown.returncode, unknown.stderr) == (1, "tensorctl: no worker 'worker-7' is up; there are worker-0\n")


@pytest.mark.cpu_workers("the stub's driver has nothing to trace")
def test_a_profile_is_taken_while_requests_are_answered(daemon: Operated, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    command = [sys.executable, "-m", "tensord.daemon.ctl", "--socket", str(daemon.folder / "control.sock")]
    words = [*command, "profile", "worker-0", "2", str(folder)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as taking:
        wait_until(folder.exists, "the profile to begin", daemon)
        while taking.poll() is None:
            assert daemon.infer("scale", BODY)[0] == 200
            second = daemon.tensorctl("profile", "worker-0", "1", str(folder))
            if second.returncode:
                assert second.stderr == "tensorctl: a profile of this worker is being taken\n"
        assert taking.communicate()[0] == f"{folder}\n"
    assert taking.returncode == 0
    assert list(folder.rglob("*.xplane.pb"))
    (tmp_path / "file").touch()
    refused = daemon.tensorctl("profile", "worker-0", "1", str(tmp_path / "file" / "x"))
    assert (refused.returncode, "cannot be written: Not a directory" in refused.stderr) == (1, True)
    assert daemon.tensorctl("profile", "worker-0", "61").returncode == 2
    assert "no worker 'worker-9' is up" in daemon.tensorctl("profile", "worker-9", "1").stderr


def test_connections_and_sequences_are_listed(daemon: Operated) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE)
    host, port = daemon.grpc_url.split(":")
    try:
        step = {"inputs": [{"name": "x", "shape": [1], "datatype": "INT32", "data": [5]}]}
        step["parameters"] = {"sequence_id": 77, "sequence_start": True, "sequence_end": False}
        connection.request("POST", "/v2/models/sums/infer", json.dumps(step))
        answer = connection.getresponse()
        assert (answer.status, bool(answer.read())) == (200, True)
        with socket.create_connection((host, int(port))), LaneClient(daemon.folder / "clients.sock") as client:
            client.ask(hello={})
            client.open("scale")
            wait_until(lambda: len(daemon.rows("connections")) == 3, "three clients", daemon)
            by_front = {row.pop("front"): row for row in daemon.rows("connections")}
            idle = by_front["http-0"].pop("idle_s")
            assert idle >= 0
            assert by_front["http-0"] == {
                "owner": "tcp 127.0.0.1",
                "requests": 0,
                "request_bytes": 0,
                "answer_bytes": 0,
            }
            assert by_front["grpc-0"]["requests"] == 0
            assert by_front["clients"]["lanes"] == 1
            assert daemon.tensorctl("connections").stdout.split()[:3] == ["front", "owner", "pid"]
        (row,) = daemon.rows("sequences")
        assert row.pop("idle_s") >= 0
        assert row == {
            "worker": "worker-0",
            "model": "sums",
            "version": 1,
            "id": 77,
            "slot": 0,
            "begun": True,
            "running": False,
            "waiting": 0,
        }
        assert "sums" in daemon.tensorctl("sequences").stdout
    finally:
        connection.close()


def test_recent_errors_are_listed(daemon: Operated) -> None:
    """The latest first, of both protocols, with what was asked and by whom; good answers are not among them."""
    bad = [{"name": "x", "datatype": "FP32", "shape": [1, 5], "data": [1.0] * 5}]
    assert daemon.infer("scale", bad)[0] == 400
    assert daemon.infer("scale", BODY)[0] == 200
    assert daemon.infer("nobody", BODY)[0] == 404
    with (
        grpcclient.InferenceServerClient(daemon.grpc_url) as client,
        pytest.raises(grpcclient.InferenceServerException),
    ):
        client.get_model_metadata("nowhere")
    latest = daemon.rows("errors")[:3]
    assert [(row["front"], row["code"], row["model"]) for row in latest] == [
        ("grpc-0", "NOT_FOUND", ""),
        ("http-0", "404", "nobody"),
        ("http-0", "400", "scale"),
    ]
    assert latest[2]["client"] == "tcp 127.0.0.1"
    assert "shape" in latest[2]["error"]
    assert [row["time"] for row in latest] == sorted((row["time"] for row in latest), reverse=True)
    assert "nowhere" in daemon.tensorctl("errors").stdout
