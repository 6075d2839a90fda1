"""Pushes on workers that are objects here: on all of them or on none, in which order, and what a replaced worker is given."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensord.config.options import Options, Requests, SupervisorOptions, Workers
from tensord.daemon.models.lifecycle import Lifecycle, Send
from tensord.daemon.models.repository import FoundModel
from tensord.daemon.parameters.pushes import Parameters
from tensord.daemon.processes.child import Child
from tensord.shm.control_records import Load, Loaded, Unload
from tensord.shm.errors import Internal, InvalidArgument, NotFound, Replaced, ServingError, Unavailable, Unsupported
from tensord.shm.operations import (
    AbortParameters,
    CommitParameters,
    DropParameters,
    FileSource,
    ListParameters,
    MakeParameters,
    MemorySource,
    Peer,
    PushParameters,
    RevertParameters,
    ServeLoaded,
    Settle,
    StageParameters,
)
from tests.invariants import check_invariants

PEER = Peer("unix", pid=7, uid=1000)
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def sealed(content: bytes, seals: int = SEALS) -> int:
    memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(memory, content)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
    return memory


def content_of(memory: int) -> bytes:
    return os.pread(memory, 1 << 20, 0)


class Worker:
    """Stages and commits bytes; refuses those that contain ``bad``."""

    result_of = Child.result_of

    stopping = False
    alive = True
    #: Whether it died by itself.
    ended_by_work = False
    #: The loads that it has not answered.
    owed: tuple[tuple[str, int], ...] = ()

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.name, self.device = f"worker-{incarnation}", f"cpu:{incarnation}"
        self.calls: list[Any] = []
        self.sent: list[Any] = []
        self.staged: dict[int, list[tuple[str, int, bytes]]] = {}
        self.sets: dict[str, tuple[int, bytes]] = {"main": (0, b"")}
        self.kept: dict[tuple[str, int], bytes] = {("main", 0): b""}
        #: Called with each operation before it is carried out.
        self.before: Callable[[Any], Any] = lambda operation: None
        self.killed = ""

    def stops_at(self, kind: type) -> tuple[asyncio.Event, asyncio.Event]:
        """Has the worker stop before an operation of that kind. The first event says that it has; it goes on after the second."""
        stopped, goes_on = asyncio.Event(), asyncio.Event()

        def before(operation: Any) -> Any:
            if not isinstance(operation, kind):
                return None
            stopped.set()
            return goes_on.wait()

        self.before = before
        return stopped, goes_on

    async def call(self, operation: Any, *fds: int) -> tuple[bytes, list[int]]:
        given = [os.dup(fd) for fd in fds]
        try:
            await asyncio.sleep(0)
            if (waited := self.before(operation)) is not None:
                await waited
            if not self.alive:
                raise Unavailable(f"{self.name} stopped before it answered")
            self.calls.append(operation)
            return b"{}", self.obey(operation, [content_of(fd) for fd in given])
        finally:
            for fd in given:
                os.close(fd)

    def obey(self, operation: Any, contents: list[bytes]) -> list[int]:
        match operation:
            case MakeParameters(source=FileSource(path)):
                return [sealed(b"from the file " + path.encode())]
            case MakeParameters():
                return [sealed(b"made of " + contents[0])]
            case StageParameters(push, _, _, name, number):
                content = contents[0] if contents else self.kept.get((name, number))
                if content is None:
                    raise NotFound(f"number {number} is not there any more")
                if b"bad" in content:
                    raise InvalidArgument("leaf 'w' has shape [2]")
                self.staged.setdefault(push, []).append((name, number, content))
            case CommitParameters(push):
                for name, number, content in self.staged.pop(push):
                    self.sets[name] = number, content
                    self.kept[name, number] = content
            case AbortParameters(push):
                self.staged.pop(push, None)
            case DropParameters(set=name):
                del self.sets[name]
        return []

    def send(self, record: Any) -> None:
        self.sent.append(record)

    def describe_exit(self) -> str:
        return "was killed by SIGSEGV"

    def kill(self, reason: str) -> None:
        self.killed, self.alive = reason, False


class World:
    """A supervisor with version 1 of model ``m`` on some workers."""

    def __init__(self, folder: Path, workers: int = 2, **options: Any) -> None:
        self.workers = {number: Worker(number) for number in range(1, workers + 1)}
        self.lifecycle = Lifecycle()
        self.tasks: set[asyncio.Task[None]] = set()
        models: Any = SimpleNamespace(lifecycle=self.lifecycle, loaded=self.loaded, fill=self.fill)
        supervisor: Any = SimpleNamespace(workers=SimpleNamespace(by_incarnation=self.workers), spawn=self.spawn)
        given = Options(
            workers=Workers(max_parameter_sets=options.pop("sets", 100), max_parameter_byte_size=1000),
            requests=Requests(worker_wait=options.pop("wait", 60.0)),
            supervisor=SupervisorOptions(parameter_byte_size=options.pop("kept", 1 << 20), **options),
        )
        self.parameters = Parameters(given, supervisor, models)
        #: Answers to loads that the models heard of.
        self.heard: list[tuple[int, Loaded]] = []
        for number in self.workers:
            self.lifecycle.worker_joined(number, f"cpu:{number}")
        self.found = FoundModel("m", folder / "m", b"", (1,), (1,), "f")
        self.lifecycle.load(self.found, 1)
        for number in self.workers:
            self.lifecycle.loaded(number, Loaded("m", 1))

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def loaded(self, worker: int, answer: Loaded) -> None:
        self.heard.append((worker, answer))
        self.lifecycle.loaded(worker, answer)

    def fill(self, name: str, number: int) -> None:
        for instruction in self.lifecycle.fill(name, number):
            if isinstance(instruction, Send) and isinstance(instruction.record, Load):
                self.workers[instruction.worker].send(instruction.record)

    async def push(self, content: bytes, **more: Any) -> dict[str, Any]:
        memory = sealed(content)
        wanted = PushParameters(
            "m", more.pop("version", 0), more.pop("set", "main"), MemorySource(len(content)), **more
        )
        try:
            return dict(json.loads(await self.parameters.push(wanted, PEER, memory)))
        finally:
            os.close(memory)

    async def push_file(self, path: str, **more: Any) -> dict[str, Any]:
        wanted = PushParameters("m", 0, "main", FileSource(path), **more)
        return dict(json.loads(await self.parameters.push(wanted, PEER, -1)))

    async def revert(self, name: str = "main") -> dict[str, Any]:
        return dict(json.loads(await self.parameters.revert(RevertParameters("m", 0, name), PEER)))

    def listed(self, name: str = "") -> list[dict[str, Any]]:
        return list(json.loads(self.parameters.listed(ListParameters("m", 0, name))))

    def dies(self, number: int) -> None:
        self.workers.pop(number).alive = False
        self.lifecycle.worker_left(number)

    async def joins(self, number: int) -> Worker:
        """Adds a replacement worker, which has answered its Load when this returns."""
        worker = self.workers[number] = Worker(number)
        (instruction,) = self.lifecycle.worker_joined(number, f"cpu:{number}")
        worker.send(instruction.record)  # type: ignore[union-attr]
        self.parameters.loaded(worker, Loaded("m", 1))  # type: ignore[arg-type]
        while self.tasks:
            await asyncio.sleep(0)
        return worker

    @property
    def held(self) -> list[tuple[int, bytes]]:
        return [worker.sets["main"] for worker in self.workers.values()]


@pytest.fixture
def no_leak() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@contextlib.asynccontextmanager
async def world(folder: Path, **options: Any) -> Any:
    made = World(folder, **options)
    try:
        yield made
        check_invariants(made.parameters.sets)
    finally:
        made.parameters.close()


pytestmark = pytest.mark.usefixtures("no_leak")


async def test_no_number_is_the_last(tmp_path: Path) -> None:
    """Whoever pushes the highest number that may be given leaves numbers for those who give none."""
    async with world(tmp_path) as w:
        assert (await w.push(b"the highest", number=1 << 62))["number"] == 1 << 62
        assert (await w.push(b"and one more"))["number"] == (1 << 62) + 1
        assert w.held == [((1 << 62) + 1, b"and one more")] * 2


async def test_one_worker_that_refuses_leaves_all_as_they_were(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.push(b"what is in force")
        w.workers[2].before = lambda operation: (
            _refuse("leaf 'w' has shape [3]") if isinstance(operation, StageParameters) else None
        )
        with pytest.raises(InvalidArgument, match="shape"):
            await w.push(b"what is refused")
        while w.tasks:
            await asyncio.sleep(0)
        assert w.held == [(1, b"what is in force")] * 2
        assert [worker.staged for worker in w.workers.values()] == [{}, {}]
        assert (w.listed()[0]["number"], w.parameters.outcomes["m", "refused"]) == (1, 1)


async def _refuse(why: str) -> None:
    raise InvalidArgument(why)


async def test_of_two_pushes_at_once_the_higher_number_wins_and_the_other_is_told(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        staging, go_on = asyncio.Event(), asyncio.Event()

        def before(operation: Any) -> Any:
            if isinstance(operation, StageParameters) and operation.number == 16:
                staging.set()
                return go_on.wait()
            return None

        w.workers[1].before = before
        lower = asyncio.ensure_future(w.push(b"number sixteen", number=16))
        await staging.wait()
        higher = asyncio.ensure_future(w.push(b"number seventeen", number=17))
        await asyncio.sleep(0.01)
        with pytest.raises(Replaced, match=r"number 15 .* is not newer than 17"):
            await w.push(b"number fifteen", number=15)
        go_on.set()
        with pytest.raises(Replaced, match="number 16 of set 'main' of model 'm' is not newer than 17"):
            await lower
        assert (await higher)["number"] == 17
        assert w.held == [(17, b"number seventeen")] * 2
        assert not any(
            getattr(call, "number", 0) == 16 for call in w.workers[1].calls if isinstance(call, CommitParameters)
        )


async def test_a_worker_that_dies_in_the_middle_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        for at in (StageParameters, CommitParameters):
            victim = max(w.workers)

            def dies(operation: Any, at: Any = at, victim: int = victim) -> None:
                if isinstance(operation, at):
                    w.dies(victim)

            w.workers[victim].before = dies
            answer = await w.push(f"when {at.__name__} kills".encode())
            assert w.held == [(answer["number"], f"when {at.__name__} kills".encode())] * (len(w.workers))
            replacement = await w.joins(victim + 10)
            assert replacement.sets["main"] == w.held[0]


async def test_workers_let_go_of_a_push_whose_model_is_unloaded_meanwhile(tmp_path: Path) -> None:
    """
    1. The first worker has staged a push. 2. The model is unloaded. 3. The second one has staged it.
    Result: the push is refused, and neither worker keeps what it has staged.
    """
    async with world(tmp_path) as w:
        staging, go_on = w.workers[2].stops_at(StageParameters)
        pushing = asyncio.create_task(w.push(b"comes too late"))
        await staging.wait()
        w.lifecycle.unload("m", 2)
        w.parameters.forget("m", 1)
        go_on.set()
        with pytest.raises(Unavailable, match="before its parameters were exchanged"):
            await pushing
        while w.tasks:
            await asyncio.sleep(0)
        assert [worker.staged for worker in w.workers.values()] == [{}, {}]


async def test_a_worker_that_cannot_have_all_sets_again_keeps_none(tmp_path: Path) -> None:
    """
    1. A model has two sets. 2. A worker is replaced. 3. The replacement has staged one of the sets, and refuses the other.
    Result: the replacement, which does not serve the model, has nothing of the sets.
    """
    async with world(tmp_path, workers=1) as w:
        await w.push(b"what is in force")
        await w.push(b"of a customer", set="customer-7")
        w.dies(1)
        made = Worker.obey

        def obey(worker: Worker, operation: Any, contents: list[bytes]) -> list[int]:
            if isinstance(operation, StageParameters) and operation.set == "customer-7":
                raise InvalidArgument("leaf 'w' has shape [3]")
            return made(worker, operation, contents)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Worker, "obey", obey)
            replacement = await w.joins(2)
        assert replacement.sent[1:] == [Unload("m", 1)]
        assert [type(call) for call in replacement.calls].count(StageParameters) == 2
        assert replacement.staged == {}


async def test_where_all_workers_die_before_it_holds_the_push_waits_for_a_replacement(tmp_path: Path) -> None:
    async with world(tmp_path, workers=1) as w:
        w.workers[1].before = lambda operation: w.dies(1) if isinstance(operation, StageParameters) else None
        push = asyncio.ensure_future(w.push(b"patient one"))
        while w.workers:
            await asyncio.sleep(0)
        await w.joins(2)
        assert (await push)["number"] == 1
        assert w.held == [(1, b"patient one")]


async def test_where_the_worker_dies_that_makes_the_parameters_another_one_does(tmp_path: Path) -> None:
    """The fronts are told of its death before the push hears of it: there may be no further news for long."""
    async with world(tmp_path) as w:

        def dies(operation: Any) -> None:
            if isinstance(operation, MakeParameters):
                w.dies(1)
                w.parameters.tell()

        w.workers[1].before = dies
        push = asyncio.ensure_future(w.push(b"a part of it", partial=True))
        for _ in range(50):
            await asyncio.sleep(0)
        assert push.done()
        assert w.held == [(1, b"made of a part of it")]
        await push


async def test_a_push_waits_no_longer_for_a_worker_than_a_request(tmp_path: Path) -> None:
    async with world(tmp_path, workers=1, wait=0.05) as w:
        w.dies(1)
        with pytest.raises(Unavailable, match="model 'm' version 1 has no worker: one is being replaced"):
            await w.push(b"nobody is there")


async def test_a_worker_that_cannot_commit_is_replaced(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.workers[2].before = lambda operation: _refuse("no") if isinstance(operation, CommitParameters) else None
        await w.push(b"it holds from then on")
        assert w.workers[2].killed == "did not follow a change of parameters (no)"
        assert w.workers[1].sets["main"] == (1, b"it holds from then on")


async def test_a_replaced_worker_is_held_until_it_has_everything(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.push(b"main, number 1")
        await w.push(b"of a customer", set="customer-7", number=40)
        w.dies(2)
        await w.push(b"main, number 2")
        order: list[str] = []
        replacement = w.workers[3] = Worker(3)
        replacement.before = lambda operation: order.append(type(operation).__name__)
        w.lifecycle.worker_joined(3, "cpu:3")
        w.parameters.loaded(replacement, Loaded("m", 1))  # type: ignore[arg-type]
        assert w.heard == []
        while w.tasks:
            await asyncio.sleep(0)
        assert replacement.sets == {"main": (2, b"main, number 2"), "customer-7": (40, b"of a customer")}
        assert order == ["StageParameters", "StageParameters", "CommitParameters", "ServeLoaded"]
        assert w.heard == [(3, Loaded("m", 1))]
        assert sorted(w.lifecycle.models["m"].versions[1].ready) == [1, 3]


@pytest.mark.parametrize("version", [0, 1])
async def test_a_push_waits_while_its_model_is_being_loaded(tmp_path: Path, version: int) -> None:
    """As inference does: until it is loaded, or has failed, or for as long as a request would wait."""
    for outcome in ("loaded", "failed", "unloaded", "given up", "nothing"):
        async with world(tmp_path, wait=0.2 if outcome == "nothing" else 60.0) as w:
            unloading = [each.worker for each in w.lifecycle.unload("m", 2) if isinstance(each, Send)]
            for worker in unloading:
                w.lifecycle.unloaded(worker, "m", 1)
            with pytest.raises(NotFound, match=r"'m'( version 1)? is not ready"):
                await w.push(b"comes too late", version=version)
            w.lifecycle.load(w.found, 3)
            with pytest.raises(Unavailable, match="is being loaded"):
                w.listed()
            pushing = asyncio.create_task(w.push(b"comes too early", version=version))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not pushing.done()
            match outcome:
                case "loaded":
                    for worker in w.workers.values():
                        w.parameters.loaded(worker, Loaded("m", 1))  # type: ignore[arg-type]
                    assert (await pushing)["number"] == 1
                    assert w.held == [(1, b"comes too early")] * 2
                case "failed":
                    for worker in w.workers.values():
                        w.parameters.loaded(worker, Loaded("m", 1, reason="OSError: no"))  # type: ignore[arg-type]
                    with pytest.raises(NotFound, match="is not ready"):
                        await pushing
                case "unloaded":
                    w.lifecycle.unload("m", 4)
                    w.parameters.tell()
                    with pytest.raises(NotFound, match="is not ready"):
                        await pushing
                case "given up":
                    for number in list(w.workers):
                        w.dies(number)
                    w.parameters.tell()
                    with pytest.raises(
                        Unavailable, match="cannot be served now: 2 worker processes died while loading"
                    ):
                        await pushing
                case _:
                    with pytest.raises(Unavailable, match="model 'm' version 1 is being loaded"):
                        await pushing
            assert not w.parameters._claimed
            assert not w.parameters._coming_byte_size


@pytest.mark.parametrize("at", [MakeParameters, StageParameters])
async def test_a_push_that_a_worker_dies_of_is_not_given_to_the_next(tmp_path: Path, at: type) -> None:
    """Whether it is made there, or staged: the push is refused, and what was in force stays so."""
    async with world(tmp_path) as w:
        await w.push(b"number one")
        given: list[int] = []

        def before(operation: Any) -> None:
            if isinstance(operation, at):
                given.append(1)
                w.workers[1].ended_by_work = True
                w.dies(1)

        w.workers[1].before = before
        with pytest.raises(Internal, match="the worker process that was given them was killed by SIGSEGV"):
            await w.push_file("a fifo")
        assert len(given) == 1
        assert w.held == [(1, b"number one")]
        assert (await w.joins(3)).sets["main"] == (1, b"number one")


@pytest.mark.parametrize("beside", [False, True])
async def test_what_is_in_force_is_given_to_two_workers_that_die_of_it(tmp_path: Path, beside: bool) -> None:
    """
    As a request is; then the version is not served, and says why, until something else is pushed.
    ``beside``: those that die load another model meanwhile, of which they may have died.
    """
    async with world(tmp_path, workers=1) as w:
        await w.push(b"deadly one")
        w.dies(1)
        for number in (2, 3, 4):
            worker = w.workers[number] = Worker(number)
            worker.owed = (("other", 1),) if beside and number < 4 else ()

            def before(operation: Any, number: int = number, worker: Worker = worker) -> None:
                if isinstance(operation, StageParameters) and operation.number == 1 and not (beside and number == 4):
                    worker.ended_by_work = True
                    w.dies(number)

            worker.before = before
            instructions = w.lifecycle.worker_joined(number, f"cpu:{number}")
            (instruction,) = instructions or w.lifecycle.retry("m", 1, 2)
            worker.send(instruction.record)  # type: ignore[union-attr]
            w.parameters.loaded(worker, Loaded("m", 1))  # type: ignore[arg-type]
            while w.tasks:
                await asyncio.sleep(0)
        assert worker.alive
        ((_, answer),) = w.heard
        if beside:
            assert (answer.reason, worker.sets["main"]) == ("", (1, b"deadly one"))
            return
        assert answer.reason == "parameter set 'main' number 1 is not given to another worker: 2 died of it"
        pushing = asyncio.create_task(w.push(b"a better one"))
        await asyncio.sleep(0.01)
        w.parameters.loaded(worker, Loaded("m", 1))  # type: ignore[arg-type]
        assert (await pushing)["number"] == 2
        assert worker.sets["main"] == (2, b"a better one")


async def test_fronts_hear_of_a_replacement_when_it_has_said_that_it_serves(tmp_path: Path) -> None:
    """Whatever else the worker and its model go through meanwhile: told is not served, and a worker that dies serves nothing."""
    for outcome in ("serves", "dies", "refuses"):
        async with world(tmp_path) as w:
            await w.push(b"number one")
            w.dies(2)
            replacement = w.workers[3] = Worker(3)
            asked, goes_on = asyncio.Event(), asyncio.Event()

            async def before_it_serves(
                w: World = w, outcome: str = outcome, asked: asyncio.Event = asked, goes_on: asyncio.Event = goes_on
            ) -> None:
                asked.set()
                await goes_on.wait()
                if outcome == "dies":
                    w.dies(3)
                elif outcome == "refuses":
                    raise InvalidArgument("it never does")

            replacement.before = lambda each, serving=before_it_serves: (
                serving() if isinstance(each, ServeLoaded) else None
            )
            w.lifecycle.worker_joined(3, "cpu:3")
            w.parameters.loaded(replacement, Loaded("m", 1))  # type: ignore[arg-type]
            await asked.wait()
            assert (w.heard, sorted(w.lifecycle.models["m"].versions[1].ready)) == ([], [1])
            goes_on.set()
            while w.tasks:
                await asyncio.sleep(0)
            assert w.heard == ([(3, Loaded("m", 1))] if outcome == "serves" else [])
            assert bool(replacement.killed) == (outcome == "refuses")


async def test_a_worker_that_joins_while_the_first_push_is_under_way_has_it(tmp_path: Path) -> None:
    """Its Load came before: it is staged on, or restored, before it serves."""
    for at in (StageParameters, CommitParameters):
        async with world(tmp_path) as w:
            w.dies(2)
            joining = w.workers[2] = Worker(2)
            w.lifecycle.worker_joined(2, "cpu:2")

            def before(operation: Any, at: Any = at, w: Any = w, joining: Worker = joining) -> None:
                if isinstance(operation, at):
                    w.parameters.loaded(joining, Loaded("m", 1))

            w.workers[1].before = before
            await w.push(b"the first of all")
            while w.tasks:
                await asyncio.sleep(0)
            assert w.held == [(1, b"the first of all")] * 2
            assert w.heard == [(2, Loaded("m", 1))]


async def test_a_worker_serves_what_it_loads_once_it_has_the_push_that_was_answered_meanwhile(tmp_path: Path) -> None:
    """
    1. A worker is sent a Load before anything was ever pushed. 2. A push is answered. 3. The worker has loaded the version.
    Until it has the push, not even another model in that worker may call what it has loaded.
    """
    async with world(tmp_path) as w:
        w.dies(2)
        joining = w.workers[2] = Worker(2)
        w.lifecycle.worker_joined(2, "cpu:2")
        await w.push(b"the first of all")
        assert joining.calls == []
        w.parameters.loaded(joining, Loaded("m", 1))  # type: ignore[arg-type]
        while w.tasks:
            await asyncio.sleep(0)
        assert [type(call) for call in joining.calls] == [StageParameters, CommitParameters, ServeLoaded]
        assert w.held == [(1, b"the first of all")] * 2


async def test_a_worker_that_stands_before_it_serves_holds_up_no_other_worker(tmp_path: Path) -> None:
    """1. Two workers have loaded a version. 2. One of them does not act upon ServeLoaded, nor answer it, for now."""
    async with world(tmp_path) as w:
        for number in (1, 2):
            w.dies(number)
        goes_on = asyncio.Event()
        for number in (3, 4):
            w.workers[number] = Worker(number)
            w.lifecycle.worker_joined(number, f"cpu:{number}")
        w.workers[3].before = lambda operation: goes_on.wait()
        for worker in w.workers.values():
            w.parameters.loaded(worker, Loaded("m", 1))  # type: ignore[arg-type]
        while not w.heard:
            await asyncio.sleep(0)
        assert [worker for worker, _ in w.heard] == [4]
        push = asyncio.ensure_future(w.push(b"to both of them"))
        for _ in range(20):
            await asyncio.sleep(0)
        goes_on.set()
        await push
        assert len(w.heard) == 2
        assert w.held == [(1, b"to both of them")] * 2


async def test_a_load_without_parameters_does_not_wait_for_one_that_is_given_some(tmp_path: Path) -> None:
    """
    1. A version with pushed parameters is loaded by a new worker, which stands before it has them. 2. Another new worker loads
    the model's other version, into which nothing was pushed. Result: that one serves; a third worker is given nothing yet.
    """
    async with world(tmp_path) as w:
        w.lifecycle.load(dataclasses.replace(w.found, versions=(1, 2), chosen=(1, 2), fingerprint="g"), 2)
        for number in (1, 2):
            for version in (1, 2):
                w.lifecycle.loaded(number, Loaded("m", version))
        await w.push(b"into the second", version=2)
        for number in (3, 4, 5):
            w.workers[number] = Worker(number)
            w.lifecycle.worker_joined(number, f"cpu:{number}")
        staging, goes_on = w.workers[3].stops_at(StageParameters)
        for number, version in ((3, 2), (5, 2), (4, 1)):
            w.parameters.loaded(w.workers[number], Loaded("m", version))  # type: ignore[arg-type]
            await staging.wait()
        while not w.heard:
            await asyncio.sleep(0)
        assert w.heard == [(4, Loaded("m", 1))]
        assert w.workers[5].calls == []
        goes_on.set()
        while len(w.heard) < 3:
            await asyncio.sleep(0)


async def test_a_load_that_is_to_serve_waits_for_a_push_under_way(tmp_path: Path) -> None:
    """Also one that brings nothing there yet: the worker is not among those to which the push goes."""
    async with world(tmp_path) as w:
        w.dies(2)
        joining = w.workers[2] = Worker(2)
        w.lifecycle.worker_joined(2, "cpu:2")
        committing, goes_on = w.workers[1].stops_at(CommitParameters)
        push = asyncio.ensure_future(w.push(b"the first of all"))
        await committing.wait()
        w.parameters.loaded(joining, Loaded("m", 1))  # type: ignore[arg-type]
        for _ in range(20):
            await asyncio.sleep(0)
        assert joining.calls == []
        goes_on.set()
        await push
        while w.tasks:
            await asyncio.sleep(0)
        assert w.held == [(1, b"the first of all")] * 2


@pytest.mark.parametrize("change", ["push", "revert", "drop"])
async def test_a_change_waits_for_a_worker_that_has_yet_to_read_that_it_is_to_unload(
    tmp_path: Path, change: str
) -> None:
    """A call of a model in that worker, or a request over a program's lane, would find what was in force before."""
    async with world(tmp_path) as w:
        await w.push(b"what is in force", set="customer-7" if change == "drop" else "main")
        w.lifecycle.load(dataclasses.replace(w.found, devices=("cpu:1",), fingerprint="moved"), 2)
        w.lifecycle.loaded(1, Loaded("m", 1))
        assert list(w.lifecycle.version("m", 1).unloading) == [2]  # type: ignore[union-attr]
        settling, goes_on = w.workers[2].stops_at(Settle)
        changes = {
            "push": lambda: w.push(b"number two"),
            "revert": w.revert,
            "drop": lambda: w.parameters.drop(DropParameters("m", 0, "customer-7"), PEER),
        }
        changing = asyncio.ensure_future(changes[change]())
        for _ in range(50):
            await asyncio.sleep(0)
        assert (settling.is_set(), changing.done()) == (True, False)
        goes_on.set()
        await changing
        assert w.workers[2].calls[-1] == Settle()


