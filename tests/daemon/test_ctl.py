"""tensorctl against a running supervisor."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import pytest

from tensord.daemon.ctl import main
from tensord.shm.figures import SlowReason
from tests import prepared
from tests.daemon.fake_daemon import ROOT, FakeDaemon, write_model


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    folder = tmp_path_factory.mktemp("ctl")
    write_model(folder / "models", "good")
    write_model(folder / "models", "fails")
    running = FakeDaemon(folder, {"repository": {"control_mode": "explicit"}, "workers": {"cpu": 1}})
    running.wait_ready()
    yield running
    assert running.stop() == 0


def tensorctl(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return prepared.run(["tensord.daemon.ctl", "--socket", str(path), *arguments])


def test_models(daemon: FakeDaemon) -> None:
    assert tensorctl(daemon.control, "models", "list").stdout.splitlines() == [
        "name   version  state  parameters  programs  program_bytes  largest_batch  reason",
        "fails",
        "good",
    ]
    assert tensorctl(daemon.control, "models", "load", "good").returncode == 0
    assert "good   1        READY" in tensorctl(daemon.control, "models", "list").stdout
    failed = tensorctl(daemon.control, "models", "load", "fails")
    assert failed.returncode == 1
    assert failed.stderr.startswith("tensorctl: load failed for model 'fails'")
    statistics = json.loads(tensorctl(daemon.control, "--json", "models", "statistics", "good").stdout)
    assert statistics["model_stats"][0]["inference_count"] == 3
    columns, row = (
        line.split() for line in tensorctl(daemon.control, "models", "statistics", "good").stdout.splitlines()
    )
    assert (
        dict(zip(columns, row, strict=False)).items()
        >= {"name": "good", "version": "1", "inferences": "3", "request_us": "2"}.items()
    )
    assert tensorctl(daemon.control, "parameters", "push", "good", "params.npz").returncode == 0
    listed = tensorctl(daemon.control, "parameters", "list", "good").stdout
    assert re.search(r" \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00  operator$", listed, re.M), listed
    shown = tensorctl(daemon.control, "models", "show", "good")
    assert shown.stdout.startswith("good version 1: READY\n")
    assert "    workers: worker-0\n" in shown.stdout
    assert f"    not in C on worker-0: {SlowReason.LARGE.value} (requests: 1)\n" in shown.stdout
    (version,) = json.loads(tensorctl(daemon.control, "--json", "models", "show", "good").stdout)
    assert version["metadata"]["name"] == "good"
    assert json.loads(tensorctl(daemon.control, "models", "show", "good", "--json").stdout) == [version]
    assert tensorctl(daemon.control, "models", "show", "fails").stdout.startswith("fails version 1: UNAVAILABLE\n")
    missing = tensorctl(daemon.control, "models", "show", "nothing")
    assert (missing.returncode, missing.stderr) == (1, "tensorctl: there is no model 'nothing'\n")
    assert tensorctl(daemon.control, "models", "unload", "good").returncode == 0


def test_status_and_regions(daemon: FakeDaemon) -> None:
    text = tensorctl(daemon.control, "status").stdout
    assert text.startswith("tensord: serving, ready, 0 of 1 models served, http://127.0.0.1:")
    assert "worker-0" in text
    assert f"clients: 0 connected, 0 lanes, on {daemon.control.with_name('clients.sock')}\n" in text
    assert json.loads(tensorctl(daemon.control, "--json", "status").stdout)["phase"] == "serving"
    assert tensorctl(daemon.control, "regions", "list").stdout.split()[:5] == [
        "name",
        "kind",
        "key",
        "offset",
        "byte_size",
    ]
    mistyped = tensorctl(daemon.control, "regions", "unregister", "x")
    assert (mistyped.returncode, "'x'" in mistyped.stderr) == (1, True)
    assert tensorctl(daemon.control, "regions", "unregister", "").returncode == 0


def test_a_daemon_started_by_hand_is_found(tmp_path: Path) -> None:
    """No path is named on either side."""
    write_model(tmp_path / "models", "good")
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    running = FakeDaemon(tmp_path, {"supervisor": {"control_socket": ""}}, environment)
    try:
        running.wait_ready()
        command = [sys.executable, "-m", "tensord.daemon.ctl"]
        found = subprocess.check_output([*command, "status"], cwd=ROOT, env=os.environ | environment, text=True)
        assert found.startswith("tensord: serving, ready, 1 of 1 models served, http://127.0.0.1:")
        assert re.search(r", no grpc, http://127\.0\.0\.1:\d+/metrics\n", found)
    finally:
        assert running.stop() == 0


def test_health_is_an_exit_status(daemon: FakeDaemon, tmp_path: Path) -> None:
    done = tensorctl(daemon.control, "health")
    assert (done.returncode, done.stdout.startswith("serving, ready, ")) == (0, True)
    assert tensorctl(tmp_path / "nothing.sock", "health").returncode == 2
    write_model(tmp_path / "models", "fails")
    ill = FakeDaemon(tmp_path, {"workers": {"cpu": 1}})
    try:
        ill.wait_log("1 of 1 models are not served: fails")
        done = tensorctl(ill.control, "--json", "health")
        assert (done.returncode, json.loads(done.stdout)["ready"]) == (1, False)
    finally:
        assert ill.stop() == 0


def test_the_configuration_in_force_and_what_waits(daemon: FakeDaemon) -> None:
    def rows() -> dict[str, list[str]]:
        lines = tensorctl(daemon.control, "config").stdout.splitlines()
        return {line.split()[0]: line.split()[1:] for line in lines}

    source = str(daemon.file)
    assert rows()["http.port"] == ["0", source]
    assert "grpc.port" not in rows()
    assert len(tensorctl(daemon.control, "config", "--all").stdout.splitlines()) > 150
    before = daemon.file.read_text()
    daemon.sections["http"]["keep_alive_timeout"] = 9.0
    daemon.write_config()
    assert rows()["http.keep_alive_timeout"] == ["75.0", "default", "9.0", "restart"]
    assert tensorctl(daemon.control, "reload").returncode == 0
    assert rows()["http.keep_alive_timeout"] == ["75.0", "default", "9.0", "restart"]
    daemon.file.write_text("[http]\nprot = 1\n")
    assert "a reload would be refused: " in tensorctl(daemon.control, "config").stdout
    daemon.file.write_text(before)
    del daemon.sections["http"]["keep_alive_timeout"]
    assert tensorctl(daemon.control, "reload", "--no-wait").returncode == 0


def test_a_reload_fails_with_the_sentence(daemon: FakeDaemon) -> None:
    before = daemon.file.read_text()
    daemon.file.write_text("[http]\nprot = 1\n")
    refused = tensorctl(daemon.control, "reload")
    assert refused.returncode == 1
    assert refused.stderr == (
        "tensorctl: reload refused, the former configuration stays in force: "
        f"{daemon.file}: unknown key http.prot; did you mean http.port?\n"
    )
    daemon.sections["repository"]["load"] = ["fails"]
    daemon.write_config()
    refused = tensorctl(daemon.control, "reload")
    assert refused.returncode == 1
    assert refused.stderr.startswith(
        "tensorctl: the configuration is in force, and 1 of 1 models were not loaded:\n"
        "    load failed for model 'fails': version 1 is at UNAVAILABLE state: "
    )
    assert len(refused.stderr.splitlines()) == 2
    daemon.file.write_text(before)
    del daemon.sections["repository"]["load"]
    assert tensorctl(daemon.control, "reload").returncode == 0


def test_log_and_trace_switches(daemon: FakeDaemon) -> None:
    def log(*arguments: str) -> dict[str, object]:
        return dict(json.loads(tensorctl(daemon.control, "--json", "log", *arguments).stdout))

    assert log()["log_verbose_level"] == 0
    changed = log("--verbose", "1", "--no-warning", "--format", "ISO8601")
    assert (changed["log_verbose_level"], changed["log_warning"], changed["log_format"]) == (1, False, "ISO8601")
    assert "log.verbose" in tensorctl(daemon.control, "config").stdout
    assert "changed while running" in tensorctl(daemon.control, "config").stdout
    assert log("--verbose", "0", "--warning", "--format", "default")["log_warning"] is True
    text = tensorctl(daemon.control, "trace").stdout
    assert re.search(r"^trace_rate +1000$", text, re.MULTILINE)
    assert re.search(r"^trace_rate +7$", tensorctl(daemon.control, "trace", "--rate=7").stdout, re.MULTILINE)
    refused = tensorctl(daemon.control, "trace", "--level=TIMESTAMPS")
    assert (refused.returncode, "trace file name is not given" in refused.stderr) == (1, True)
    assert re.search(r"^trace_rate +1000$", tensorctl(daemon.control, "trace", "--inherit").stdout, re.MULTILINE)


def test_watch_shows_it_again(daemon: FakeDaemon) -> None:
    command = [
        sys.executable,
        "-m",
        "tensord.daemon.ctl",
        "--socket",
        str(daemon.control),
        "models",
        "list",
        "--watch=0.1",
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert [watching.stdout.readline()[:4] for _ in range(6)] == ["name", "fail", "good"] * 2
        watching.terminate()


def test_names_are_completed(daemon: FakeDaemon) -> None:
    words = f"tensorctl --socket {daemon.control} models load g"
    variables = {"_TENSORCTL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "5"}
    command = [sys.executable, "-m", "tensord.daemon.ctl"]
    assert subprocess.check_output(command, cwd=ROOT, env=os.environ | variables, text=True) == "plain,good\n"


def test_json_is_printed_for_every_command(daemon: FakeDaemon) -> None:
    """What there is to say, {} where there is nothing, {"error": ...} for what is refused or not there; never text beside it."""
    path = daemon.control
    words = {name: ["good"] for name in ("load", "unload", "show", "push", "roll-back", "drop")}
    words |= {"push": ["good", "params.npz"], "drop": ["good", "none"], "unregister": ["none"]}
    words |= {"restart": ["worker-9"], "profile": ["worker-9", "1"], "drain": ["--time", "100"]}
    refused = set()
    for name, command in sorted(main.commands.items()):
        below = command.commands.values() if isinstance(command, click.Group) else [command]
        for each in below:
            told = [name] if each is command else [name, str(each.name)]
            asked = tensorctl(path, "--json", *told, *words.get(str(each.name), ()))
            answer = json.loads(asked.stdout)
            if isinstance(answer, dict) and answer.keys() == {"error"}:
                refused.add(each.name)
                assert asked.returncode == 1
            assert asked.stderr == "", told
    tensorctl(path, "undrain")
    assert refused >= {"unregister", "restart", "profile"}
    assert refused.isdisjoint({"load", "unload", "reload", "undrain", "drain", "list", "show"})
    nobody = tensorctl(path.with_name("none.sock"), "--json", "health")
    assert (nobody.returncode, "no tensord answers" in json.loads(nobody.stdout)["error"]) == (2, True)


def test_two_daemons_of_a_user_are_told_apart(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tensord.daemon.ctl"]
    running: list[FakeDaemon] = []
    try:
        for name in ("one", "two"):
            (tmp_path / name / "models").mkdir(parents=True)
            options = {"supervisor": {"control_socket": ""}, "workers": {"cpu": 1}}
            running.append(FakeDaemon(tmp_path / name, options, environment))
            running[-1].wait_ready()
        sockets = [tmp_path / "tensord" / name for name in ("control.sock", f"control-{running[1].process.pid}.sock")]
        asked = subprocess.run(
            [*command, "status"], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
        )
        assert asked.returncode == 2
        assert asked.stderr == (
            f"tensorctl: 2 daemons of this user answer, at '{sockets[0]}', '{sockets[1]}': "
            "name one with --socket or TENSORCTL_SOCKET\n"
        )
        for path in sockets:
            assert tensorctl(path, "health").returncode == 0
        # These load what lies in their repositories, and nothing by name.
        refused = tensorctl(sockets[0], "models", "load", "good")
        assert (refused.returncode, refused.stderr) == (
            1,
            'tensorctl: models are loaded and unloaded by name in mode "explicit" alone, and repository.control_mode is "none": '
            "`tensorctl reload` loads what has changed\n",
        )
    finally:
        assert [daemon.stop() for daemon in running] == [0] * len(running)
    assert not list((tmp_path / "tensord").glob("control*"))


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b"5\n", b"{}\n", b"\xff\n"])
def test_another_server_at_that_socket(tmp_path: Path, answer: bytes) -> None:
    """Such as the daemon's own socket for HTTP."""
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as thread:
        listener.bind(str(tmp_path / "other.sock"))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        served = thread.submit(serve)
        done = tensorctl(tmp_path / "other.sock", "health")
        served.result()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"tensorctl: what answers at '{tmp_path}/other.sock' is not the control socket of a tensord\n"


def test_nobody_there(tmp_path: Path) -> None:
    done = tensorctl(tmp_path / "nothing.sock", "status")
    assert done.returncode == 2
    assert "no tensord answers at" in done.stderr
