"""Requests over lanes of a real daemon: every way to ask, to wait and to hold what came."""

from __future__ import annotations

import asyncio
import gc
import queue
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensord_client
from tensord_client import placement
from tensord_client.common.scheduling import Scheduling
from tensord_client.errors import Cancelled, DeadlineExceeded, InvalidArgument, NotFound, ServingError, Unavailable
from tensord_client.lane import Call, LaneConnection, LaneRequest
from tensord_client.memory import Memory
from tensord_client.worker_lane import ClientLane

from tensord.shm.messages import WIRE_VERSION
from tests.client.conftest import clients_socket
from tests.daemon_process import DaemonProcess
from tests.scrapes import scrape

_PATIENCE = 120.0


def addsub(number: float, **own: Any) -> Call:
    """Returns a call whose answer tells by its values which call it was."""
    inputs = {"INPUT0": np.full((1, 16), number, np.float32), "INPUT1": np.ones((1, 16), np.float32)}
    return Call("addsub", inputs, **own)


def check(answer: Any, number: float) -> None:
    np.testing.assert_array_equal(answer["OUTPUT0"], np.full((1, 16), number + 1, np.float32))
    np.testing.assert_array_equal(answer["OUTPUT1"], np.full((1, 16), number - 1, np.float32))


def identity(values: Any, **own: Any) -> Call:
    return Call("identity", {"INPUT0": values}, **own)


def test_a_daemon_says_what_it_is_and_what_a_model_is(connection: LaneConnection) -> None:
    assert connection.hello["wire"] == WIRE_VERSION
    assert connection.lanes
    description = connection.open("addsub")
    assert (description.version, description.pure, description.streams) == (1, True, False)
    assert [each["name"] for each in description.metadata["inputs"]] == ["INPUT0", "INPUT1"]
    assert connection.open("repeat").streams
    assert connection.open("total").sequences
    assert not any(lane.socket.sock.get_inheritable() for lane in connection.models["total", 0].lanes)
    with pytest.raises(NotFound, match="nowhere"):
        connection.open("nowhere")


def test_nothing_is_copied_where_both_ends_look_at_the_same_memory(connection: LaneConnection) -> None:
    count = 1 << 18
    given, place = connection.empty(count, np.float32), connection.empty(count, np.float32)
    given[:] = np.arange(count)
    # The first answer shows the worker where the program writes its output.
    for _ in range(5):
        answer = connection.ask(identity(given, places={"OUTPUT0": place})).result(_PATIENCE)
    assert answer["OUTPUT0"] is place
    assert answer.copied_bytes == 0
    np.testing.assert_array_equal(place, given)
    viewed = connection.ask(identity(given)).result(_PATIENCE)["OUTPUT0"]
    assert not viewed.flags.writeable
    assert viewed.__array_interface__["data"][0] % 64 == 0
    np.testing.assert_array_equal(viewed, given)


def test_a_larger_place_is_refused_each_time(connection: LaneConnection) -> None:
    """Also where the answer's bytes are those of the answer before."""
    given, place = connection.empty(3000, np.float32), connection.empty(5000, np.float32)
    call = connection.prepare(identity(given, places={"OUTPUT0": place}))
    for _ in range(3):
        with pytest.raises(
            InvalidArgument, match=r"^output 'OUTPUT0' is float32\[3000\], and its place is float32\[5000\]$"
        ):
            call(_PATIENCE)


def test_places_are_of_wanted_outputs(connection: LaneConnection) -> None:
    connection.open("identity")
    with pytest.raises(InvalidArgument, match="'OTHER'"):
        connection.ask(identity(np.zeros(4, np.float32), places={"OTHER": connection.empty(4, np.float32)}))
    for dtype in (np.float64, np.int32):
        with pytest.raises(
            InvalidArgument, match=rf"output 'OUTPUT0' is FP32, and its place is {np.dtype(dtype)}\[4\]"
        ):
            connection.ask(identity(np.zeros(4, np.float32), places={"OUTPUT0": connection.empty(4, dtype)}))


# ------------------------------------------------------------------------------------------------- ways of waiting