async def test_what_nobody_wants_any_more_is_not_served(tmp_path: Path) -> None:
    """The version is unloaded while a worker loads it: no model there finds it, not even until the worker reads Unload."""
    async with world(tmp_path) as w:
        w.dies(2)
        joining = w.workers[2] = Worker(2)
        w.lifecycle.worker_joined(2, "cpu:2")
        w.lifecycle.unload("m", 2)
        w.parameters.loaded(joining, Loaded("m", 1))  # type: ignore[arg-type]
        while w.tasks:
            await asyncio.sleep(0)
        assert joining.calls == []
        assert w.heard == [(2, Loaded("m", 1))]


@pytest.mark.parametrize("at", ["before", StageParameters, CommitParameters])
async def test_what_another_load_has_overtaken_is_not_served(tmp_path: Path, at: Any) -> None:
    """The worker has discarded it, or does so before it reads anything more: what it would serve then has no pushes yet."""
    async with world(tmp_path) as w:
        await w.push(b"number one")
        w.dies(2)
        joining = w.workers[2] = Worker(2)
        w.lifecycle.worker_joined(2, "cpu:2")

        def overtake() -> None:
            w.parameters.outdate("m", 1)
            w.lifecycle.load(dataclasses.replace(w.found, fingerprint="other"), 2)

        def before(operation: Any) -> Any:
            if isinstance(operation, at):
                overtake()
                joining.before = lambda operation: None
                # Its load is not there any more.
                return _refuse("unknown model") if at is StageParameters else None
            return None

        if at == "before":
            overtake()
        else:
            joining.before = before
        w.parameters.loaded(joining, Loaded("m", 1))  # type: ignore[arg-type]
        while w.tasks:
            await asyncio.sleep(0)
        assert w.heard == [(2, Loaded("m", 1, reason="another load of it came", cancelled=True))]
        assert ServeLoaded("m", 1) not in joining.calls
        assert (joining.sent, joining.killed) == ([], "")
        w.parameters.loaded(joining, Loaded("m", 1))  # type: ignore[arg-type]
        while w.tasks:
            await asyncio.sleep(0)
        assert joining.calls[-1] == ServeLoaded("m", 1)
        assert w.heard[1:] == [(2, Loaded("m", 1))]


