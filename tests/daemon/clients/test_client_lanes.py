"""Clients' lanes of the real supervisor with fake workers: who gets which, and what becomes of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.daemon.clients.lane_client import LaneClient
from tests.daemon.fake_daemon import FakeDaemon, write_model
from tests.daemon_process import ROOT
from tests.scrapes import scrape

KILLED = """
import os, signal, sys
from tests.daemon.clients.lane_client import LaneClient

own = LaneClient(sys.argv[1])
assert own.open("good")["lanes"]
os.kill(os.getpid(), signal.SIGKILL)
"""

Start = Callable[..., FakeDaemon]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    daemons: list[FakeDaemon] = []
    write_model(tmp_path / "models", "good")

    def begin(**options: dict[str, Any]) -> FakeDaemon:
        daemons.append(FakeDaemon(tmp_path, options))
        daemons[-1].wait_ready()
        return daemons[-1]

    yield begin
    for daemon in daemons:
        assert daemon.stop() == 0


def client(daemon: FakeDaemon) -> LaneClient:
    return LaneClient(daemon.control.with_name("clients.sock"))


def entries(answer: Any) -> list[tuple[int, bool]]:
    return [(entry["lane"], entry["new"]) for entry in answer["lanes"]]


def counted(daemon: FakeDaemon) -> tuple[int, int]:
    """Returns how many clients are connected, and how many lanes they have."""
    clients = daemon.status()["clients"]
    return clients["connections"], clients["lanes"]


def test_a_client_gets_one_lane_to_each_worker(start: Start, tmp_path: Path) -> None:
    """Two workers, two models: the second model's workers are those that the client has lanes to already."""
    write_model(tmp_path / "models", "other", 2, 3, config="version_policy { all {} }")
    daemon = start()
    with client(daemon) as first:
        answer = first.open("good")
        (one, two), limits = [number for number, _ in entries(answer)], answer["limits"]
        assert entries(answer) == [(one, True), (two, True)]
        assert answer["metadata"] == {"name": "good", "versions": ["1"], "loads": 1}
        assert (answer["model"], answer["version"], answer["coming"], answer["spin_us"]) == ("good", 1, 0, 300)
        assert (answer["streams"], answer["sequences"], answer["max_batch_size"]) == (False, False, 0)
        assert {entry["device"] for entry in answer["lanes"]} == {"cpu:0", "cpu:1"}
        assert limits == {
            "in_flight": 256,
            "segments": 64,
            "segment_byte_size": 1 << 30,
            "response_byte_size": 256 << 20,
            "max_owner_response_byte_size": 4 << 30,
            "max_owner_request_byte_size": 1 << 30,
        }
        for number in (one, two):
            assert first.say(number, b"hello") == f"{number} unix {os.getpid()} 256".encode()
        assert entries(first.open("good")) == [(one, False), (two, False)]
        other = first.open("other")
        assert (entries(other), other["version"]) == ([(one, False), (two, False)], 3)
        assert other["metadata"]["versions"] == ["2", "3"]
        assert first.open("other", version=2)["metadata"]["versions"] == ["2"]
        with client(daemon) as second:
            assert not {one, two} & {number for number, _ in entries(second.open("good"))}
            assert counted(daemon) == (2, 4)
            workers = daemon.status()["workers"]
            assert [worker["lanes"] for worker in workers] == [2, 2]
            owners = daemon.status()["clients"]["owners"]
            assert owners == {f"uid {os.getuid()}": {"connections": 2, "lanes": 4}}
            samples = scrape(daemon.metrics)
            assert samples.of("tensord_client_lanes", "worker") == {"worker-0": 2, "worker-1": 2}
            assert samples.of("tensord_client_lane_requests_total", "worker") == {"worker-0": 1, "worker-1": 1}
    daemon.wait(lambda: counted(daemon) == (0, 0), "end of the lanes")


def test_clients_begin_at_different_workers(start: Start) -> None:
    """A client that asks one thing at a time only ever uses its first lane. One that asks for no lane takes no turn."""
    daemon = start()
    first = []
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(client(daemon)).ask(hello={})
            asking = stack.enter_context(client(daemon))
            answers = [asking.open("good") for _ in range(2)]
            devices = [[entry["device"] for entry in answer["lanes"]] for answer in answers]
            assert devices[0] == devices[1]
            assert sorted(devices[0]) == ["cpu:0", "cpu:1"]
            # The sockets came in the order in which the lanes are named.
            assert asking.say(answers[0]["lanes"][0]["lane"], b"hello").startswith(
                f"{answers[0]['lanes'][0]['lane']} ".encode()
            )
            first.append(devices[0][0])
    assert sorted(first) == ["cpu:0", "cpu:0", "cpu:1", "cpu:1"]


