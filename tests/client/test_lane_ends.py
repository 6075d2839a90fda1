"""Workers and daemons that end, and processes that fork, under a client's connection."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensord_client
from tensord_client.answer_memory import HeldResults
from tensord_client.common.scheduling import Scheduling
from tensord_client.errors import Cancelled, Internal, ServingError, Unavailable
from tensord_client.lane import _PAUSE, Call, LaneConnection, LaneRequest
from tensord_client.memory import Memory
from tensord_client.worker_lane import ClientLane

from tests.client.conftest import clients_socket, write_models
from tests.client.test_lane import CountedCalls, addsub, check, prepared
from tests.daemon_process import ROOT, DaemonProcess, wait_until
from tests.repositories import of_x, total_model, write_model

_PATIENCE = 120.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    started: list[DaemonProcess] = []
    write_models(tmp_path / "models")

    def begin(workers: int = 1) -> DaemonProcess:
        options = {"clients": {"socket": clients_socket(tmp_path)}, "workers": {"cpu": workers}}
        started.append(DaemonProcess(tmp_path, [tmp_path / "models"], options))
        started[-1].start()
        started[-1].wait_ready()
        return started[-1]

    yield begin
    for daemon in started:
        daemon.stop()


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[..., LaneConnection]]:
    opened: list[LaneConnection] = []

    def begin(**arguments: int) -> LaneConnection:
        opened.append(LaneConnection(clients_socket(tmp_path), **arguments))
        return opened[-1]

    yield begin
    for connection in opened:
        connection.close()


def wait_for_both(connection: LaneConnection) -> None:
    """Waits until there is a lane to each of two workers: a model is ready, and asked for, once one of them has it."""

    def are_there() -> bool:
        check(connection.ask(addsub(1)).result(_PATIENCE), 1)
        return sum(lane.usable for lane in connection.model_of(addsub(1)).lanes) == 2

    wait_until(are_there, "lanes to both workers")


def kill(worker: Any) -> None:
    worker.send_signal(signal.SIGKILL)
    worker.wait(_PATIENCE)


def test_pure_requests_outlive_their_worker(
    start: Callable[..., DaemonProcess], connect: Callable[[], LaneConnection]
) -> None:
    """Every way to wait: a worker is stopped with requests that it has, and killed; they are answered by the next one."""
    daemon, connection = start(), connect()
    given, _, call = prepared(connection, True)
    given[:] = 4
    check(call(_PATIENCE), 4)
    (worker,) = daemon.workers
    worker.suspend()
    asked = [connection.ask(addsub(number)) for number in range(5)]
    done: queue.Queue[Any] = queue.Queue()
    called = connection.ask(addsub(9))
    called.add_done_callback(done.put)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(dict(call(_PATIENCE))))
    thread.start()
    time.sleep(0.2)

    async def ask() -> Any:
        pending = connection.ask(addsub(11))
        threading.Timer(0.1, kill, (worker,)).start()
        return await pending

    check(asyncio.run(ask()), 11)
    for number, each in enumerate(asked):
        check(each.result(_PATIENCE), number)
    done.get(timeout=_PATIENCE)
    check(called.result(), 9)
    thread.join()
    check(results[0], 4)


def test_what_may_not_be_run_twice_is_not(
    start: Callable[..., DaemonProcess], connect: Callable[[], LaneConnection]
) -> None:
    daemon, connection = start(), connect()
    own = Scheduling(sequence_id=5, sequence_start=True)
    step = np.ones((1, 1), np.float32)
    assert connection.ask(Call("total", {"x": step}, scheduling=own)).result(_PATIENCE)["sum"].tolist() == [[1.0]]
    pending = connection.ask(Call("slow", {"x": np.array([60.0], np.float32)}))
    prepared_one = connection.prepare(Call("slow", {"x": np.array([60.0], np.float32)}))
    threading.Timer(0.3, kill, (daemon.workers[0],)).start()
    with pytest.raises(Internal, match="may not be run twice"):
        prepared_one(_PATIENCE)
    with pytest.raises(Internal, match="may not be run twice"):
        pending.result(_PATIENCE)
    for _ in range(2):
        with pytest.raises(
            Unavailable, match="sequence 5 of model 'total' was lost when its worker died; start it again"
        ):
            connection.ask(Call("total", {"x": step}, scheduling=Scheduling(sequence_id=5))).result(_PATIENCE)
    assert connection.ask(Call("total", {"x": step}, scheduling=own)).result(_PATIENCE)["sum"].tolist() == [[1.0]]


def test_one_of_two_workers_ends(start: Callable[..., DaemonProcess], connect: Callable[[], LaneConnection]) -> None:
    """Requests go to the other one meanwhile, and to its replacement later."""
    daemon, connection = start(2), connect()
    wait_for_both(connection)
    kill(daemon.workers[0])
    for number in range(20):
        check(connection.ask(addsub(number)).result(_PATIENCE), number)
    limit = time.monotonic() + _PATIENCE
    while sum(lane.usable for lane in connection.model_of(addsub(1)).lanes) < 2:
        assert time.monotonic() < limit
        check(connection.ask(addsub(2)).result(_PATIENCE), 2)
        time.sleep(0.1)


def test_the_lane_of_a_dead_worker_is_freed_at_once(
    start: Callable[..., DaemonProcess], connect: Callable[[], LaneConnection]
) -> None:
    """With the garbage collector off: the lane goes, in whichever way requests waited for answers on it."""
    daemon, connection = start(), connect()
    *_, call = prepared(connection, True)
    gc.disable()
    try:
        call(_PATIENCE)
        lane = weakref.ref(connection.model_of(addsub(1)).lanes[0])
        done: queue.Queue[Any] = queue.Queue()
        (worker,) = daemon.workers
        worker.suspend()
        connection.ask(addsub(1)).add_done_callback(done.put)
        asked = connection.ask(addsub(2))
        threading.Timer(0.1, kill, (worker,)).start()
        call(_PATIENCE)
        check(asked.result(_PATIENCE), 2)
        check(done.get(timeout=_PATIENCE).result(), 1)
        call(_PATIENCE)
        wait_until(lambda: lane() is None, "the lane to the dead worker to be freed")
    finally:
        gc.enable()


def test_a_prepared_call_waits_where_both_workers_end(
    start: Callable[..., DaemonProcess], connect: Callable[[], LaneConnection]
) -> None:
    """The idle one ends first, unnoticed by the client, and then the one that has the call: it is answered by a replacement."""
    daemon, connection = start(2), connect()
    given, _, call = prepared(connection, True, alone=False)
    given[:] = 4
    check(call(_PATIENCE), 4)
    wait_for_both(connection)
    suspended, running = daemon.workers
    suspended.suspend()
    # One goes to each, and only the other's is answered.
    done: queue.Queue[LaneRequest] = queue.Queue()
    asked = [connection.ask(addsub(number)) for number in range(2)]
    for each in asked:
        each.add_done_callback(done.put)
    answered = done.get(timeout=_PATIENCE)
    suspended.resume()
    (late,) = {done.get(timeout=_PATIENCE), *asked} - {answered}
    assert {late.lane, answered.lane} == set(connection.model_of(addsub(1)).lanes)
    # The first of two idle lanes has the next call.
    is_first = late.lane is connection.model_of(addsub(1)).lanes[0]
    busy, idle = (suspended, running) if is_first else (running, suspended)
    busy.suspend()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(dict(call(_PATIENCE))))
    thread.start()
    time.sleep(0.3)
    kill(idle)
    kill(busy)
    thread.join()
    check(results[0], 4)


def test_a_daemon_is_started_again(start: Callable[..., DaemonProcess], connect: Callable[[], LaneConnection]) -> None:
    first, connection = start(), connect()
    given, _, call = prepared(connection, True)
    given[:] = 4
    check(call(_PATIENCE), 4)
    check(connection.ask(addsub(1)).result(_PATIENCE), 1)
    first.stop()
    with pytest.raises((ServingError, TimeoutError)):
        connection.ask(addsub(1)).result(0.3)
    with pytest.raises(Unavailable):
        LaneConnection(connection.path)
    start()
    given[:] = 5
    check(call(_PATIENCE), 5)
    check(connection.ask(addsub(2)).result(_PATIENCE), 2)


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_requests_wait_for_a_daemon_that_is_restarted(
    ending: str, start: Callable[..., DaemonProcess], connect: Callable[[], LaneConnection]
) -> None:
    """From its end to that of its models' loading: neither workers that end together nor a daemon that begins make one fail."""
    first, connection = start(2), connect()
    wait_for_both(connection)
    over = threading.Event()
    failed: list[Exception] = []
    counts = [0] * 4

    def ask(which: int) -> None:
        while not over.is_set():
            try:
                # Of an odd thread many are under way, and called back: a worker that stops refuses several at once.
                asked = [connection.ask(addsub(which)) for _ in range(1 + which % 2 * 19)]
                done: queue.SimpleQueue[LaneRequest] = queue.SimpleQueue()
                for each in asked[1:]:
                    each.add_done_callback(done.put)
                for each in [asked[0], *(done.get(timeout=_PATIENCE) for _ in asked[1:])]:
                    check(each.result(_PATIENCE), which)
                counts[which] += 1
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=ask, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    if ending == "kill":
        os.kill(first.pid, signal.SIGKILL)
    first.stop()
    before = list(counts)
    start()
    wait_until(
        lambda: all(now > then for now, then in zip(counts, before, strict=True)) or failed,
        "requests to be answered again",
    )
    over.set()
    for thread in threads:
        thread.join()
    assert failed == []