async def test_what_is_not_kept_leaves_the_model_unready_and_says_so(tmp_path: Path) -> None:
    async with world(tmp_path, workers=1, kept=20) as w:
        await w.push(b"21 bytes are too many")
        assert w.listed()[0]["kept"] == "none"
        w.dies(1)
        replacement = await w.joins(2)
        reason = "parameter set 'main' number 1 was not kept: 21 bytes, at most 20 are kept of all models "
        reason += "(supervisor.parameter_byte_size)"
        assert w.heard == [(2, Loaded("m", 1, reason=reason))]
        assert replacement.sent[1:] == [Unload("m", 1)]
        assert w.lifecycle.models["m"].versions[1].reason == reason
        with pytest.raises(
            Unavailable, match=r"is not served: parameter set 'main' number 1 was not kept.*bring it back"
        ):
            await w.push(b"a part of it", partial=True)
        # Loaded from its files again, it is the repository's.
        for instruction in w.lifecycle.load(w.found, 2, again=True):
            if type(instruction).__name__ == "Forget":
                w.parameters.forget("m", 1)
        w.parameters.loaded(replacement, Loaded("m", 1))
        while w.tasks:
            await asyncio.sleep(0)
        assert w.heard[-1] == (2, Loaded("m", 1))


async def test_a_whole_push_brings_back_what_lacked_another_one(tmp_path: Path) -> None:
    for workers in (1, 2):
        async with world(tmp_path, workers=workers, kept=20) as w:
            await w.push(b"21 bytes are too many")
            w.dies(1)
            second = await w.joins(9)
            assert w.lifecycle.version("m", 1).ready.keys() == {2} - ({2} if workers == 1 else set())  # type: ignore[union-attr]
            push = asyncio.ensure_future(w.push(b"these are kept"))
            while not any(isinstance(record, Load) for record in second.sent[2:]):
                await asyncio.sleep(0)
            w.parameters.loaded(second, Loaded("m", 1))  # type: ignore[arg-type]
            assert (await push)["number"] == 2
            while w.tasks:
                await asyncio.sleep(0)
            assert w.held == [(2, b"these are kept")] * workers
            assert len(w.lifecycle.version("m", 1).ready) == workers  # type: ignore[union-attr]


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_worker_that_could_not_be_given_a_set_loads_the_model_when_the_set_is_dropped(
    tmp_path: Path, workers: int
) -> None:
    """With one worker the model is served again, with two by both of them."""
    async with world(tmp_path, workers=workers, kept=20) as w:
        await w.push(b"these are kept")
        await w.push(b"21 bytes are too many", set="customer-7")
        w.dies(1)
        replacement = await w.joins(9)
        assert "was not kept" in w.heard[-1][1].reason
        await w.parameters.drop(DropParameters("m", 0, "customer-7"), PEER)
        assert isinstance(replacement.sent[-1], Load)
        w.parameters.loaded(replacement, Loaded("m", 1))  # type: ignore[arg-type]
        while w.tasks:
            await asyncio.sleep(0)
        assert w.held == [(1, b"these are kept")] * workers
        assert len(w.lifecycle.version("m", 1).ready) == workers  # type: ignore[union-attr]