def test_http_is_served_beside_the_socket(start: Start, tmp_path: Path) -> None:
    """The client finds HTTP by the folder alone or by its address, and not where HTTP is turned off."""
    daemon = start()
    path = tmp_path / "http.sock"
    with client(daemon) as asking, socket.socket(socket.AF_UNIX) as beside, beside.makefile("rb") as lines:
        assert asking.ask(hello={})["http"] == [f"127.0.0.1:{daemon.port}", f"unix:{path}"]
        beside.connect(str(path))
        beside.sendall(b"{}\n")
        assert json.loads(lines.readline())["pid"] == daemon.fronts[0].pid
    assert path.stat().st_mode & 0o777 == 0o660
    assert daemon.stop() == 0
    daemon = start(clients={"http": False})
    with client(daemon) as asking:
        assert asking.ask(hello={})["http"] == [f"127.0.0.1:{daemon.port}"]
    assert not path.exists()


def test_what_there_is_no_lane_for(start: Start, tmp_path: Path) -> None:
    """Models that are unknown, failed, or are being loaded; a client waits for the last as long as it says, or until a drain."""
    for name in ("fails", "never"):
        write_model(tmp_path / "models", name)
    # The load that never ends is waited for as long when it stops.
    options = {
        "repository": {"control_mode": "explicit", "load": ["good", "fails"]},
        "supervisor": {"exit_timeout": 0.5},
    }
    daemon = start(**options)
    with client(daemon) as asking, contextlib.closing(daemon.front(daemon.fronts[0].pid)) as loading:
        unknown = asking.open("unknown")
        assert unknown == {"error": "Request for unknown model: 'unknown' is not found", "code": "NOT_FOUND"}
        assert "it always does" in asking.open("fails")["error"]
        assert "version 7 is not found" in asking.open("good", version=7)["error"]
        loading.send("LoadModel", name="never")
        daemon.wait(lambda: "LOADING" in daemon.state("never")["state"], "load")
        for wait in (0, 0.01):
            refused = asking.open("never", wait=wait)
            assert refused == {"error": "model 'never' version 1 is being loaded", "code": "UNAVAILABLE"}
        # It goes while it waits, and so do its lanes.
        with client(daemon) as leaving:
            leaving.open("good")
            leaving.send(open={"model": "never", "wait": 1000})
            assert counted(daemon) == (2, 2)
        daemon.wait(lambda: counted(daemon) == (1, 0), "end of the client")
        # A drain ends the wait.
        with client(daemon) as waiting:
            waiting.send(open={"model": "never", "wait": 1000})
            assert "wire" in asking.ask(hello={})  # so the daemon has read what was sent before
            daemon.tensorctl("drain", seconds=0, wait=False)
            assert waiting.receive()["error"] == "the server is draining: it opens no lanes"


def test_lanes_end_with_their_connection(start: Start) -> None:
    """The client keeps the descriptors; also a question that is not answered yet does not keep the connection."""
    daemon = start()
    with client(daemon) as ending:
        lanes = [number for number, _ in entries(ending.open("good"))]
        ending.disconnect()
        assert [ending.lanes[number].recv(100) for number in lanes] == [b"", b""]
    daemon.wait(lambda: counted(daemon) == (0, 0), "end of the lanes")


def test_a_client_that_is_killed_leaves_nothing(start: Start) -> None:
    daemon = start()
    with client(daemon) as other:
        (kept, _), _ = entries(other.open("good"))
        path = daemon.control.with_name("clients.sock")
        killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT)
        assert killed.returncode == -signal.SIGKILL
        daemon.wait(lambda: counted(daemon) == (1, 2), "end of the client's lanes")
        assert other.say(kept, b"hello").startswith(b"%d unix" % kept)


def test_a_lane_that_its_worker_has_ended_is_opened_again(start: Start) -> None:
    """The client says which lanes it has lost, so the daemon need not know of it already."""
    daemon = start()
    with client(daemon) as losing, client(daemon) as watching:
        (lost, _), (kept, _) = entries(losing.open("good"))
        watching.open("good")
        for _ in range(5):
            assert losing.say(lost, b"end") == b""
            answer = entries(losing.open("good", ended=[lost, kept + 1000]))
            (kept_still, new), (number, made) = sorted(answer)
            assert (kept_still, new, made) == (kept, False, True)
            assert losing.say(number, b"hello").startswith(b"%d unix" % number)
            lost = number
        # Others' lanes are not the client's to end.
        ended = list(watching.lanes)
        losing.open("good", ended=ended)
        assert all(watching.say(number, b"hello") for number in ended)
        daemon.wait(lambda: counted(daemon) == (2, 4), "end of the lost lanes")


