"""Who calls: known by the context that the worker runs a model's code in, and elsewhere by that code itself.

    execute, and coroutines of it       the requests that it works on: what it calls ends with them
    threads that a model starts         only the model: nobody knows for which request they work
    initialize                          no calls, because it is not served yet; it may have other models loaded
    auto_complete_config, finalize      neither

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


class Desk(Protocol):
    """One per worker; for any thread. What comes of a ``tensord.workers.calls.call.Call`` is said to it."""

    def begin(self, call: Any) -> None:
        """Has it made."""

    def cancel(self, call: Any) -> None:
        """Nobody waits for it any more; it ends with an error."""

    def stop(self, call: Any) -> None:
        """Its model is asked to stop; what it still answers is waited for."""

    def took(self, call: Any) -> None:
        """One of its responses was taken: there is room for a further one."""

    def ask(self, operation: LoadModel | UnloadModel | ModelReady, port: Any) -> bytes:
        """Has the daemon do something for a ``ModelPort``, and waits for its answer. Raises ServingError."""

    def abandon(self, call: Any) -> None:
        """It goes on, and nobody takes its responses."""


#: What the builtins of a model's code have besides Python's.
PORT = "__tensord_port__"


class Held(Protocol):
    """What a model has that is to end with it."""

    def close(self) -> None:
        """Idempotent."""


class EndsLater(Held, Protocol):
    """What takes a while to end."""

    @property
    def ended(self) -> bool:
        """Whether it has, once it was closed."""


class ModelPort:
    """One loaded version's way to the rest of its worker."""

    def __init__(
        self,
        name: str,
        version: int,
        desk: Desk | None,
        metrics: MetricRegistry | None = None,
        code: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """
        Args:
          desk: None where nothing is served, as in a check.
          code: what a thread of ours is in while it runs the model's code.
        """
        self.name = name
        self.version = version
        self.desk = desk
        self.metrics = MetricRegistry() if metrics is None else metrics
        self.code = code
        #: Called when code of the model has run, in its thread.
        self.ran: Callable[[], None] | None = None
        #: It is being loaded.
        self.loading = True
        #: The worker's.
        self.process = os.getpid()
        #: What it has made outside of itself.
        self.held: set[Held] = set()
        #: Those that it has started, if any.
        self.processes: EndsLater | None = None
        #: Whoever of it calls without a request.
        self.detached = Caller(self)

    @property
    def key(self) -> tuple[str, int]:
        """Its model and version."""
        return self.name, self.version

    def close(self) -> None:
        """The version is gone."""
        for held in list(self.held):
            held.close()

    def __repr__(self) -> str:
        return f"<ModelPort of {self.name}:{self.version}>"


class Phase(enum.Enum):
    """What a model's code may ask for."""

    #: Answers of other models, and all else.
    SERVING = enum.auto()
    #: Others to be loaded and unloaded.
    LOADING = enum.auto()
    #: Nothing.
    APART = enum.auto()


class Caller:
    """Whoever runs a model's code. ``in_flight`` belongs to the worker's loop."""

    __slots__ = ("execution", "in_flight", "phase", "port", "requests")

    def __init__(
        self,
        port: ModelPort,
        requests: Sequence[Request] = (),
        execution: object = None,
        phase: Phase = Phase.SERVING,
    ) -> None:
        """
        Args:
          requests: that it works on.
          execution: that it is part of; None: it holds no instance.
        """
        self.port = port
        self.requests = tuple(requests)
        self.execution = execution
        self.phase = phase
        #: Calls that are under way.
        self.in_flight = 0

    @property
    def may_call(self) -> bool:
        """Whether other models answer it."""
        return self.phase is Phase.SERVING and not (self is self.port.detached and self.port.loading)

    def close(self) -> None:
        """What it worked on is done: a task that it left behind calls for nobody, and keeps nothing of that."""
        self.requests, self.execution = (), None

    def __repr__(self) -> str:
        return f"<Caller in {self.port!r}, {len(self.requests)} requests>"


def asker() -> Caller | None:
    """As ``caller``, for who waits for an answer. Raises InvalidArgument: this process was forked from the worker."""
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
    """What runs within is that caller."""
    token = _current.set(caller)
    try:
        yield caller
    finally:
        _current.reset(token)
        if caller.port.ran is not None:
            caller.port.ran()


def caller() -> Caller | None:
    """Whoever calls this. None: it is no model's code."""
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