async def test_of_two_that_would_bring_it_back_one_does(tmp_path: Path) -> None:
    """The other one is a push as any. A version that is unloaded before either has its turn is gone for both."""
    for unloaded in (False, True):
        async with world(tmp_path, workers=1, kept=20) as w:
            await w.push(b"21 bytes are too many")
            w.dies(1)
            second = await w.joins(9)
            async with w.parameters._turn("m").change():
                pushes = [asyncio.ensure_future(w.push(content)) for content in (b"bring back", b"then these")]
                await asyncio.sleep(0)
                if unloaded:
                    w.lifecycle.unload("m", 2)
                    w.parameters.forget("m", 1)
            if not unloaded:
                while not any(isinstance(record, Load) for record in second.sent[2:]):
                    await asyncio.sleep(0)
                w.parameters.loaded(second, Loaded("m", 1))  # type: ignore[arg-type]
            results = await asyncio.gather(*pushes, return_exceptions=True)
            if unloaded:
                assert [type(result) for result in results] == [NotFound, NotFound]
                assert not list(w.parameters.sets)
            else:
                assert [result["number"] for result in results] == [2, 3]
                assert w.held == [(3, b"then these")]


async def test_what_does_not_fit_does_not_bring_it_back(tmp_path: Path) -> None:
    async with world(tmp_path, workers=1, kept=20) as w:
        await w.push(b"21 bytes are too many")
        w.dies(1)
        second = await w.joins(9)
        push = asyncio.ensure_future(w.push(b"a bad content"))
        while not any(isinstance(record, Load) for record in second.sent[2:]):
            await asyncio.sleep(0)
        w.parameters.loaded(second, Loaded("m", 1))  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"number 2 cannot be restored: leaf 'w' has shape"):
            await push


