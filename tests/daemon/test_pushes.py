"""Pushes through a real supervisor to processes: who dies in the middle, and what a replacement has when it is found."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.fake_daemon import FakeDaemon, write_model


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., FakeDaemon]]:
    daemons: list[FakeDaemon] = []

    def begin(**options: Any) -> FakeDaemon:
        write_model(tmp_path / "models", "good")
        daemons.append(FakeDaemon(tmp_path, options))
        daemons[-1].wait_ready()
        return daemons[-1]

    yield begin
    for daemon in daemons:
        daemon.stop()


def push(daemon: FakeDaemon, name: str = "main", **fields: Any) -> dict[str, Any]:
    return daemon.tensorctl("push", name="good", set=name, push={"file": "params.npz", **fields})


def held(daemon: FakeDaemon) -> dict[str, Any]:
    """Returns the number of each set, added up over all workers that serve the model, as all counts are."""
    (stats,) = json.loads(daemon.call("ModelStatistics")[1])["model_stats"]
    return dict(stats.get("sets", {}))


@pytest.mark.parametrize("at", ["StageParameters", "CommitParameters"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_is_killed_in_the_middle(
    start: Callable[..., FakeDaemon], tmp_path: Path, at: str, workers: int
) -> None:
    """
    1. Something is pushed; the first worker that is to stage (or commit) it dies.
    Result: the push is answered, also where no other worker is there, and the replacement has it.
    """
    daemon = start(workers={"cpu": workers})
    assert push(daemon)["result"]["number"] == 1
    (tmp_path / "models" / "good" / f"dies-at-{at}").touch()
    assert push(daemon, "customer", number=7)["result"]["number"] == 7
    daemon.wait_log(r"worker-\d has what was pushed into model 'good' version 1: 'main' number 1")
    daemon.wait(lambda: len(daemon.state("good")["workers"]) == workers, "all workers")
    assert held(daemon) == {"main": workers, "customer": 7 * workers}
    assert "did not follow" not in daemon.log


def test_the_replacement_of_a_worker_is_found_with_all_sets(start: Callable[..., FakeDaemon]) -> None:
    daemon = start(workers={"cpu": 1})
    for number in range(40):
        push(daemon, f"s{number}")
    push(daemon)
    daemon.workers[0].kill()
    daemon.wait_log(
        r"has what was pushed into model 'good' version 1: 's0' number 1, 's1' number 1, 's2' number 1 and 38 more"
    )
    daemon.wait(lambda: daemon.state("good")["workers"], "the replacement")
    assert len(held(daemon)) == 41


def test_what_is_asked_of_sets_and_refused(start: Callable[..., FakeDaemon]) -> None:
    daemon = start()
    assert push(daemon, "bad") == {"error": "it always is"}
    assert push(daemon, number=17)["result"] == {
        "model": "good",
        "version": 1,
        "set": "main",
        "number": 17,
        "byte_size": len("made of params.npz"),
    }
    assert push(daemon, number=16) == {"error": "number 16 of set 'main' of model 'good' is not newer than 17"}
    (main,) = daemon.tensorctl("parameters", name="good")["result"]
    assert (main["number"], main["pushed_by"]) == (17, "operator")
    assert daemon.tensorctl("drop", name="good", set="a")["error"].endswith("has no parameter set 'a'")
    push(daemon, "a")
    assert daemon.tensorctl("drop", name="good", set="a") == {"result": None}
    assert daemon.status()["parameters"]["versions"] == [{"model": "good", "version": 1, "sets": 1, "number": 17}]
    for line in (
        "audit: push of parameter set 'bad' of model 'good' by tensorctl, refused: it always is",
        "audit: push of parameter set 'main' of model 'good' by tensorctl: number 17 of version 1, 18 bytes",
        "audit: drop of parameter set 'a' of model 'good' by tensorctl",
    ):
        daemon.wait_log(line)


def test_the_audit_has_what_comes_over_the_clients_socket(start: Callable[..., FakeDaemon], tmp_path: Path) -> None:
    daemon = start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(tmp_path / "clients.sock"))

        def ask(**question: Any) -> Any:
            client.sendall(json.dumps(question).encode())
            return json.loads(client.recv(1 << 16))

        for number in (17, 18):
            assert ask(push={"model": "good", "set": "a", "file": "params.npz", "number": number})["number"] == number
        assert ask(push={"model": "good", "set": "a", "file": "params.npz", "number": 16})["code"] == "REPLACED"
        assert ask(revert={"model": "good", "set": "a"})["number"] == 17
        assert ask(drop={"model": "good", "set": "a"}) == {}
        assert "has no parameter set 'a'" in ask(drop={"model": "good", "set": "a"})["error"]
    what, by = "parameter set 'a' of model 'good'", f"by uid {os.getuid()}, pid {os.getpid()}"
    for line in (
        f"audit: push of {what} {by}: number 18 of version 1, 18 bytes",
        f"audit: push of {what} {by}, refused: number 16 of set 'a' of model 'good' is not newer than 18",
        f"audit: roll-back of {what} {by}: number 17 of version 1, 18 bytes",
        f"audit: drop of {what} {by}",
        f"audit: drop of {what} {by}, refused: ",
    ):
        daemon.wait_log(line)


def test_a_load_ends_what_was_pushed(start: Callable[..., FakeDaemon]) -> None:
    daemon = start(repository={"control_mode": "explicit", "load": ["good"]})
    push(daemon)
    assert daemon.call("LoadModel", name="good") == ("", "")
    daemon.wait_log("parameter set 'main' that was pushed into it is gone")
    assert daemon.tensorctl("parameters", name="good")["result"][0]["number"] == 0
    assert push(daemon)["result"]["number"] == 1
