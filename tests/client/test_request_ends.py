"""Every request ends, whatever happens to its worker, its daemon and its caller, and in whatever order.

A request is in one of four states, and in each of them somebody ends it:

    on a lane       whoever reads the lane: the thread that waits, the lane's thread, or the event loop
    astray          whoever waits for its answer, or a thread of the connection's: it sends the request, or fails it
    being sent      the thread that sends it
    over            nobody
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensord_client
from tensord_client import lane_request
from tensord_client.answer_memory import HeldResults
from tensord_client.asynchronous import AsyncModel
from tensord_client.clients_socket import ClientsSocket
from tensord_client.common.model import Model
from tensord_client.common.results import Description
from tensord_client.errors import Cancelled, ServingError
from tensord_client.http import HttpConnection
from tensord_client.http_channel import Address
from tensord_client.lane_socket import LaneSocket
from tensord_client.memory import Memory
from tensord_client.parameters import ModelParameters
from tensord_client.worker_lane import ClientLane

from tests.client.fake_service import FakeService
from tests.client.test_client import Server, usual
from tests.daemon_process import PATIENCE, descriptors, wait_until
from tests.generated import times

#: Seconds after which a request is taken for one that never ends.
_NEVER = 60.0
X = {"x": np.array([7], np.int32)}
#: What happens to the service: ``FakeService`` has a method for each.
SERVICE = ("gone", "unloaded", "refuses", "stop", "silent", "hangs", "back")
#: "other": there is a request that nobody waits for yet; "crowd": there are futures without a timeout.
BEFORE = [*itertools.chain.from_iterable(itertools.product((*SERVICE, "other", "crowd"), repeat=n) for n in range(3))]
#: "cancel": the caller gives the request up.
AFTER = [*itertools.chain.from_iterable(itertools.product((*SERVICE, "cancel"), repeat=n) for n in range(3))]
DESCRIPTION = Description(
    {
        "model": "m",
        "version": 1,
        "metadata": {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1]}], "outputs": []},
        "max_batch_size": 0,
        "streams": False,
        "sequences": False,
        "pure": True,
    }
)
WAYS = ("future", "thread", "task", "prepared")


class Case:
    """One interleaving: events, a request, events."""

    def __init__(self, folder: Path, way: str, before: tuple[str, ...], after: tuple[str, ...], timed: bool) -> None:
        self._told = f"{before} {way}{' with a timeout' if timed else ''} {after}"
        self._service = FakeService(str(folder / f"{id(self):x}.sock"))
        # Either ends a request, so each is tried without the other.
        self._client = tensord_client.connect(self._service.path, patience=10 * PATIENCE if timed else 0.2)
        self._way, self._before, self._after = way, before, after
        self._model = self._client.model("m", timeout=0.2 if timed else None)
        self._patient = self._client.model("m")
        self._lanes: Any = self._client._connection  # type: ignore[attr-defined]
        self._loop = asyncio.new_event_loop()
        self._others: list[Any] = []
        self._crowd: list[Future[Any]] = []
        self._cancel: Callable[[], Any] = lambda: None

    def run(self) -> str:
        """Returns what is wrong; "" if every request has ended."""
        call = self._model.prepare(X)
        self._patient(X)
        runs = threading.Thread(target=self._loop.run_forever)
        runs.start()
        try:
            for event in self._before:
                self._happens(event)
            future = self._begun(lambda: self._begin(call))
            for event in self._after:
                self._happens(event)
            if self._model.timeout is None and not {"silent", "hangs"}.isdisjoint((*self._before, *self._after)):
                self._service.back()  # nothing else ends what a worker has
            wrong = self._wrong(future)
            self._service.back()
        finally:
            self._client.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
            runs.join()
            self._loop.close()
            self._service.close()
        return wrong or next(filter(None, map(self._wrong, self._crowd)), "") or self._left()

    def _happens(self, event: str) -> None:
        if event == "other":
            try:
                self._others.append(self._lanes.ask(self._model.call(X, (), {})))
            except ServingError:
                pass
        elif event == "crowd":
            self._crowd += [self._begun(lambda: self._patient.submit(X)) for _ in range(3)]
        elif event == "cancel":
            self._cancel()
        else:
            getattr(self._service, event)()

    @staticmethod
    def _begun(begin: Callable[[], Future[Any]]) -> Future[Any]:
        try:
            return begin()
        except ServingError as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _begin(self, call: Any) -> Future[Any]:
        if self._way == "future":
            future = self._model.submit(X)
            self._cancel = future.cancel
            return future
        future = Future()
        if self._way == "task":
            model = AsyncModel(self._model._connection, self._model._description, 0, self._model.timeout)

            async def wait() -> None:
                task = asyncio.ensure_future(model(X))
                self._cancel = lambda: self._loop.call_soon_threadsafe(task.cancel)
                await asyncio.wait([task])
                if task.cancelled():
                    future.set_exception(CancelledError())
                elif (error := task.exception()) is not None:
                    future.set_exception(error)
                else:
                    future.set_result(task.result())

            asyncio.run_coroutine_threadsafe(wait(), self._loop)
            return future

        def waits() -> None:
            try:
                future.set_result(call() if self._way == "prepared" else self._model(X))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=waits, daemon=True).start()
        return future

    def _wrong(self, future: Future[Any]) -> str:
        try:
            answer = future.result(_NEVER)
            return "" if answer["y"].tolist() == [7] else f"{self._told}: {answer}"
        except (ServingError, CancelledError):
            return ""
        except TimeoutError:
            return f"{self._told}: it never ends"
        except BaseException as error:
            return f"{self._told}: {error!r}"

    def _left(self) -> str:
        """Returns what is left of the requests where nobody looks for it."""
        for other in self._others:
            other.cancel()
        wait_until(lambda: not (self._lanes._astray or self._lanes.laneless), f"{self._told}: nothing to be left")
        return ""


def cases(count: int, seed: int = 0) -> list[tuple[str, tuple[str, ...], tuple[str, ...], bool]]:
    found = [
        (way, before, after, timed)
        for way, before, after, timed in itertools.product(WAYS, BEFORE, AFTER, (True, False))
        # A thread that asks a daemon that hangs waits for it.
        if way in ("future", "task") or "hangs" not in (*before, *after)
    ]
    return random.Random(seed).sample(found, min(count, len(found)))


def test_every_request_ends(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("e")
    with ThreadPoolExecutor(16) as threads:
        ended = threads.map(lambda case: Case(folder, *case).run(), cases(times(10_000, 600)))
        assert [each for each in ended if each] == []


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    made = FakeService(str(tmp_path / "s"))
    yield made
    made.close()


@pytest.mark.parametrize("way", ["stream", "asynchronous stream", "asynchronous submit"])
def test_what_is_dropped_before_it_begins_is_cancelled(service: FakeService, way: str) -> None:
    """No caller is left who could end it."""

    async def dropped(model: AsyncModel) -> None:
        if way == "asynchronous submit":
            model.submit(X).cancel()
        else:
            model.stream(X)
        await asyncio.sleep(0)

    with tensord_client.connect(service.path) as client:
        model = client.model("m")
        service.silent()
        if way == "stream":
            model.stream(X)
        else:
            asyncio.run(dropped(AsyncModel(model._connection, model._description, 0, None)))
        service.back()
        assert model(X)["y"].tolist() == [7]
        wait_until(lambda: service.cancelled == 1, "the cancellation")


@pytest.mark.parametrize("way", ["stream", "asynchronous stream", "asynchronous submit"])
def test_what_is_dropped_before_it_begins_gives_its_connection_back(way: str) -> None:
    """A pool has 64, and each request over HTTP has one from its beginning."""
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listening:
        connection = HttpConnection(Address("", *listening.getsockname()), limit=2)

        async def dropped() -> None:
            model = AsyncModel(connection, DESCRIPTION, 0, None)
            for _ in range(3):
                if way == "asynchronous submit":
                    model.submit(X).cancel()
                else:
                    model.stream(X)
                await asyncio.sleep(0)

        for _ in range(3):
            if way == "stream":
                Model(connection, DESCRIPTION, 0, None).stream(X)
            else:
                asyncio.run(dropped())
        assert (connection._pool._in_use, len(connection._pool._line)) == (0, 0)
        connection.close()


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("way", ["lane", "http"])
@pytest.mark.parametrize("under_way", [False, True])
def test_an_asynchronous_client_that_nobody_closes_leaves_its_loop_nothing(
    service: FakeService, tmp_path: Path, way: str, under_way: bool
) -> None:
    """With a request under way whose future nobody has either it does so once that is answered."""
    go = threading.Event()
    server = Server(tmp_path / "http", lambda *asked: usual(*asked) if go.wait(PATIENCE) else None)

    async def asked() -> None:
        client = await tensord_client.connect_async(service.path if way == "lane" else server.address.path)
        model = await client.model("m")
        assert (await model(X))["y"].tolist() == [7]
        if under_way:
            service.silent()
            go.clear()
            model.submit(X)
            await asyncio.sleep(0.01)

    async def left() -> None:
        loop: Any = asyncio.get_running_loop()
        await asyncio.to_thread(int)
        watched, open_ = set(loop._selector.get_map()), set(descriptors())
        await asked()
        service.back()
        go.set()
        deadline = time.monotonic() + PATIENCE
        while set(loop._selector.get_map()) != watched or set(descriptors()) - open_ - kept():
            assert time.monotonic() < deadline, (set(loop._selector.get_map()) ^ watched, descriptors())
            gc.collect()
            await asyncio.sleep(0.01)
        with mock.patch.object(loop._selector, "select", wraps=loop._selector.select) as waits:
            await asyncio.sleep(0.1)
        assert waits.call_count < 4, "the loop has nothing to do but this"

    def kept() -> set[str]:
        """Returns the descriptors of the server and of its connections, whose ends it sees later than the client."""
        return {str(each.fileno()) for each in server._open}

    go.set()
    asyncio.run(left())
    server.close()


def test_a_worker_that_is_gone_before_its_lane_is_used(service: FakeService) -> None:
    """Others of the model are asked, and the daemon learns of the lane that has ended."""
    service.half_gone()
    with tensord_client.connect(service.path) as client:
        for _ in range(2):
            assert client.model("m", timeout=PATIENCE)(X)["y"].tolist() == [7]
        assert service.called_ended == [1]


def test_a_daemon_that_refuses_at_once_is_asked_now_and_then(service: FakeService) -> None:
    with tensord_client.connect(service.path, patience=0.5) as client:
        model = client.model("m")
        assert model(X)["y"].tolist() == [7]
        service.drains()
        with pytest.raises(ServingError, match="draining"):
            model.submit(X).result(PATIENCE)
        assert 2 < service.asked <= 2 + 0.5 / 0.05 + 2


def test_what_the_daemon_was_asked_before_is_no_news(service: FakeService) -> None:
    """Another thread's question was answered before the workers began to end: whoever asks since asks once more."""
    answered, goes_on, waits = threading.Event(), threading.Event(), threading.Event()
    asks = ClientsSocket.ask

    def ask(*words: Any, **named: Any) -> Any:
        answer = asks(*words, **named)
        if not answered.is_set():
            answered.set()
            assert goes_on.wait(PATIENCE)
        return answer

    class Turn:
        """The lock of whoever asks."""

        def acquire(self, timeout: float = -1) -> bool:
            if answered.is_set():
                waits.set()
            return lock.acquire(timeout=timeout)

        def release(self) -> None:
            lock.release()

    with tensord_client.connect(service.path) as client:
        connection: Any = client._connection  # type: ignore[attr-defined]
        call, lock = client.model("m").call(X, (), {}), connection._asking
        with (
            mock.patch.object(connection, "_asking", Turn()),
            mock.patch.object(ClientsSocket, "ask", ask),
            ThreadPoolExecutor() as threads,
        ):
            first = threads.submit(connection.find_lanes, call, None, time.monotonic(), anew=True)
            assert answered.wait(PATIENCE)
            before = service.asked
            second = threads.submit(connection.find_lanes, call, None, time.monotonic(), anew=True)
            assert waits.wait(PATIENCE)
            goes_on.set()
            first.result(PATIENCE)
            second.result(PATIENCE)
        assert service.asked == before + 1