async def test_a_file_is_read_again_where_its_bytes_were_not_kept_unless_it_changed(tmp_path: Path) -> None:
    file = tmp_path / "m" / "1" / "params-17.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"as it was")
    async with world(tmp_path, workers=1, kept=5) as w:
        await w.push_file("params-17.safetensors", number=17)
        assert w.listed()[0]["kept"] == "file"
        w.dies(1)
        second = await w.joins(2)
        assert second.sets["main"] == (17, b"from the file params-17.safetensors")
        file.write_bytes(b"another one")
        w.dies(2)
        await w.joins(3)
        assert w.heard[-1][1].reason.endswith(", and its file is another one now")


async def test_what_came_before_goes_first_when_room_is_short(tmp_path: Path) -> None:
    async with world(tmp_path, kept=30) as w:
        for content in (b"ten bytes1", b"ten bytes2", b"ten bytes3"):
            await w.push(content)
        await w.push(b"ten byte A", set="a")
        assert w.parameters.sets.byte_size == 30
        await w.push(b"ten byte B", set="b")
        # number 2 of main was dropped for it.
        assert [entry["kept"] for entry in w.listed()] == ["memory"] * 3
        assert w.parameters.sets.byte_size == 30
        # Workers may have kept it.
        assert (await w.revert())["number"] == 2
        assert w.held == [(2, b"ten bytes2")] * 2