def test_what_waits_for_a_daemon_without_a_thread_waits_at_the_same_time(
    start: Callable[..., DaemonProcess], connect: Callable[..., LaneConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. Requests that are called back lose their daemon. 2. It does not come back, and the patience of all is over.
    Result: each is told so. Those behind the first, which one thread sends again, ask for the daemon only once more.
    """
    daemon, connection = start(), connect(patience=1)
    check(connection.ask(addsub(1)).result(_PATIENCE), 1)
    (worker,) = daemon.workers
    worker.suspend()
    questions = CountedCalls(monkeypatch, connection, "_open")
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    asked = [connection.ask(addsub(number)) for number in range(5)]
    for each in asked:
        each.add_done_callback(lambda _: done.put(questions.count))
    os.kill(daemon.pid, signal.SIGKILL)
    first, *_, last = [done.get(timeout=_PATIENCE) for _ in asked]
    # The patience of those that lost it a little later is over a little later: as many pauses fit into the time between.
    since = [each.astray_at for each in asked]
    assert 0 <= last - first - 4 <= math.ceil((max(since) - min(since)) / _PAUSE)
    for each in asked:
        with pytest.raises(Unavailable):
            each.result(_PATIENCE)


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_a_model_is_looked_up_where_a_daemon_has_taken_the_place_of_another(
    ending: str, start: Callable[..., DaemonProcess], connect: Callable[[], LaneConnection]
) -> None:
    """Whoever asks nothing meanwhile is not told that the former one does not answer."""
    first, connection = start(), connect()
    assert connection.open("addsub").metadata["name"] == "addsub"
    if ending == "kill":
        os.kill(first.pid, signal.SIGKILL)
    first.stop()
    start()
    assert connection.open("addsub").metadata["name"] == "addsub"
    check(connection.ask(addsub(1)).result(_PATIENCE), 1)


@pytest.mark.parametrize("way", ["thread", "callback", "prepared"])
def test_what_waits_for_a_daemon_is_cancelled_by_close(
    way: str,
    start: Callable[..., DaemonProcess],
    connect: Callable[[], LaneConnection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A caller that is told Unavailable would ask again. What is asked afterwards is told so."""
    daemon, connection = start(), connect()
    given, _, call = prepared(connection, True)
    given[:] = 4
    check(call(_PATIENCE), 4)
    daemon.stop()
    waits = threading.Event()
    find_lanes = connection.find_lanes

    def found(*arguments: Any) -> None:
        waits.set()
        find_lanes(*arguments)

    monkeypatch.setattr(connection, "find_lanes", found)
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            call(_PATIENCE) if way == "prepared" else connection.ask(addsub(1)).result(_PATIENCE)
        except ServingError as error:
            ended.put(error)

    if way == "callback":
        connection.ask(addsub(1)).add_done_callback(ended.put)
    else:
        threading.Thread(target=ask).start()
    assert waits.wait(_PATIENCE)
    connection.close()
    over = ended.get(timeout=_PATIENCE)
    with pytest.raises(Cancelled, match=r"^the client was closed$"):
        raise over if isinstance(over, ServingError) else over.result()
    for again in (call, lambda _: connection.ask(addsub(1))):
        with pytest.raises(Unavailable, match=r"^the client was closed$"):
            again(_PATIENCE)


def test_so_many_requests_wait_for_a_daemon(
    start: Callable[..., DaemonProcess], connect: Callable[..., LaneConnection]
) -> None:
    """Whoever waits for them, or nobody yet; what is given up, or was dropped by its caller, waits no more."""
    daemon, connection = start(), connect(max_waiting=3)
    check(connection.ask(addsub(1)).result(_PATIENCE), 1)
    daemon.stop()
    text = r"^3 requests wait in this process to be sent, at most 3 may: wait for answers first$"
    asked = [connection.ask(addsub(number)) for number in range(3)]
    with pytest.raises(Unavailable, match=text):
        connection.ask(addsub(3))
    asked.pop().cancel()
    del asked[0]
    asked += [connection.ask(addsub(number)) for number in (2, 3)]
    with pytest.raises(Unavailable, match=text):
        connection.ask(addsub(4))
    start()
    for number, each in enumerate(asked, 1):
        check(each.result(_PATIENCE), number)


def test_a_worker_that_is_gone_before_the_first_record() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    lane = ClientLane(ours, 1, Memory(), count(2**32), HeldResults(1), 1 << 20, 256, 0)
    assert not lane.usable
    lane.close(Unavailable("the worker process ended"))
    assert ours.fileno() == -1


def test_a_model_that_is_looked_up_again_is_what_the_daemon_serves_now(tmp_path: Path) -> None:
    """Another version was loaded meanwhile, which takes something else and keeps state."""
    write_model(tmp_path / "models", "total", of_x("x"))
    repository = {"control_mode": "explicit", "load": ["*"]}
    options = {"clients": {"socket": clients_socket(tmp_path)}, "repository": repository}
    with DaemonProcess(tmp_path, [tmp_path / "models"], options) as daemon, tensord_client.connect(tmp_path) as client:
        model = client.model("total")
        assert (model.version, model.inputs["x"].shape, model.has_sequences) == (1, (4,), False)
        total_model(tmp_path / "models")
        (tmp_path / "models/total/1").rename(tmp_path / "models/total/2")
        assert daemon.request("POST", "/v2/repository/models/total/load")[0] == 200
        model = client.model("total")
        assert (model.version, model.inputs["x"].shape, model.has_sequences) == (2, (-1, 1), True)


def test_a_forked_child_connects_anew(start: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """A process of its own forks: both go on, with memory of their own, and importing the client brings nothing large along."""
    start()
    program = """
    import os, sys, numpy as np
    from tensord_client.lane import _PAUSE, Call, LaneConnection
    assert not {"jax", "msgspec", "asyncio", "google.protobuf", "tensord"} & set(sys.modules)
    connection = LaneConnection(sys.argv[1])
    lying = connection.empty((1, 16), np.float32)
    lying[:] = 3
    ones = np.ones((1, 16), np.float32)
    places = {name: connection.empty((1, 16), np.float32) for name in ("OUTPUT0", "OUTPUT1")}
    calls = [connection.prepare(Call("addsub", {"INPUT0": given, "INPUT1": ones})) for given in (lying, ones * 3)]
    placed = connection.prepare(Call("addsub", {"INPUT0": lying, "INPUT1": ones}, places=places))
    def check():
        for call in calls:
            assert call(60)["OUTPUT0"].tolist() == [[4.0] * 16]
        answer = connection.ask(Call("addsub", {"INPUT0": lying, "INPUT1": ones})).result(60)
        assert answer["OUTPUT0"].tolist() == [[4.0] * 16]
    check()
    placed(60)
    pending = connection.ask(Call("addsub", {"INPUT0": lying, "INPUT1": ones}))
    child = os.fork()
    if child == 0:
        try:
            check()
            # Places that both processes have are as any others, to which the client copies.
            assert placed(60)["OUTPUT0"] is places["OUTPUT0"]
            try:
                pending.result(60)
            except Exception as error:
                assert "forked" in str(error), error
            else:
                raise AssertionError("read the parent's answer")
            mine = connection.empty((1, 16), np.float32)
            mine[:] = 8
            assert connection.ask(Call("addsub", {"INPUT0": mine, "INPUT1": ones})).result(60)["OUTPUT0"][0, 0] == 9
            os._exit(0)
        except BaseException as error:
            print("child:", repr(error), file=sys.stderr)
            os._exit(1)
    check()
    assert pending.result(60)["OUTPUT0"].tolist() == [[4.0] * 16]
    assert placed(60)["OUTPUT0"] is places["OUTPUT0"]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check()
    connection.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), clients_socket(tmp_path)],
        cwd=ROOT / "client",
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
    )
    assert done.returncode == 0, done.stderr
