"""Finds out which model's code is running: by its context variable, or else by the builtins of the code on the stack.

    execute, and coroutines of it       the requests are known; calls of other models end when these requests end
    threads that a model starts         only the model is known, not the request that they work for
    initialize                          may not call other models, because the model is not served yet, but may load them
    auto_complete_config, finalize      may neither call nor load other models

In Python a coroutine has the context of the code that began it, and a new thread has an empty context.
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from tensord.shm.errors import InvalidArgument
from tensord.shm.operations import LoadModel, ModelReady, UnloadModel
from tensord.workers.calls.metric_registry import MetricRegistry

if TYPE_CHECKING:
    from tensord.workers.requests.request import Request


class CallServer(Protocol):
    """Lets a model's code, in any thread, call other models and have the daemon load them. A ``call`` is a ``ModelCall``."""

    def begin(self, call: Any) -> None:
        """Queues the request of a ``ModelCall`` to another model. ``call.answered`` gets each response or error."""

    def cancel(self, call: Any) -> None:
        """Cancels a call that a model has begun. ``call.answered`` is then called with the error Cancelled."""

    def stop(self, call: Any) -> None:
        """Asks the called model to end its stream of responses early. Responses that the model still sends reach the caller.

        Only a streaming model that runs in a thread can be asked. A call of any other model is cancelled.
        """

    def took(self, call: Any) -> None:
        """Lets the called model send its next response to ``call``, because the caller has taken a response."""

    def ask(self, operation: LoadModel | UnloadModel | ModelReady, port: Any) -> bytes:
        """Has the daemon load or unload a model, or say whether it is ready. Returns the daemon's answer.

        ``port``: the ``ModelPort`` of the model whose code asks. The answer to ModelReady is ``true`` or ``false``.
        Raises ServingError: the operation failed.
        """

    def abandon(self, call: Any) -> None:
        """Discards all further responses of a call, while the called model goes on."""


#: Name of the ``ModelPort`` among the builtins of a model's code.
PORT = "__tensord_port__"


class Held(Protocol):
    """A resource that a model's code has made, such as a metric or a process. It is closed when the version is unloaded."""

    def close(self) -> None:
        """Closes the resource. Idempotent."""


class EndsLater(Held, Protocol):
    """A resource that a model's code has made, such as a process, and that may go on for some time after its ``close``."""

    @property
    def ended(self) -> bool:
        """True once ``close`` was called and the resource has ended."""


class ModelPort:
    """The connection of a loaded model version's code to its worker, for calls of other models, metrics and other resources."""

    def __init__(
        self,
        name: str,
        version: int,
        server: CallServer | None,
        metrics: MetricRegistry | None = None,
        code: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Connects the code of version ``version`` of the model ``name`` with its worker.

        Args:
          server: carries out the calls that the code makes to models; None: the code may make no calls.
          metrics: the registry of the worker's metrics; None: a new registry.
          code: makes a context manager. The worker's threads run the model's code inside of it.
        """
        self.name = name
        self.version = version
        self.key = name, version
        self.server = server
        self.metrics = MetricRegistry() if metrics is None else metrics
        self.code = code
        #: Called in the model's thread each time that its code has run.
        self.ran: Callable[[], None] | None = None
        #: True if the version is being loaded.
        self.loading = True
        #: The worker's process.
        self.process = os.getpid()
        #: Resources that the model's code has made outside of itself.
        self.held: set[Held] = set()
        #: Processes that the model's code has started, if any.
        self.processes: EndsLater | None = None
        #: The caller for code of the model that works for no known request.
        self.detached = Caller(self)

    def close(self) -> None:
        """Closes all resources that the model's code has made, such as processes and metrics."""
        for held in list(self.held):
            held.close()

    def __repr__(self) -> str:
        return f"<ModelPort of {self.name}:{self.version}>"


class CallerPhase(enum.Enum):
    """The phases of a model's life. The phase decides whether the model's code may call, load and unload other models."""

    #: It may call, load and unload other models.
    SERVING = enum.auto()
    #: It may have other models loaded and unloaded.
    LOADING = enum.auto()
    #: It may ask for nothing.
    APART = enum.auto()


class Caller:
    """One run of a model's code: the requests that it works on, and whether it may call other models.

    Only the thread of the worker's loop may use ``in_flight``, which counts the run's calls of other models that have not ended.
    """

    __slots__ = ("execution", "in_flight", "phase", "port", "requests")

    def __init__(
        self,
        port: ModelPort,
        requests: Sequence[Request] = (),
        execution: object = None,
        phase: CallerPhase = CallerPhase.SERVING,
    ) -> None:
        """Describes one run of a model's code.

        Args:
          port: the model's connection with its worker.
          requests: the requests that the code works on.
          execution: the running batch of these requests. It is None if the code does not run on an instance of the model.
          phase: decides which calls the code may make.
        """
        self.port = port
        self.requests = tuple(requests)
        self.execution = execution
        self.phase = phase
        #: How many of its calls are under way.
        self.in_flight = 0

    @property
    def may_call(self) -> bool:
        """True if this run of a model's code may call other models. A model that is being loaded or finalized may not."""
        return self.phase is CallerPhase.SERVING and not (self is self.port.detached and self.port.loading)

    def close(self) -> None:
        """Notes that this run of a model's code has ended. Later calls by threads of the run belong to no request."""
        self.requests, self.execution = (), None

    def __repr__(self) -> str:
        return f"<Caller in {self.port!r}, {len(self.requests)} requests>"


def asker() -> Caller | None:
    """Returns the ``Caller`` of the model whose code called this function, or None if no model's code did.

    Raises InvalidArgument if the model forked the calling process, because answers reach only the worker's own process.
    """
    found = caller()
    if found is not None and found.port.process != (here := os.getpid()):
        raise InvalidArgument(
            f"model '{found.port.name}' asks for another one in process {here}, which it forked: its worker, process "
            f"{found.port.process}, cannot answer there; ask in the model's own process and hand the answer on"
        )
    return found


_current: ContextVar[Caller] = ContextVar("caller")


@contextlib.contextmanager
def calling(caller: Caller) -> Iterator[Caller]:
    """Makes ``current`` return ``caller`` in the ``with`` block."""
    token = _current.set(caller)
    try:
        yield caller
    finally:
        _current.reset(token)
        if caller.port.ran is not None:
            caller.port.ran()


def current() -> Caller | None:
    """Returns the run of a model's code from which this function is called, or None if no model's code calls it."""
    return _current.get(None)


def caller() -> Caller | None:
    """Returns the ``Caller`` of the model whose code called this function, directly or through libraries.

    None: no model's code did. If the requests that the code works on are unknown, the ``Caller`` has no requests.
    """
    found = _current.get(None)
    if found is not None:
        return found
    frame = sys._getframe(1)
    while frame is not None:
        port = frame.f_builtins.get(PORT)
        if port is not None:
            return port.detached  # type: ignore[no-any-return]
        frame = frame.f_back  # type: ignore[assignment]
    return None
