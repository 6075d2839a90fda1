"""The real supervisor with real processes: start, death, hang, reload, stop."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tensord.daemon.supervisor import Tasks
from tests.daemon.fake_daemon import PATIENCE, FakeDaemon, write_model

Start = Callable[..., FakeDaemon]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@pytest.fixture
def start(tmp_path: Path, repository: Path) -> Iterator[Start]:
    daemons: list[FakeDaemon] = []

    def begin(environment: dict[str, str] | None = None, **options: dict[str, Any]) -> FakeDaemon:
        daemons.append(FakeDaemon(tmp_path, options, environment))
        return daemons[-1]

    yield begin
    for daemon in daemons:
        family = psutil.Process(daemon.process.pid).children() if daemon.process.poll() is None else []
        daemon.stop()
        assert not psutil.wait_procs(family, PATIENCE)[1]


def test_start_and_stop(start: Start, repository: Path) -> None:
    """
    1. Two models, one of which fails; two workers.
    Result: the fronts know lanes before models, the good model is on both workers, and the stop leaves nothing.
    """
    write_model(repository, "good", 1, 2)
    write_model(repository, "fails")
    daemon = start()
    daemon.wait_ready()
    told = daemon.ask()
    assert told["early"] == []
    assert len(told["lanes"]) == 2
    good = told["models"]["good/2"]
    assert (good["state"], sorted(good["workers"])) == ("READY", sorted(told["lanes"]))
    assert json.loads(base64.b64decode(good["metadata"]))["name"] == "good"
    assert told["models"]["fails/1"]["state"] == "UNAVAILABLE"
    assert told["models"]["fails/1"]["reason"] == "it always does"
    assert "good/1" not in told["models"]
    assert "try: curl" not in daemon.log  # which is for terminals
    family = [*daemon.workers, *daemon.fronts]
    assert daemon.stop() == 0
    assert not [process for process in family if process.is_running()]
    assert not daemon.control.exists()


def test_a_restart_ends_when_the_new_worker_serves(start: Start, repository: Path) -> None:
    """
    1. A worker is restarted whose model is loaded for a while before it is served.
    Result: who asked for that is answered once requests are sent to the new worker.
    """
    write_model(repository, "late")
    daemon = start(workers={"cpu": 1})
    daemon.wait_ready()
    before = daemon.state("late")["workers"]
    assert daemon.tensorctl("restart", name="worker-0") == {"result": None}
    after = daemon.state("late")["workers"]
    assert (len(before), len(after), before != after) == (1, 1, True)


def test_memory_of_the_supervisor(start: Start, repository: Path) -> None:
    write_model(repository, "good")
    daemon = start({})
    daemon.wait_ready()
    assert psutil.Process(daemon.process.pid).memory_info().rss <= 60 << 20
    maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    assert not [name for name in ("jaxlib", "numpy", "grpc", "uvloop") if f"-packages/{name}/" in maps]


@pytest.fixture
def two_fronts(start: Start, repository: Path) -> Iterator[tuple[FakeDaemon, list[Any]]]:
    """Starts two HTTP fronts in explicit mode, with no model loaded; yields the daemon and a connection to each front."""
    write_model(repository, "good")
    daemon = start(http={"port": 0, "processes": 2}, repository={"control_mode": "explicit"}, workers={"cpu": 1})
    daemon.wait_ready()
    clients = [daemon.front(front.pid) for front in daemon.fronts]
    assert len(clients) == 2
    yield daemon, clients
    for client in clients:
        client.close()


def test_two_fronts_know_the_same(two_fronts: tuple[FakeDaemon, list[Any]]) -> None:
    """
    1. A load is answered through one front; the next question goes to the other. 2. The same for the unload, the other way round.
    Result: each answer is given when both know.
    """
    daemon, (first, second) = two_fronts
    for _ in range(10):
        first.send("LoadModel", name="good")
        assert first.answer()["code"] == ""
        assert second.ask()["models"]["good/1"]["state"] == "READY"
        second.send("UnloadModel", name="good")
        assert second.answer()["code"] == ""
        assert first.ask()["models"]["good/1"]["state"] in ("UNLOADING", "UNAVAILABLE")
    assert [entry["name"] for entry in daemon.status()["fronts"]] == ["http-0", "http-1"]


def test_a_hung_front_is_waited_for(two_fronts: tuple[FakeDaemon, list[Any]]) -> None:
    """
    1. One front is stopped (SIGSTOP); a load is asked for through the other. 2. It goes on. 3. Again, and now it is killed.
    Result: the answer comes when the hung one knows, or is dead; its replacement knows as well.
    """
    daemon, (first, second) = two_fronts
    survivor, hung = first.ask()["pid"], second.ask()["pid"]
    beside = daemon.front(survivor)
    for end in (signal.SIGCONT, signal.SIGKILL):
        os.kill(hung, signal.SIGSTOP)
        first.send("LoadModel", name="good")
        daemon.wait(lambda: beside.ask()["models"].get("good/1", {}).get("state") == "READY", "load")
        assert not first.has_answer()
        os.kill(hung, end)
        assert first.answer()["code"] == ""
        if end == signal.SIGCONT:
            assert second.ask()["models"]["good/1"]["state"] == "READY"
            first.send("UnloadModel", name="good")
            assert first.answer()["code"] == ""
    replacement = daemon.front(daemon.other_front(survivor, hung))
    assert replacement.ask()["models"]["good/1"]["state"] == "READY"
    assert replacement.ask()["early"] == []
    for client in (beside, replacement):
        client.close()


@pytest.mark.parametrize(
    ("operation", "field", "named"),
    [("ChangeLog", "verbose", "log_verbose_level"), ("ChangeTrace", "rate", "trace_rate")],
)
def test_a_setting_is_answered_for_when_every_worker_has_it(
    two_fronts: tuple[FakeDaemon, list[Any]], operation: str, field: str, named: str
) -> None:
    """
    1. The worker is stopped (SIGSTOP); a setting is changed through one front, and read through the other. 2. The worker goes
    on. 3. Again, and now it is killed.
    Result: who reads is answered at once; who changes, when the worker acts by the setting, or is dead.
    """
    daemon, (first, second) = two_fronts
    for value, end in ((7, signal.SIGCONT), (8, signal.SIGKILL)):
        worker = daemon.workers[0].pid
        os.kill(worker, signal.SIGSTOP)
        first.send(operation, **{field: value})

        def is_read(value: int = value) -> bool:
            second.send(operation)
            return bool(int(json.loads(second.answer()["result"])[named]) == value)

        daemon.wait(is_read, "change")
        assert is_read()
        assert not first.has_answer()
        os.kill(worker, end)
        assert int(json.loads(first.answer()["result"])[named]) == value


def test_an_unload_is_answered_when_no_worker_takes_requests_for_the_model(
    two_fronts: tuple[FakeDaemon, list[Any]],
) -> None:
    """
    1. The worker is stopped (SIGSTOP); a model is unloaded through one front, as the other knows. 2. The worker goes on.
    3. Again, and now it is killed.
    Result: the answer comes when the worker has read it, or is dead: before that it answers whoever has a lane of his own.
    """
    daemon, (first, second) = two_fronts
    for end in (signal.SIGCONT, signal.SIGKILL):
        first.send("LoadModel", name="good")
        assert first.answer()["code"] == ""
        worker = daemon.workers[0].pid
        os.kill(worker, signal.SIGSTOP)
        first.send("UnloadModel", name="good")
        daemon.wait(lambda: second.ask()["models"]["good/1"]["state"] == "UNLOADING", "unload")
        assert not first.has_answer()
        os.kill(worker, end)
        assert first.answer()["code"] == ""


@pytest.mark.parametrize("kind", ["worker", "front"])
def test_a_reload_is_done_when_every_process_has_its_settings(
    two_fronts: tuple[FakeDaemon, list[Any]], kind: str
) -> None:
    """
    1. A process is stopped (SIGSTOP); a reload changes a setting of the log. 2. The process goes on.
    Result: only then the reload is done.
    """
    daemon, _ = two_fronts
    stopped = (daemon.workers if kind == "worker" else daemon.fronts)[0].pid
    daemon.sections["log"] = {"verbose": 1}
    daemon.write_config()
    os.kill(stopped, signal.SIGSTOP)
    os.kill(daemon.process.pid, signal.SIGHUP)

    def describe() -> dict[str, Any]:
        return {row["key"]: row["value"] for row in daemon.tensorctl("config")["result"]["keys"]}

    daemon.wait(lambda: describe()["log.verbose"] == 1, "change")
    assert "reload: done" not in daemon.log
    os.kill(stopped, signal.SIGCONT)
    daemon.wait_log("reload: done, 1 keys changed")


def test_a_front_that_hangs_is_replaced(start: Start) -> None:
    """
    1. A front that nobody asks anything is stopped (SIGSTOP).
    Result: it is killed for it, and another one takes its place.
    """
    daemon = start(http={"port": 0, "processes": 2}, workers={"cpu": 1, "idle_timeout": 5.0})
    daemon.wait_ready()
    os.kill(daemon.fronts[0].pid, signal.SIGSTOP)
    daemon.wait_log(r"http-\d \(process \d+\) has not turned its loop for 5 s: killing it")
    daemon.wait_log(r"http-\d \(process \d+\) is up", 3)


def test_a_front_that_starts_keeps_nobody_waiting(two_fronts: tuple[FakeDaemon, list[Any]]) -> None:
    """
    1. One front is killed; while its replacement starts, the other one is asked for loads and unloads.
    Result: all are answered, and the replacement serves with what is true then.
    """
    daemon, (first, second) = two_fronts
    os.kill(second.ask()["pid"], signal.SIGKILL)
    survivor, rounds = first.ask()["pid"], 0
    while len({front.pid for front in daemon.fronts} - {survivor}) == 0 or rounds < 20:
        first.send("LoadModel", name="good")
        assert first.answer()["code"] == ""
        first.send("UnloadModel", name="good")
        assert first.answer()["code"] == ""
        rounds += 1
    first.send("LoadModel", name="good")
    assert first.answer()["code"] == ""
    replacement = daemon.front(daemon.other_front(survivor))
    assert replacement.ask()["models"]["good/1"]["state"] == "READY"
    replacement.close()


def test_a_model_that_kills_its_worker(start: Start, repository: Path) -> None:
    """
    1. Loading one model kills the process, always; another does so once; a third is innocent.
    Result: the first is given up after two workers, the others serve.
    """
    for name in ("dies", "dies_once", "good"):
        write_model(repository, name)
    daemon = start(workers={"cpu": 1})
    daemon.wait_ready()
    assert daemon.state("dies")["state"] == "UNAVAILABLE"
    reason = "2 worker processes died while loading it, the last one was killed by SIGKILL"
    assert daemon.state("dies")["reason"] == reason
    assert f"model 'dies' version 1 is given up for now: {reason}; it is tried again in 5 s" in daemon.log
    assert re.search(
        r"worker-0 \(process \d+\) was killed by SIGKILL while loading .*model 'dies' version 1", daemon.log
    )
    daemon.wait(lambda: len(daemon.state("good")["workers"]) == 1, "good")
    daemon.wait(lambda: len(daemon.state("dies_once")["workers"]) == 1, "dies_once")


def test_explicit_operations(start: Start, repository: Path) -> None:
    for name in ("good", "fails"):
        write_model(repository, name)
    write_model(repository, "badconfig", config="no_such_field: 1")
    (repository / "noversion").mkdir()
    daemon = start(repository={"control_mode": "explicit", "load": ["good"]})
    daemon.wait_ready()
    assert daemon.call("LoadModel", name="nope") == (
        "INTERNAL",
        "failed to load 'nope', failed to poll from model repository",
    )
    assert daemon.call("LoadModel", name="../models/good")[0] == "INTERNAL"
    assert daemon.call("LoadModel", name="badconfig")[0] == "INTERNAL"
    assert daemon.call("LoadModel", name="fails") == (
        "INVALID_ARGUMENT",
        "load failed for model 'fails': version 1 is at UNAVAILABLE state: it always does;\n",
    )
    assert daemon.call("LoadModel", name="noversion") == (
        "INVALID_ARGUMENT",
        "load failed for model 'noversion': at least one version must be available under the version policy of model "
        "'noversion'\n",
    )
    badconfig, *others, noversion = json.loads(daemon.call("RepositoryIndex")[1])
    assert (badconfig.pop("name"), badconfig.pop("state")) == ("badconfig", "UNAVAILABLE")
    assert "line 1, column 1" in badconfig.pop("reason")
    assert not badconfig
    assert others == [
        {"name": "fails", "version": "1", "state": "UNAVAILABLE", "reason": "it always does"},
        {"name": "good", "version": "1", "state": "READY"},
    ]
    reason = "it has no version folder, which is a whole number from 1"
    assert noversion == {"name": "noversion", "state": "UNAVAILABLE", "reason": reason}
    # Unchanged or not: the version is replaced while it serves.
    assert daemon.call("LoadModel", name="good") == ("", "")
    assert b'"loads":2' in base64.b64decode(daemon.state("good")["metadata"])
    os.utime(repository / "good" / "1" / "model.py", (1, 1))
    assert daemon.call("LoadModel", name="good") == ("", "")
    assert b'"loads":3' in base64.b64decode(daemon.state("good")["metadata"])
    # A new version takes the place of the old one.
    write_model(repository, "good", 2)
    assert daemon.call("LoadModel", name="good") == ("", "")
    assert (daemon.state("good", 2)["state"], daemon.state("good", 1)["state"]) == ("READY", "UNAVAILABLE")
    assert daemon.call("LoadModel", name="good", config='{"version_policy": {"all": {}}}') == ("", "")
    assert daemon.state("good", 1)["state"] == "READY"
    assert daemon.call("LoadModel", name="good", config="{")[0] == "INVALID_ARGUMENT"
    assert daemon.call("UnloadModel", name="good") == ("", "")
    assert daemon.call("UnloadModel", name="nope") == ("", "")
    daemon.wait(lambda: daemon.state("good", 2)["reason"] == "unloaded", "unload")
    assert json.loads(daemon.call("RepositoryIndex", ready=True)[1]) == []


def test_model_that_loads_for_ever(start: Start, repository: Path) -> None:
    """
    1. A model's load is never answered.
    Result: its workers are killed, the model is given up, the daemon becomes ready without it.
    """
    write_model(repository, "never")
    daemon = start(workers={"load_timeout": 0.5, "cpu": 1})
    daemon.wait_ready()
    assert daemon.log.count("loads one model for more than 0.5 s") == 2
    assert daemon.state("never")["state"] == "UNAVAILABLE"


def test_reload(start: Start, repository: Path) -> None:
    """
    1. A model is added, another removed, a third changed; SIGHUP. 2. The file is broken; SIGHUP. 3. A fixed key changes; SIGHUP.
    Result: each is applied, refused, or named as needing a restart; the daemon goes on.
    """
    for name in ("stays", "goes", "changes"):
        write_model(repository, name)
    daemon = start()
    daemon.wait_ready()
    workers = {process.pid for process in daemon.workers}
    write_model(repository, "comes")
    os.rename(repository / "goes", repository.parent / "gone")
    os.utime(repository / "changes" / "1" / "model.py", (1, 1))
    os.kill(daemon.process.pid, signal.SIGHUP)
    daemon.wait(lambda: len(daemon.state("comes")["workers"]) == 2, "the new model")
    daemon.wait(lambda: daemon.state("goes")["reason"] == "unloaded", "the end of the old model")
    daemon.wait(lambda: b'"loads":2' in base64.b64decode(daemon.state("changes")["metadata"]), "the changed model")
    assert b'"loads":1' in base64.b64decode(daemon.state("stays")["metadata"])

    daemon.sections["http"]["prot"] = 1
    daemon.write_config()
    os.kill(daemon.process.pid, signal.SIGHUP)
    daemon.wait_log(r"reload refused.*unknown key http.prot; did you mean http.port\?")
    del daemon.sections["http"]["prot"]
    daemon.sections["http"]["max_connections"] = 7
    daemon.sections["log"] = {"verbose": 1}
    daemon.write_config()
    os.kill(daemon.process.pid, signal.SIGHUP)
    daemon.wait_log(r"reload: these keys need a restart: http.max_connections\n")
    assert daemon.state("stays")["state"] == "READY"
    assert {process.pid for process in daemon.workers} == workers


def test_second_signal(start: Start, repository: Path) -> None:
    """
    1. An accepted request takes for ever; SIGTERM; the fronts wait for it. 2. SIGTERM again.
    Result: the daemon exits at once, with 0, and its children with it.
    """
    write_model(repository, "never")
    daemon = start(repository={"control_mode": "explicit"}, supervisor={"exit_timeout": 1000})
    daemon.wait_ready()
    family = [*daemon.workers, *daemon.fronts]
    with socket.create_connection(("127.0.0.1", daemon.port), PATIENCE) as connection:
        connection.sendall(b'{"operation": "LoadModel", "fields": {"name": "never"}}\n')
        daemon.wait(lambda: daemon.state("never")["state"] == "LOADING", "load")
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait_log("finishing accepted requests")
        assert daemon.stop() == 0
    assert not psutil.wait_procs(family, PATIENCE)[1]


def test_bound_of_the_drain(start: Start, repository: Path) -> None:
    """
    1. As before, with a bound of half a second and one signal.
    Result: exit 0, the late front is named in the log.
    """
    write_model(repository, "never")
    daemon = start(repository={"control_mode": "explicit"}, supervisor={"exit_timeout": 0.5})
    daemon.wait_ready()
    with socket.create_connection(("127.0.0.1", daemon.port), PATIENCE) as connection:
        connection.sendall(b'{"operation": "LoadModel", "fields": {"name": "never"}}\n')
        daemon.wait(lambda: daemon.state("never")["state"] == "LOADING", "load")
        assert daemon.stop() == 0
    assert "http-0 did not finish in time" in daemon.log


def test_stop_while_starting(start: Start, repository: Path) -> None:
    write_model(repository, "never")
    daemon = start()
    daemon.wait_log("is up on", 2)
    assert daemon.stop(signal.SIGINT) == 0
    assert "ready: " not in daemon.log


def test_exit_on_error(start: Start, repository: Path) -> None:
    write_model(repository, "fails")
    daemon = start(repository={"exit_on_error": True})
    assert daemon.process.wait(PATIENCE) == 1
    daemon.stop()
    assert "a model failed to load at start" in daemon.log


def test_service_manager(start: Start, tmp_path: Path) -> None:
    """
    1. Started as a Type=notify service with a watchdog, told to reload, stopped.
    Result: READY, WATCHDOG, RELOADING and STOPPING, in the right order; children do not inherit the socket's name.
    """
    address = f"\0tensord-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(PATIENCE)
        seen: list[str] = []

        def wait_for(words: str) -> None:
            while not seen or words not in seen[-1]:
                seen.append(manager.recv(4096).decode())

        daemon = start({"NOTIFY_SOCKET": "@" + address[1:], "WATCHDOG_USEC": "4000000"})
        wait_for("READY=1")
        wait_for("WATCHDOG=1")
        assert not [c for c in (*daemon.workers, *daemon.fronts) if "NOTIFY_SOCKET" in c.environ()]
        os.kill(daemon.process.pid, signal.SIGHUP)
        wait_for("RELOADING=1\nMONOTONIC_USEC=")
        wait_for("EXTEND_TIMEOUT_USEC=30000000")
        wait_for("READY=1\nSTATUS=ready: 0 models")
        daemon.process.send_signal(signal.SIGTERM)
        wait_for("STOPPING=1")


def test_a_start_goes_on_without_a_device_that_broke(start: Start, repository: Path, tmp_path: Path) -> None:
    """
    1. Loading a model kills the first of two workers, and its device cannot be used any more.
    Result: the service manager is told who is missing; the daemon serves the model with the other worker.
    """
    write_model(repository, "breaks")
    address = f"\0tensord-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(PATIENCE)
        # The fake workers note there which device is broken: not beside those of other tests.
        variables = {"NOTIFY_SOCKET": "@" + address[1:], "XDG_RUNTIME_DIR": str(tmp_path)}
        daemon = start(variables, workers={"cpu": 2})
        seen: list[str] = []
        while not seen or "READY=1" not in seen[-1]:
            seen.append(manager.recv(4096).decode())
    assert "EXTEND_TIMEOUT_USEC=30000000" in seen
    assert any(re.fullmatch("STATUS=waiting for .*worker-[01].*", line) for line in seen)
    daemon.wait(lambda: len(daemon.state("breaks")["workers"]) == 1, "the other worker")
    assert "stopping: " not in daemon.log


def test_text_a_control_socket_takes(start: Start, repository: Path) -> None:
    daemon = start(repository={"control_mode": "explicit"})
    daemon.wait_ready()
    assert daemon.control.stat().st_mode & 0o777 == 0o600

    def ask(line: bytes) -> Any:
        with socket.socket(socket.AF_UNIX) as sock, sock.makefile("rb") as lines:
            sock.connect(str(daemon.control))
            sock.sendall(line + b"\n")
            return json.loads(lines.readline())

    assert ask(b'{"command": "models"}') == {"result": []}
    assert ask(b'{"command": "regions"}') == {"result": []}
    assert ask(b'{"command": "unload", "name": "x"}') == {"result": None}
    assert "failed to poll" in ask(b'{"command": "load", "name": "x"}')["error"]
    assert ask(b'{"command": "statistics"}') == {"result": {"model_stats": []}}
    assert ask(b'{"command": "nonsense"}') == {"error": "unknown command 'nonsense'"}
    assert "malformed" in ask(b"{")["error"]
    assert "malformed" in ask(b'{"command": 1}')["error"]
    described = ask(b'{"command": "status"}')["result"]
    assert described["phase"] == "serving"
    assert [worker["device"] for worker in described["workers"]] == ["cpu:0", "cpu:1"]


async def test_a_defect_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    failed: list[str] = []
    tasks = Tasks(lambda: failed.append("failed"))

    async def works() -> None:
        await asyncio.sleep(0)

    async def fails() -> None:
        raise RuntimeError("no such thing")

    tasks.spawn(works())
    tasks.spawn(fails())
    for _ in range(3):
        await asyncio.sleep(0)
    assert failed == ["failed"]
    assert "no such thing" in caplog.text
    await tasks.cancel()
    assert failed == ["failed"]


async def test_none_goes_on_after_cancel() -> None:
    tasks, ended = Tasks(lambda: pytest.fail("a cancelled task is no defect")), asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    tasks.spawn(waits())
    await asyncio.sleep(0)
    await tasks.cancel()
    assert ended.is_set()
