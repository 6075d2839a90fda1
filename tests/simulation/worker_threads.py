"""What threads of a worker's models wait with, in turns: who waits gives its turn away until what it waits for is there."""

from __future__ import annotations

import collections
import contextlib
import gc
import queue
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import greenlet  # type: ignore[import-untyped]

from tensord.workers.calls import call as call_module
from tensord.workers.engine import Engine
from tensord.workers.models.execution import Execution
from tensord.workers.models.instance import Instance
from tensord.workers.models.loaded_model import LoadedModel
from tensord.workers.models.model_version import ModelVersion, VersionState
from tensord.workers.requests import response_sender
from tensord.workers.requests.request import InnerRequest, Request
from tensord.workers.worker import Worker
from tests.simulation import sequences
from tests.simulation.scheduler import Death, Process, Scheduler, Thread

#: The scheduler whose workers run.
_scheduler: list[Scheduler] = []
#: The model versions of each worker that somebody still refers to.
_adopted: dict[Engine, weakref.WeakSet[ModelVersion]] = {}


def _running() -> Thread | None:
    """Returns the thread that has this turn; None: the turn is another one's."""
    process = _scheduler[0].current
    return None if process is None else process.running


def ident() -> int:
    running = _running()
    return 0 if running is None else running.ident


def wait(ready: Callable[[], object]) -> None:
    """Has the running thread wait until ``ready()``."""
    while not ready():
        running = _running()
        assert running is not None, "who waits here is no thread"
        running.pause(ready)


class OwnThread(Thread):
    """A thread that a model's code has started: it runs until it waits, and ends by itself or with its process."""

    def __init__(self, process: Process, target: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._process = process
        self._target, self._arguments = target, arguments
        self._is_instance = False
        self.ident = id(self)
        self._paused: greenlet.greenlet | None = greenlet.greenlet(self._run)
        self._goes_on: Callable[[], object] = lambda: True

    def start(self) -> None:
        self._process.threads.append(self)

    @property
    def has_work(self) -> bool:
        return self._paused is not None and bool(self._goes_on())

    def turn(self) -> None:
        paused, self._paused = self._paused, None
        assert paused is not None
        self._process.running = self
        try:
            # Of a thread that has not begun it is whoever made the thread, who may be gone.
            paused.parent = greenlet.getcurrent()
            paused.switch()
        finally:
            self._process.running = None

    def _run(self) -> None:
        try:
            self._target(*self._arguments)
        except Death:
            raise
        except BaseException as error:
            self._process.scheduler.defect(f"a thread of a model in {self._process} ends with {error!r}")
        finally:
            self._target, self._arguments = _nothing, ()
            self._process.threads.remove(self)


def begin(target: Callable[..., object], *arguments: Any) -> None:
    """Starts a thread of a model's own."""
    process = _scheduler[0].current
    assert process is not None
    OwnThread(process, target, arguments).start()


def _nothing() -> None:
    pass


class Event:
    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def wait(self) -> None:
        wait(lambda: self._is_set)


class SimpleQueue:
    def __init__(self) -> None:
        self._items: collections.deque[Any] = collections.deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        wait(lambda: self._items)
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


def why_not_run(request: Request) -> str:
    """Returns why a request may not be given to a thread now; "": it may."""
    each: Request | None = request
    while each is not None:
        if each.cancelled:
            return "it was cancelled" if each is request else f"{each!r}, for which it is made, was cancelled"
        # A function that has failed may have left a call under way.
        ends = each is request or each.version.loaded.ensemble is not None
        if ends and not each.is_open and not each.submitter.closed:
            return "it has had its end" if each is request else f"{each!r}, for which it is made, has had its end"
        each = each.origin if isinstance(each, InnerRequest) else None
    return ""


def left(worker: Worker) -> dict[str, object]:
    """Returns what a worker has left of calls, ensembles, responses and versions, of which nobody waits for anything."""
    dispatcher, models = worker._dispatcher, worker._models
    versions = list(models.everyone())
    gc.collect()
    found = {
        "calls": [*dispatcher.calls._open, *dispatcher.calls._waiting],
        "requests that calls were made for": dispatcher.calls.of,
        "requests of ensembles": dispatcher.ensembles._runs,
        "responses that wait for room": dispatcher.responses.kept,
        "requests that senders answer": [request for version in versions for request in version.senders],
        "versions that run": [f"{version.name}, {version.executing}" for version in versions if version.executing],
        # A sequence that was broken off keeps its version for a while.
        "versions that have yet to go": [each.name for each in models.draining if each.name != sequences.MODEL],
        # Their parameters would stay on the device.
        "versions that have gone": [
            each for each in _adopted.get(worker._engine, ()) if each.state is VersionState.CLOSED
        ],
    }
    return {name: each for name, each in found.items() if each}


@contextlib.contextmanager
def in_place(scheduler: Scheduler) -> Iterator[None]:
    """Puts the simulation in the place of what models' threads wait with; checks that nobody runs what has had its end."""
    given = Instance.run

    def give(instance: Instance, execution: Execution, done: Callable[[Execution], None]) -> None:
        for request in execution.requests:
            if why := why_not_run(request):
                scheduler.defect(f"{instance.name} of {scheduler.current} is given {request!r}: {why}")
        given(instance, execution, done)

    adopt = Engine.adopt

    def adopted(engine: Engine, loaded: LoadedModel) -> ModelVersion:
        version = adopt(engine, loaded)
        _adopted.setdefault(engine, weakref.WeakSet()).add(version)
        return version

    _scheduler.append(scheduler)
    with contextlib.ExitStack() as stack:
        stack.callback(_scheduler.clear)
        stack.callback(_adopted.clear)
        for owner, name, value in (
            (call_module, "queue", types.SimpleNamespace(SimpleQueue=SimpleQueue, Empty=queue.Empty)),
            (call_module, "threading", types.SimpleNamespace(get_ident=ident)),
            (response_sender, "threading", types.SimpleNamespace(Lock=threading.Lock, Event=Event)),
            (Instance, "run", give),
            (Engine, "adopt", adopted),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
