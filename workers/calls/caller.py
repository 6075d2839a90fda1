"""Finds which model's code calls: by the context that the worker runs it in, and elsewhere by that code itself.

    execute, and coroutines of it       the requests that it works on: what it calls ends with them
    threads that a model starts         only the model is known, not the request that they work for
    initialize                          no calls, because the model is not served yet; it may have other models loaded
    auto_complete_config, finalize      no calls and no loads

Python gives a coroutine the context of whoever began it, and a new thread none.
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
    """Takes calls of models to the worker's loop, from any thread; a ``calls.call.ModelCall`` gets the responses."""

    def begin(self, call: Any) -> None:
        """Has a call made."""

    def cancel(self, call: Any) -> None:
        """Ends a call with an error, because nobody waits for it any more."""

    def stop(self, call: Any) -> None:
        """Asks the called model to stop; responses that it still sends are waited for."""

    def took(self, call: Any) -> None:
        """Notes that a response of a call was taken, and that there is room for a further one."""

    def ask(self, operation: LoadModel | UnloadModel | ModelReady, port: Any) -> bytes:
        """Has the daemon carry out an operation for a ``ModelPort``. Waits for its answer. Raises ServingError."""

    def abandon(self, call: Any) -> None:
        """Lets a call go on whose responses nobody takes."""


#: Name of the ``ModelPort`` among the builtins of a model's code.
PORT = "__tensord_port__"


class Held(Protocol):
    """A resource of a model that is to be closed with it."""

    def close(self) -> None:
        """Closes the resource. Idempotent."""


class EndsLater(Held, Protocol):
    """A resource that takes a while to end."""

    @property
    def ended(self) -> bool:
        """True once it was closed and has ended."""


class ModelPort:
    """Connects the code of one loaded version with the rest of its worker."""

    def __init__(
        self,
        name: str,
        version: int,
        server: CallServer | None,
        metrics: MetricRegistry | None = None,
        code: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """
        Args:
          server: None where nothing is served, as in a check.
          code: makes a context that threads of the worker enter to run the model's code.
        """
        self.name = name
        self.version = version
        self.server = server
        self.metrics = MetricRegistry() if metrics is None else metrics
        self.code = code
        #: Called in the model's thread each time that its code has run.
        self.ran: Callable[[], None] | None = None
        #: Whether the version is being loaded.
        self.loading = True
        #: The worker's process.
        self.process = os.getpid()
        #: Resources that the model's code has made outside of itself.
        self.held: set[Held] = set()
        #: Processes that the model's code has started, if any.
        self.processes: EndsLater | None = None
        #: The caller for code of the model that works for no known request.
        self.detached = Caller(self)

    @property
    def key(self) -> tuple[str, int]:
        """Its model and version."""
        return self.name, self.version

    def close(self) -> None:
        """Closes the model's resources, because its version is gone."""
        for held in list(self.held):
            held.close()

    def __repr__(self) -> str:
        return f"<ModelPort of {self.name}:{self.version}>"


class CallerPhase(enum.Enum):
    """A phase of a model's life, which decides what its code may ask for."""

    #: It may call, load and unload other models.
    SERVING = enum.auto()
    #: It may have other models loaded and unloaded.
    LOADING = enum.auto()
    #: It may ask for nothing.
    APART = enum.auto()


class Caller:
    """A run of a model's code that may call other models. ``in_flight`` belongs to the worker's loop."""

    __slots__ = ("execution", "in_flight", "phase", "port", "requests")

    def __init__(
        self,
        port: ModelPort,
        requests: Sequence[Request] = (),
        execution: object = None,
        phase: CallerPhase = CallerPhase.SERVING,
    ) -> None:
        """
        Args:
          requests: the requests that the code works on.
          execution: the execution that it is part of; None: it holds no instance.
        """
        self.port = port
        self.requests = tuple(requests)
        self.execution = execution
        self.phase = phase
        #: How many of its calls are under way.
        self.in_flight = 0

    @property
    def may_call(self) -> bool:
        """True while other models may be called."""
        return self.phase is CallerPhase.SERVING and not (self is self.port.detached and self.port.loading)

    def close(self) -> None:
        """Forgets the requests, which are done: a task that is left behind calls for none of them."""
        self.requests, self.execution = (), None

    def __repr__(self) -> str:
        return f"<Caller in {self.port!r}, {len(self.requests)} requests>"


def asker() -> Caller | None:
    """Returns ``caller()``. Raises InvalidArgument if this process was forked, where no answer from the worker would come."""
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
    """Makes ``caller`` the caller of code that runs within the block."""
    token = _current.set(caller)
    try:
        yield caller
    finally:
        _current.reset(token)
        if caller.port.ran is not None:
            caller.port.ran()


def current() -> Caller | None:
    """Returns the caller in whose context this code is run; None: in none, as in a thread that a model has started."""
    return _current.get(None)


def caller() -> Caller | None:
    """Returns the caller that this code is run by, or None where it is no model's code."""
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