def test_a_worker_that_dies_takes_its_lanes(start: Start) -> None:
    """The client sees the end, asks again, and gets a lane to the replacement as soon as that has the model."""
    daemon = start()
    with client(daemon) as asking:
        before = [number for number, _ in entries(asking.open("good"))]
        victim, *_ = daemon.workers
        victim.kill()
        (gone,) = [number for number in before if not asking.say(number, b"hello")]
        answer = asking.open("good", ended=[gone])
        daemon.wait(lambda: len(daemon.state("good")["workers"]) == 2, "replacement")
        assert len(answer["lanes"]) + answer["coming"] == 2
        answer = asking.open("good", wait=10)
        assert ({number for number, _ in entries(answer)} & {*before}, answer["coming"]) == ({*before} - {gone}, 0)
        assert all(asking.say(entry["lane"], b"hello") for entry in answer["lanes"])
        assert counted(daemon) == (1, 2)


def test_a_client_waits_while_its_only_worker_is_replaced(start: Start) -> None:
    daemon = start(workers={"cpu": 1})
    with client(daemon) as asking:
        ((before, _),) = entries(asking.open("good"))
        assert [bool(asking.say(before, b"hello")) for _ in range(2)] == [True, True]
        assert scrape(daemon.metrics).of("tensord_client_lane_requests_total", "worker") == {"worker-0": 2}
        daemon.workers[0].kill()
        assert asking.say(before, b"hello") == b""
        answer = asking.open("good", ended=[before], wait=1000)
        ((number, new),) = entries(answer)
        assert (number != before, new) == (True, True)
        for counted_then in (3, 4):
            assert asking.say(number, b"hello")
            requests = scrape(daemon.metrics).of("tensord_client_lane_requests_total", "worker")
            assert requests == {"worker-0": counted_then}


def test_quotas_name_both_numbers(start: Start) -> None:
    """A user has as many lanes as may be; those count whose end the worker has not confirmed, until it dies."""
    daemon = start(clients={"max_owner_lanes": 5})
    with client(daemon) as first, client(daemon) as second, client(daemon) as third:
        held = [number for number, _ in entries(first.open("good"))]
        assert len(second.open("good")["lanes"]) == 2
        words = (
            "4 lanes are open by this user, at most 5 are allowed (clients.max_owner_lanes), and 2 more are needed for model "
            "'good'"
        )
        for _ in range(3):
            assert third.open("good") == {"error": words, "code": "UNAVAILABLE"}
        daemon.wait_log("a lane to model 'good' is refused to uid")
        assert daemon.log.count("a lane to model 'good' is refused to uid") == 1
        assert scrape(daemon.metrics).value("tensord_client_lanes_refused_total") == 3
        for number in held:
            assert first.say(number, b"hold")
        first.disconnect()
        daemon.wait(lambda: counted(daemon) == (2, 2), "end of the client")
        assert "4 lanes are open by this user" in third.open("good")["error"]
        for worker in daemon.workers:
            worker.kill()
        daemon.wait(lambda: len(third.open("good", wait=10).get("lanes", ())) == 2, "room for the lanes")


def test_connections_that_come_and_go_leave_nothing(start: Start) -> None:
    """A thousand, in turn; descriptors of the supervisor and of the workers are as before."""
    daemon = start()
    processes = [psutil.Process(daemon.process.pid), *daemon.workers]
    with client(daemon) as first:
        first.open("good")
    daemon.wait(lambda: counted(daemon) == (0, 0), "end of the first")
    before = [process.num_fds() for process in processes]
    for round_ in range(1000):
        with client(daemon) as coming:
            assert len(coming.open("good")["lanes"]) == 2
            if round_ % 3 == 0:
                coming.close_lanes()
    daemon.wait(lambda: counted(daemon) == (0, 0), "end of the lanes")
    # What was asked of the supervisor may have had one more then.
    daemon.wait(
        lambda: all(process.num_fds() <= most for process, most in zip(processes, before, strict=True)),
        "no more descriptors than before",
    )


def test_a_client_that_does_not_read_holds_nobody_up(start: Start) -> None:
    """Its answers fill its socket; others are answered, and what it was given goes with it."""
    daemon = start()
    with client(daemon) as deaf, client(daemon) as other:
        deaf._sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                deaf.send(hello={})
        assert "wire" in other.ask(hello={})
        assert len(other.open("good")["lanes"]) == 2
    daemon.wait(lambda: counted(daemon) == (0, 0), "end of both")


def test_the_daemon_ends_while_clients_have_lanes(start: Start) -> None:
    daemon = start()
    with client(daemon) as staying:
        lanes = [number for number, _ in entries(staying.open("good"))]
        assert daemon.stop() == 0
        assert [staying.say(number, b"hello") for number in lanes] == [b"", b""]
    assert not daemon.control.with_name("clients.sock").exists()
    assert not daemon.control.with_name("http.sock").exists()


def test_the_audit_has_what_is_asked_there(start: Start) -> None:
    daemon = start()
    with client(daemon) as asking:
        ask = asking.ask
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