def test_a_prepared_request_that_ended_while_it_had_no_worker(service: FakeService) -> None:
    """Its worker lives and has refused it, and no other one came in time: the next call waits for nobody."""
    with tensord_client.connect(service.path) as client:
        call = client.model("m", timeout=PATIENCE).prepare(X)
        assert call()["y"].tolist() == [7]
        service.refuses()
        service.refuses_lanes()
        with pytest.raises(tensord_client.DeadlineExceeded):
            call(timeout=0.3)
        service.back()
        assert call()["y"].tolist() == [7]


def test_a_client_may_wait_without_an_end(service: FakeService) -> None:
    """Infinity is no time that a lock or a socket takes."""
    with tensord_client.connect(service.path, patience=float("inf")) as client:
        model = client.model("m")
        service.drains()
        future = model.submit(X)
        wait_until(lambda: service.asked > 1, "the daemon to be asked again")
        service.back()
        assert future.result(PATIENCE)["y"].tolist() == [7]
    waits: list[float | None] = []
    for timeout in (float("inf"), 5.0, None):
        parameters = ModelParameters(lambda *asked: waits.append(asked[-1]) or {"number": 1}, "m", 0)
        parameters.update("file", timeout=timeout)
    assert waits == [None, 5.0, None]


def test_a_future_has_whatever_its_answer_raises(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it end the thread that ends others."""
    with tensord_client.connect(service.path) as client:
        model = client.model("m", timeout=PATIENCE)

        def fails(*_: Any) -> Any:
            raise MemoryError("no memory for the answer")

        with monkeypatch.context() as patched:
            patched.setattr(lane_request, "made_answer", fails)
            with pytest.raises(MemoryError, match="no memory for the answer"):
                model.submit(X).result(PATIENCE)
        assert model.submit(X).result(PATIENCE)["y"].tolist() == [7]


class Foreign:
    """An array of another library."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        return X["x"]


@pytest.mark.parametrize("name", ["asyncio", "torch"])
def test_another_thread_imports_a_library(service: FakeService, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Until that is done the module is there and has nothing."""
    with tensord_client.connect(service.path) as client:
        model = client.model("m", timeout=PATIENCE)
        call = model.prepare({"x": Foreign()})
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        assert model({"x": Foreign()})["y"].tolist() == [7]
        assert model.submit({"x": Foreign()}).result(PATIENCE)["y"].tolist() == [7]
        assert call()["y"].tolist() == [7]
        monkeypatch.undo()


class ClosedBetween:
    """A lane's lock ``reading``, which closes the lane between its thread's look at it and the lock."""

    def __init__(self, lane: ClientLane) -> None:
        self._lane = lane
        self._lock = threading.Lock()
        self.closed = threading.Event()
        self.release, self.locked = self._lock.release, self._lock.locked

    def acquire(self, waits: bool = True) -> bool:
        if not waits and threading.current_thread() is self._lane._thread and not self.closed.is_set():
            self._lane.close(Cancelled("it was closed"))
            self.closed.set()
        return self._lock.acquire(waits)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_model_without_sequences_ignores_their_ids_where_its_lane_ended_as_well(service: FakeService) -> None:
    with tensord_client.connect(service.path) as client:
        model = client.model("m", timeout=PATIENCE)
        before = model(X, sequence_id=5)["y"].tolist()
        service.gone()
        for _ in range(2):
            assert model(X, sequence_id=5)["y"].tolist() == before


def test_a_lane_that_is_closed_before_its_thread_reads(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends as if the lane had been closed while it read."""
    wrong: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", wrong.append)
    with tensord_client.connect(service.path) as client:
        model: Any = client.model("m", timeout=PATIENCE)
        service.silent()
        lane = model._connection.models["m", 0].lanes[0]
        lane.reading = ClosedBetween(lane)
        model.submit(X)
        assert lane.reading.closed.wait(PATIENCE)
        lane._thread.join(PATIENCE)
    assert wrong == []


def test_a_lanes_thread_that_is_to_read_and_has_nothing_to_wait_for() -> None:
    """
    1. It waits behind a thread that reads, and another thread behind it. 2. Its request ends, and it is told to read.
    Result: the other thread reads.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lane = ClientLane(ours, 1, Memory(), itertools.count(2**32), HeldResults(1), 1 << 20, 256, 0)
    assert lane.reading.acquire(False)
    lane.in_flight[1] = None
    lane.watch(1)
    wait_until(lambda: len(lane.followers) == 1, "the lane's thread waits")
    other = threading.Thread(target=lambda: lane._follow(types.SimpleNamespace(waiting=True, waiter=None), None))
    other.start()
    wait_until(lambda: len(lane.followers) == 2, "another thread waits")
    lane.watched.clear()
    lane.reading.release()
    lane.promote()
    wait_until(lambda: lane.reading.held, "the other thread reads")
    other.join()
    lane.reading.release()
    lane.close(Cancelled("the client was closed"))
    theirs.close()


def test_an_event_loop_leaves_a_socket_before_it_is_closed() -> None:
    """Another thread may close the lane meanwhile."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    watched = LaneSocket(ours, 0)
    removed: list[int] = []

    class Loop:
        def call_soon_threadsafe(self, called: Callable[..., None], *arguments: Any) -> None:
            leaves.append(lambda: called(*arguments))

        def remove_reader(self, fd: int) -> None:
            removed.append(fd)
            watched.close()

    leaves: list[Callable[[], None]] = []
    with theirs:
        fd = ours.fileno()
        watched.loops[Loop()] = None
        watched.close()
        while leaves:
            leaves.pop()()
        assert (removed, ours.fileno()) == ([fd], -1)