def test_threads_share_a_connection(connection: LaneConnection) -> None:
    def ask(first: int) -> None:
        try:
            for number in range(first, first + 100):
                check(connection.ask(addsub(number)).result(_PATIENCE), number)
        except BaseException as error:
            failed.append(error)

    failed: list[BaseException] = []
    threads = [threading.Thread(target=ask, args=(1000 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_answers_are_taken_in_any_order(connection: LaneConnection) -> None:
    pending = [connection.ask(addsub(number)) for number in range(60)]
    for number in reversed(range(60)):
        check(pending[number].result(_PATIENCE), number)
    assert pending[5].done()
    check(pending[5].result(), 5)


def test_no_thread_is_started_until_somebody_is_called_back(connection: LaneConnection) -> None:
    before = threading.active_count()
    check(connection.ask(addsub(1)).result(_PATIENCE), 1)
    assert threading.active_count() == before
    done: queue.Queue[LaneRequest] = queue.Queue()
    asked = [connection.ask(addsub(number)) for number in range(60)]
    for each in asked:
        each.add_done_callback(done.put)
    # Beside callbacks, a thread may wait for its own.
    check(connection.ask(addsub(-1)).result(_PATIENCE), -1)
    finished = [done.get(timeout=_PATIENCE) for _ in asked]
    assert {id(each) for each in finished} == {id(each) for each in asked}
    for number, each in enumerate(asked):
        check(each.result(), number)
    late: list[LaneRequest] = []
    asked[0].add_done_callback(late.append)
    assert late == [asked[0]]


def test_callbacks_may_ask(connection: LaneConnection) -> None:
    done: queue.Queue[Any] = queue.Queue()

    def again(pending: LaneRequest) -> None:
        done.put(connection.ask(addsub(pending.result()["OUTPUT0"][0, 0])).result(_PATIENCE))

    connection.ask(addsub(1)).add_done_callback(again)
    check(done.get(timeout=_PATIENCE), 2)


async def test_coroutines_share_a_connection(connection: LaneConnection) -> None:
    async def ask(first: int) -> None:
        for number in range(first, first + 20):
            check(await connection.ask(addsub(number)), number)

    await asyncio.gather(*[ask(100 * n) for n in range(30)])


async def test_a_coroutine_and_a_thread_share_a_connection(connection: LaneConnection) -> None:
    def ask() -> None:
        for number in range(100):
            check(connection.ask(addsub(number)).result(_PATIENCE), number)

    thread = asyncio.get_running_loop().run_in_executor(None, ask)
    for number in range(100):
        check(await connection.ask(addsub(-number)), -number)
    await thread


async def test_a_cancelled_coroutine_cancels_its_request(connection: LaneConnection) -> None:
    connection.open("slow")
    task = asyncio.ensure_future(_await(connection.ask(Call("slow", {"x": np.array([0.2], np.float32)}))))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await connection.ask(Call("slow", {"x": np.zeros(1, np.float32)})))["y"].tolist() == [1.0]


async def _await(pending: LaneRequest) -> Any:
    return await pending


# ------------------------------------------------------------------------------------------------ streams, sequences


def repeat(count: int) -> Call:
    return Call("repeat", {"base": np.zeros(16, np.float32), "count": np.array([count], np.int32)})


def test_a_stream_is_collected_in_a_thread_that_sends(connection: LaneConnection) -> None:
    """
    1. A stream is left in a reference cycle. 2. The garbage collector finds it in a thread that has the lane's lock.
    Result: the thread goes on, and the request is cancelled.
    """
    pending = connection.ask(repeat(1 << 30))
    cycle: list[object] = [pending.responses(_PATIENCE)]
    assert next(cycle[0])["value"][0] == 0  # type: ignore[call-overload]
    cycle.append(cycle)
    lane = pending.lane
    assert lane is not None
    with lane.lock:
        del cycle
        gc.collect()
        assert pending.done()
    assert [answer["value"][0] for answer in connection.ask(repeat(2)).responses(_PATIENCE)] == [0, 1]


def test_sequences_stay_on_the_lane_where_they_began(connection: LaneConnection) -> None:
    """Two workers, eight sequences, whose steps take turns."""
    totals = dict.fromkeys(range(1, 9), 0.0)
    for step in range(6):
        for sequence in totals:
            own = Scheduling(sequence_id=sequence, sequence_start=step == 0, sequence_end=step == 5)
            call = Call("total", {"x": np.array([[sequence]], np.float32)}, scheduling=own)
            totals[sequence] += sequence
            assert connection.ask(call).result(_PATIENCE)["sum"][0, 0] == totals[sequence]
    with pytest.raises(ServingError):
        connection.ask(Call("total", {"x": np.zeros((1, 1), np.float32)}, scheduling=Scheduling(sequence_id=1))).result(
            _PATIENCE
        )


def test_sequences_that_begin_take_the_slots_of_all_workers(connection: LaneConnection) -> None:
    """Two workers have 16 slots together. A sequence that waited for one would do so for ten minutes.

    Each begins when the one before it was answered, so that no worker is busier than the other. One that begins anew goes on
    where it was: elsewhere it would take a second slot.
    """

    def step(sequence: int, start: bool, end: bool = False) -> float:
        own = Scheduling(sequence_id=sequence, sequence_start=start, sequence_end=end)
        answer = connection.ask(Call("total", {"x": np.ones((1, 1), np.float32)}, scheduling=own)).result(_PATIENCE)
        return float(answer["sum"][0, 0])

    for anew in range(2):
        for sequence in range(101, 117):
            assert (anew, step(sequence, True)) == (anew, 1)
    known = {lane: set(lane.sequences["total"]) for lane in connection._lanes.values()}
    assert sorted(map(len, known.values())) == [8, 8]
    assert all(connection._sequences["total", each] is lane for lane, ids in known.items() for each in ids)
    assert [step(sequence, False, True) for sequence in range(101, 117)] == [2] * 16
    assert not connection._sequences
    assert not any(lane.sequences["total"] for lane in known)


async def test_a_sequence_that_is_left_gives_its_slot_back(daemon: DaemonProcess) -> None:
    """Two workers have 16 slots together, and a sequence of which nothing comes would keep its own for ten minutes."""
    one = {"x": np.ones((1, 1), np.float32)}
    with tensord_client.connect(clients_socket(daemon.folder)) as client:
        model = client.model("total", timeout=_PATIENCE)
        for _ in range(20):
            with model.sequence() as step:
                assert [step(one)["sum"][0, 0] for _ in range(3)] == [1, 2, 3]
        model.end_sequence("nobody's")
    async with await tensord_client.connect_async(clients_socket(daemon.folder)) as several:
        model = await several.model("total", timeout=_PATIENCE)
        for _ in range(20):
            async with model.sequence("the same") as step:
                assert [(await step(one))["sum"][0, 0] for _ in range(3)] == [1, 2, 3]


# ----------------------------------------------------------------------------------------------------- prepared calls


def prepared(connection: LaneConnection, lies: bool, alone: bool = True) -> tuple[Any, Any, Any]:
    """Prepares a call. ``lies``: its inputs lie in shared memory. ``alone``: all requests to its model go to one worker."""
    given = connection.empty((1, 16), np.float32) if lies else np.empty((1, 16), np.float32)
    places = {name: connection.empty((1, 16), np.float32) for name in ("OUTPUT0", "OUTPUT1")}
    ones = connection.empty((1, 16), np.float32) if lies else np.empty((1, 16), np.float32)
    ones[:] = 1
    call = Call("addsub", {"INPUT0": given, "INPUT1": ones}, places=places)
    made = connection.prepare(call)
    if alone:
        leave_one(connection)
    return given, places, made


def leave_one(connection: LaneConnection, model: str = "addsub") -> None:
    """Has all requests to a model go to one worker, as where there is no other: the part in C makes prepared calls then."""
    known = connection.models[model, 0]
    known.alone = known.lanes[0]


@pytest.mark.parametrize("lies", [True, False])
def test_a_prepared_call_sends_what_its_arrays_hold(connection: LaneConnection, lies: bool) -> None:
    given, places, call = prepared(connection, lies)
    for number in range(20):
        given[:] = number
        outputs = call(_PATIENCE)
        check(outputs, number)
        assert outputs["OUTPUT0"] is places["OUTPUT0"]
        assert outputs.timing.compute_ns > 0


class Counted:
    """Wraps a lane's socket and counts the calls of its methods."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._sock, name)


@pytest.mark.parametrize("timeout", [None, _PATIENCE])
def test_a_prepared_call_sends_once_and_receives_once(connection: LaneConnection, timeout: float | None) -> None:
    """The part in C does both, of the lane that has nothing to do. Nothing is left behind for the garbage collector."""
    given, _, call = prepared(connection, True)
    for number in range(3):
        given[:] = number
        check(call(timeout), number)
    lane = connection.model_of(addsub(1)).lanes[0]
    counted: Any = Counted(lane.socket.sock)
    lane.socket.sock = counted
    gc.collect()
    gc.disable()
    try:
        blocks, first = sys.getallocatedblocks(), next(lane.ids)
        for number in range(500):
            given[:] = number
            check(call(timeout), number)
        assert next(lane.ids) - first == 501
        assert sys.getallocatedblocks() - blocks < 100 + len(counted.calls)
        assert gc.get_count()[0] < 100
    finally:
        gc.enable()
        lane.socket.sock = counted._sock
    assert [name for name in counted.calls if name != "fileno"] == []


def test_a_prepared_call_asks_python_again_once_something_has_changed(
    connection: LaneConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, _, call = prepared(connection, True)
    asked = CountedCalls(monkeypatch, connection, "exchange")

    def ask(number: int) -> int:
        before = asked.count
        given[:] = number
        check(call(_PATIENCE), number)
        return asked.count - before

    for number in range(3):
        ask(number)
    assert [ask(number) for number in range(5)] == [0] * 5
    connection.find_lanes(addsub(1), None, time.monotonic(), anew=True)
    leave_one(connection)
    # The worker has been told of all that was closed, so that the first call after is Python's only until it is sent.
    assert [ask(number) for number in range(5)] == [1, 0, 0, 0, 0]
    large = [connection.empty(48 << 20, np.uint8) for _ in range(3)]
    large.clear()
    connection.memory._collect()
    assert [ask(number) for number in range(5)] == [1, 1, 0, 0, 0]


class Interrupted(Exception):
    pass


def test_a_prepared_call_is_interrupted(connection: LaneConnection) -> None:
    """A handler that raises ends the wait, one that returns does not. The next call first waits for the answer of the former."""
    seconds, place = connection.empty(1, np.float32), connection.empty(1, np.float32)
    call = connection.prepare(Call("slow", {"x": seconds}, places={"y": place}))
    leave_one(connection, "slow")
    handled: list[int] = []

    def interrupt(number: int, _: object) -> None:
        handled.append(number)
        if len(handled) > 1:
            raise Interrupted

    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(3):
            seconds[:] = 0
            for _ in range(3):
                assert call(_PATIENCE)["y"] == 1
            handled.clear()
            seconds[:] = 0.5
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
            with pytest.raises(Interrupted):
                call(_PATIENCE)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert len(handled) == 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    seconds[:] = 0
    assert call(_PATIENCE)["y"] == 1
    check(connection.ask(addsub(1)).result(_PATIENCE), 1)


def test_16_mib_are_neither_copied_nor_allocated(connection: LaneConnection, daemon: DaemonProcess) -> None:
    """A prepared call on shared arrays copies nothing once the first answers have shown the worker where outputs go."""
    count = 4 << 20
    given, place = connection.empty(count, np.float32), connection.empty(count, np.float32)
    given[:] = np.arange(count)
    call = connection.prepare(identity(given, places={"OUTPUT0": place}))
    for _ in range(5):
        call(_PATIENCE)
    np.testing.assert_array_equal(place, given)

    def copied() -> float:
        return scrape(daemon.metrics_url).model("tensord_copied_bytes_total", "identity")

    before = copied()
    tracemalloc.start()
    try:
        call(_PATIENCE)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for number in range(20):
            given[0] = number
            assert call(_PATIENCE)["OUTPUT0"] is place
            assert place[0] == number
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now - held < 2048
    assert peak - held < 8192
    assert call(_PATIENCE).copied_bytes == 0
    assert copied() == before


def test_a_prepared_call_may_leave_outputs_to_the_server(connection: LaneConnection) -> None:
    values = np.zeros(5000, np.float32)
    call = connection.prepare(identity(values))
    for number in range(5):
        values[:] = number
        outputs = call(_PATIENCE)
        assert outputs["OUTPUT0"].tolist() == [number] * 5000
    words = connection.prepare(Call("strings", {"x": np.array([b"a", b"bc"], dtype=object)}))
    assert words(_PATIENCE)["y"].tolist() == [b"bc", b"a"]


def test_threads_share_a_prepared_call(connection: LaneConnection) -> None:
    given, _, call = prepared(connection, True)
    given[:] = 5
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            for _ in range(50):
                check(call(_PATIENCE), 5)
                check(connection.ask(addsub(6)).result(_PATIENCE), 6)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_prepared_call_that_was_late_ends_before_the_next(connection: LaneConnection) -> None:
    seconds, place = connection.empty(1, np.float32), connection.empty(1, np.float32)
    call = connection.prepare(Call("slow", {"x": seconds}, places={"y": place}))
    leave_one(connection, "slow")
    seconds[:] = 0
    for _ in range(3):
        call(_PATIENCE)
    seconds[:] = 0.3
    with pytest.raises(DeadlineExceeded):
        call(0.05)
    with pytest.raises(DeadlineExceeded):
        call(0.01)
    seconds[:] = 0
    assert call(_PATIENCE)["y"].tolist() == [1.0]


def test_prepared_calls_outlive_their_numbers(connection: LaneConnection) -> None:
    """More kinds than a lane has numbers: the first call's number has come to stand for something else."""
    given, _, call = prepared(connection, True)
    given[:] = 1
    check(call(_PATIENCE), 1)
    for kind in range(1100):
        for _ in range(2):
            connection.ask(addsub(kind, parameters={"kind": kind}))
    given[:] = 2
    check(call(_PATIENCE), 2)


class CountedCalls:
    """Counts calls of a function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.count = 0
        original = getattr(owner, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize("lies", [True, False])
async def test_a_prepared_coroutine_looks_for_its_inputs_once(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, lies: bool
) -> None:
    """Each call copies an array that lies elsewhere once, and others not at all; calls in flight have what it held then."""
    async with await tensord_client.connect_async(clients_socket(daemon.folder)) as client:
        model = await client.model("identity", timeout=_PATIENCE)
        given = client.empty((5000,), np.float32) if lies else np.empty(5000, np.float32)
        call = model.prepare({"INPUT0": given})
        given[:] = -1
        assert (await call())["OUTPUT0"].tolist() == [-1] * 5000
        located = CountedCalls(monkeypatch, Memory, "locate")
        copied = CountedCalls(monkeypatch, placement.np, "copyto")
        for number in range(10):
            given[:] = number
            assert (await call())["OUTPUT0"].tolist() == [number] * 5000
        assert (located.count, copied.count) == (0, 0 if lies else 10)
        if lies:
            return

        async def ask(number: int) -> None:
            given[:] = number
            assert (await call())["OUTPUT0"].tolist() == [number] * 5000

        await asyncio.gather(*[ask(number) for number in range(8)])
        assert copied.count == 18


async def test_strings_of_a_prepared_coroutine_are_those_of_its_call(daemon: DaemonProcess) -> None:
    async with await tensord_client.connect_async(clients_socket(daemon.folder)) as client:
        words = np.array([b"a", b"bc"], dtype=object)
        call = (await client.model("strings")).prepare({"x": words})
        assert (await call())["y"].tolist() == [b"bc", b"a"]
        words[0] = b"def"
        assert (await call())["y"].tolist() == [b"bc", b"def"]


# ---------------------------------------------------------------------------------------------------------------- end


def test_what_is_in_flight_when_a_connection_is_closed_is_cancelled(connect: Callable[..., LaneConnection]) -> None:
    connection = connect()
    pending = connection.ask(Call("slow", {"x": np.array([5.0], np.float32)}))
    done: queue.Queue[LaneRequest] = queue.Queue()
    connection.ask(Call("slow", {"x": np.array([5.0], np.float32)})).add_done_callback(done.put)
    kept = connection.empty(4, np.float32)
    threading.Timer(0.2, connection.close).start()
    with pytest.raises(Cancelled):
        pending.result(_PATIENCE)
    with pytest.raises(Cancelled):
        done.get(timeout=_PATIENCE).result()
    kept[:] = 1
    with pytest.raises(Unavailable, match="the client was closed"):
        connection.ask(addsub(1))
    connection.close()


def test_lanes_are_closed_before_the_daemon_hears_that_the_client_leaves(
    connect: Callable[..., LaneConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the lanes of a client that it loses, and requests in flight there fail as if their workers had died."""
    connection, hears = connect(), list[bool]()
    check(connection.ask(addsub(1)).result(_PATIENCE), 1)
    close = ClientLane.close

    def closed(lane: ClientLane, error: ServingError) -> None:
        assert connection._socket is not None
        hears.append(connection._socket.has_ended())
        close(lane, error)

    monkeypatch.setattr(ClientLane, "close", closed)
    connection.close()
    assert hears
    assert not any(hears)


def test_many_connections_leave_nothing(daemon: DaemonProcess, connect: Callable[..., LaneConnection]) -> None:
    import psutil

    workers = [psutil.Process(worker.pid) for worker in daemon.workers]
    mine = psutil.Process()

    def once() -> None:
        connection = connect()
        check(connection.ask(addsub(1)).result(_PATIENCE), 1)
        connection.ask(identity(connection.empty(5000, np.float32))).result(_PATIENCE)
        connection.close()

    def mapped() -> int:
        return sum(
            "memfd:tensord-client" in each.path for worker in workers for each in worker.memory_maps(grouped=False)
        )

    for _ in range(3):
        once()
    # A worker may keep what it ran last.
    descriptors, kept = mine.num_fds(), mapped()
    for _ in range(20):
        once()
    assert mine.num_fds() <= descriptors
    limit = time.monotonic() + _PATIENCE
    while mapped() > kept:
        assert time.monotonic() < limit
        time.sleep(0.05)
