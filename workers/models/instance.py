"""Runs one instance of a model in a thread of its own, which gets batches from the worker's event loop."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tensord.shm.status_page import StatusPage
from tensord.workers.models.execution import Execution, RunnableModel, run
from tensord.workers.programs.run_errors import CheckDevice, works
from tensord.workers.threads.cancellation import Cancellation
from tensord.workers.threads.inbox import Inbox


class Instantiated(RunnableModel, Protocol):
    """A model object that an instance's thread creates, runs and closes."""

    def initialize(self) -> None:
        """Initialises the model before its first batch. Errors of the model are raised unchanged."""
        return

    def close(self) -> None:
        """Ends the model. The caller runs no batch afterwards. Raises nothing."""
        return


@dataclass(frozen=True, slots=True)
class Planned:
    """What an instance is configured to be: its name, its number in its group, and what it needs to run."""

    name: str
    #: The number of its group, and its number there.
    place: tuple[int, int] = (0, 0)
    #: True if it only holds the model, and gets no requests.
    passive: bool = False
    #: Resource of the rate limiter -> how much of it a run needs.
    needs: Mapping[str, int] = field(default_factory=dict)
    #: It has one turn where an instance of priority 1 has so many.
    priority: int = 0


@dataclass(frozen=True, slots=True)
class _Closing:
    closed: Callable[[], None]


_Job = tuple[Execution, Callable[[Execution], None]] | _Closing | Callable[[], None]


class Instance:
    """A thread that runs one instance of a model.

    Outside this class, only the thread of the worker's event loop may use ``given``, ``depth`` and ``status_slot``.
    ``given``: the batches that wait or run, at most ``depth``. ``status_slot``: the index of the thread's ``StatusPage`` entry.
    """

    def __init__(
        self,
        planned: Planned,
        create: Callable[[], Instantiated],
        inbox: Inbox,
        page: StatusPage,
        warm: Callable[[Instantiated], None] | None = None,
        check: CheckDevice = works,
        code: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Prepares an instance of a model. ``start`` starts the instance's thread.

        Args:
          create: makes the model object that the instance runs. The instance's thread calls ``create``.
          inbox: a queue of functions that the instance's thread adds. The worker's event loop calls them.
          page: the status page in which the thread notes the batch that it runs.
          warm: warms the model up in the thread before the instance counts as started. If it is None, there is no warmup.
          check: raises an error if the model's device has failed.
          code: returns a context manager that applies the model's settings of JAX. The thread runs inside this context.
        """
        self._code = code
        self._check = check
        self._warm = warm
        self._inbox = inbox
        self._page = page
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._create = create
        self._started = threading.Event()
        self._failure: BaseException | None = None
        #: The executions between ``run`` and their ``done``, and how many may be: where others wait behind the one that runs the
        #: thread need not wait for the loop.
        self.given: deque[Execution] = deque()
        self.depth = 1
        #: Given executions that the thread has not begun.
        self._ahead: deque[Execution] = deque()
        #: True if it was told to end.
        self.closing = False
        #: Its slot on the status page, where it notes what it runs, and as which model's.
        self.status_slot = 0
        self.page_key = 0
        self.planned = planned
        self.name, self.needs, self.priority = planned.name, planned.needs, planned.priority
        self._thread = threading.Thread(target=self._main, name=planned.name, daemon=True)

    def start(self) -> None:
        """Starts the thread, which initialises and warms up the model. Does not wait for that."""
        self._thread.start()

    def wait_started(self, cancellation: Cancellation) -> None:
        """Waits until the model is initialised and warm. Errors of the model are raised unchanged.

        Raises Cancelled: the load was cancelled.
        """
        # What it is in nobody can cut short: it is left to itself, and is to be closed all the same.
        with cancellation.interrupting(self._started.set):
            self._started.wait()
        cancellation.check()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    @property
    def failed(self) -> bool:
        """True if the model could not be started."""
        return self._failure is not None

    @property
    def busy(self) -> bool:
        """True while the instance has as many batches, running or queued, as it may have."""
        return len(self.given) >= self.depth

    @property
    def running(self) -> Execution | None:
        """The execution that the thread runs or has just finished; None: there is none."""
        return self.given[0] if self.given else None

    @property
    def thread(self) -> int:
        """The number of the instance's thread, as ``threading.get_ident`` returns it; -1 if the thread was not started."""
        return self._thread.ident or -1

    def run(self, execution: Execution, done: Callable[[Execution], None]) -> None:
        """Has the thread run a batch. The worker's loop calls ``done`` afterwards."""
        self.given.append(execution)
        self._ahead.append(execution)
        self._jobs.put((execution, done))

    def take_back(self, execution: Execution) -> bool:
        """Withdraws an execution, so that it does not run. Returns False if it has begun."""
        # One of the two removes it: that is one step, which no other thread can come between.
        with contextlib.suppress(ValueError):
            self._ahead.remove(execution)
            self.given.remove(execution)
            return True
        return False

    def close(self, closed: Callable[[], None]) -> None:
        """Makes the instance end after its queued batches, and does not wait. The worker's loop calls ``closed`` at the end."""
        self.closing = True
        self._jobs.put(_Closing(closed))
        if self._failure is not None:
            self._drop_jobs()

    def _drop_jobs(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if isinstance(job, _Closing):
                    self._inbox.post(job.closed)

    def _main(self) -> None:
        with self._code():
            model = self._begin()
            while model is not None and self._serve(model, self._jobs.get()):
                pass

    def _begin(self) -> Instantiated | None:
        """Creates, initialises and warms up the model. Returns None if that fails."""
        model: Instantiated | None = None
        try:
            made = self._create()
            made.initialize()
            model = made
            if self._warm is not None:
                self._warm(model)
        except BaseException as error:  # a model may call sys.exit() as well
            self._failure = error
            self._drop_jobs()
            if model is not None:
                model.close()
            return None
        finally:
            self._started.set()
        return model

    def _serve(self, model: Instantiated, job: _Job) -> bool:
        """Does one job of the instance's queue. Returns False if the job was to close the model, which is the last one."""
        if isinstance(job, _Closing):
            model.close()
            self._inbox.post(job.closed)
            return False
        if not isinstance(job, tuple):
            job()
            return True
        # An idle thread keeps nothing of its last requests: a client's region stays mapped as long as an array of it lives.
        execution, done = job
        try:
            self._ahead.remove(execution)
        except ValueError:  # it was taken back
            return True
        execution.began_ns = time.monotonic_ns()
        running = [(request.submitter.peer, request.request_id) for request in execution.requests]
        execution.resume = lambda call: self._jobs.put(functools.partial(self._resumed, running, call))
        self._page.begin(self.status_slot, running, self.page_key, execution.began_ns)
        try:
            run(model, execution, self._check)
        finally:
            self._page.end(self.status_slot, execution.computed_ns)
        # With another one to run at once it is not worth waking the loop, which would want Python's lock.
        self._inbox.post(functools.partial(self._done, execution, done), soon=self._jobs.empty())
        return True

    def _resumed(self, running: list[tuple[int, int]], call: Callable[[], None]) -> None:
        self._page.begin(self.status_slot, running, self.page_key, time.monotonic_ns())
        try:
            call()
        finally:
            self._page.end(self.status_slot, time.monotonic_ns())

    def _done(self, execution: Execution, done: Callable[[Execution], None]) -> None:
        self.given.popleft()
        done(execution)

    def __repr__(self) -> str:
        return f"<Instance {self.name} {'busy' if self.given else 'free'}>"