async def test_a_revert_that_one_worker_cannot_do_changes_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.push(b"number one")
        del w.workers[2].kept["main", 0]
        with pytest.raises(NotFound, match="number 0 is not there any more"):
            await w.revert()
        assert w.held == [(1, b"number one")] * 2
        assert w.listed()[0]["number"] == 1


async def test_main_is_listed_while_all_workers_are_replaced(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        for number in list(w.workers):
            w.dies(number)
        assert [(entry["set"], entry["number"]) for entry in w.listed()] == [("main", 0)]


async def test_named_sets_are_listed_and_dropped_and_bounded(tmp_path: Path) -> None:
    async with world(tmp_path, sets=3) as w:
        await w.push(b"for a customer", set="a", number=5)
        await w.push(b"for another one", set="b")
        with pytest.raises(
            Unavailable, match=r"has 3 parameter sets, at most 3 are allowed \(workers.max_parameter_sets\)"
        ):
            await w.push(b"one too many", set="c")
        assert [(entry["set"], entry["number"]) for entry in w.listed()] == [("main", 0), ("a", 5), ("b", 1)]
        await w.parameters.drop(DropParameters("m", 0, "a"), PEER)
        assert [sorted(worker.sets) for worker in w.workers.values()] == [["b", "main"]] * 2
        with pytest.raises(NotFound, match="model 'm' version 1 has no parameter set 'a'"):
            await w.parameters.drop(DropParameters("m", 0, "a"), PEER)
        with pytest.raises(NotFound, match="model 'm' has no parameter set 'a'"):
            w.listed("a")
        with pytest.raises(InvalidArgument, match="'main' cannot be dropped"):
            await w.parameters.drop(DropParameters("m", 0, "main"), PEER)
        await w.push(b"now there is room", set="c")


async def test_memory_that_is_not_sealed_or_partial_or_summed_is_made_by_a_worker(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        memory = sealed(b"may change yet", SEALS & ~fcntl.F_SEAL_WRITE & ~fcntl.F_SEAL_SEAL)
        wanted = PushParameters("m", 1, "main", MemorySource(14))
        await w.parameters.push(wanted, PEER, memory)
        os.close(memory)
        assert w.held == [(1, b"made of may change yet")] * 2
        for more in ({"partial": True}, {"checksum": "crc32:00000000"}):
            await w.push(b"0123456789", **more)
            made = next(call for call in reversed(w.workers[1].calls) if isinstance(call, MakeParameters))
            assert (made.partial, made.checksum) == (more.get("partial", False), more.get("checksum", ""))
        assert sum(isinstance(call, MakeParameters) for call in w.workers[2].calls) == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"set": "no spaces"}, "no parameter set can be called 'no spaces'"),
        ({"set": "x" * 129}, "1 to 128 letters"),
        ({"number": -1}, "number -1 of set 'main' is no number"),
        ({"number": (1 << 62) + 1}, f"number {(1 << 62) + 1} of set 'main' is no number of a push: .* to {1 << 62}"),
        ({"checksum": "md5:0"}, "a checksum is"),
    ],
)
async def test_what_is_said_wrongly_is_refused_before_anything_is_done(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(InvalidArgument, match=words):
            await w.push(b"0123456789", **fields)
        assert w.workers[1].calls == []


async def test_sizes_and_kinds_of_memory(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        with pytest.raises(InvalidArgument, match="1001 bytes of parameters are pushed, at most 1000 are allowed"):
            await w.push(bytes(1001))
        with pytest.raises(InvalidArgument, match="9 bytes are no parameters"):
            await w.push(bytes(9))
        reader, writer = os.pipe()
        with pytest.raises(InvalidArgument, match="not a memfd"):
            await w.parameters.push(PushParameters("m", 0, "main", MemorySource(10)), PEER, reader)
        os.close(reader)
        os.close(writer)
        for path in ("/etc/passwd", "../2/params.npz", ""):
            with pytest.raises(InvalidArgument, match="is no file of the model"):
                await w.push_file(path)


async def test_models_that_are_not_there(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        for model, version in (("n", 0), ("m", 2)):
            wanted = PushParameters(model, version, "main", FileSource("p.npz"))
            with pytest.raises(NotFound, match=f"Request for unknown model: '{model}'"):
                await w.parameters.push(wanted, PEER, -1)
        assert w.parameters.outcomes == {("m", "refused"): 1}
        assert json.loads(w.parameters.listed(ListParameters()))[0]["model"] == "m"


async def test_owners_of_pushes_over_unix_sockets(tmp_path: Path) -> None:
    async with world(tmp_path, parameter_owners=("1001",)) as w:
        with pytest.raises(Unsupported, match="user 1000 may not change parameters"):
            await w.push(b"from the wrong user")
        assert w.parameters.outcomes == {("m", "refused"): 1}
        for peer in (Peer("unix", uid=1001), Peer("unix", uid=os.geteuid()), Peer("operator"), Peer("tcp")):
            memory = sealed(b"from a right one")
            await w.parameters.push(PushParameters("m", 0, "main", MemorySource(16)), peer, memory)
            os.close(memory)


async def test_a_flood_of_pushes_is_bounded(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        go_on = asyncio.Event()
        w.workers[1].before = lambda operation: go_on.wait() if isinstance(operation, StageParameters) else None
        pushes = [asyncio.ensure_future(w.push(b"0123456789", set=f"s{number}")) for number in range(70)]
        await asyncio.sleep(0.05)
        go_on.set()
        results = await asyncio.gather(*pushes, return_exceptions=True)
        refused = [result for result in results if isinstance(result, ServingError)]
        assert len(refused) == 6
        assert str(refused[0]) == "64 changes of parameters are under way, at most 64 are allowed"
        assert len(w.listed()) == 65
