"""Finds out which model's code has called a function of the server, and whether this code may call or load other models.

    execute, and coroutines that it begins      may call and load other models
    threads that the model's code starts        may load other models, and may call them once the model itself is loaded
    initialize, create                          may load other models, but may not call them
    auto_complete_config, is_ready, finalize    may neither call nor load other models
    callbacks and threads of a compiled model   may do neither once it is served

The requests that the code works on are known in ``execute`` and its coroutines, but not in threads that the code starts.
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
    """Lets a model's code call other models and have the daemon load other models. Any thread may use this object."""

    def begin(self, call: Any) -> None:
        """Sends the request of the ``ModelCall`` ``call``. ``call.answered`` is called with each response or error."""

    def cancel(self, call: Any) -> None:
        """Cancels a call that a model has begun. ``call.answered`` is then called with the error Cancelled."""

    def stop(self, call: Any) -> None:
        """Asks the called model to end its stream of responses early. The caller still gets responses that the model sends.

        Cancels the call if the model cannot be asked, for example because the model has not begun to work on ``call``.
        """

    def took(self, call: Any) -> None:
        """Notes that the caller has taken a response to the ``ModelCall`` ``call``, so that the called model may send more."""

    def ask(self, operation: LoadModel | UnloadModel | ModelReady, port: Any) -> bytes:
        """Has the daemon carry out ``operation``, and waits for the result. Raises ServingError: the operation failed.

        Returns b"true" or b"false" for ModelReady. The result of LoadModel and UnloadModel has no meaning.
        ``port``: the ``ModelPort`` of the model whose code asks.
        """

    def abandon(self, call: Any) -> None:
        """Discards all further responses of a call, while the called model goes on."""


#: Name of the ``ModelPort`` among the builtins of a model's code.
PORT = "__tensord_port__"


class Held(Protocol):
    """A resource that a model's code has made, such as a metric or a process. It is closed when the version is unloaded."""

    def close(self) -> None:
        """Closes this resource, such as a metric, that a model's code has made. Further calls do nothing."""


class EndsLater(Held, Protocol):
    """A resource that a model's code has made, such as a process, and that may go on for some time after its ``close``."""

    @property
    def ended(self) -> bool:
        """True if ``close`` was called and this resource, such as a process that a model's code has started, has ended."""


class ModelPort:
    """Connects the code of one model version with its worker: for calls of other models, own metrics and own processes."""

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
        #: True if the version is served and its function is compiled.
        self.compiled = False
        #: The worker's process.
        self.process = os.getpid()
        #: Resources that the model's code has made outside of itself.
        self.held: dict[Held, None] = {}
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
    """One run of a model's code, with the requests that the code works on.

    Only the worker's event loop may use ``in_flight``, the number of the run's calls of other models that have not ended.
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
        """Notes the end of this run of a model's code. If its threads later call models, the calls belong to no request."""
        self.requests, self.execution = (), None

    def __repr__(self) -> str:
        return f"<Caller in {self.port!r}, {len(self.requests)} requests>"


def asker() -> Caller | None:
    """Returns the ``Caller`` of the model whose code called this function, or None if no model's code did.

    Raises InvalidArgument if the calling process is not the worker, but a process that the model's code has forked, or if the
    model is compiled and served.
    """
    found = caller()
    if found is not None and found.port.compiled:
        # The worker's loop may be what runs the function, and wait for the callback, and with it for a thread.
        raise InvalidArgument(
            f"model '{found.port.name}' is compiled: its callbacks and threads cannot ask for other models, because its worker "
            "may be waiting for them; a host model can"
        )
    if found is not None and found.port.process != (here := os.getpid()):
        raise InvalidArgument(
            f"model '{found.port.name}' asks for another one in process {here}, which it forked: its worker, process "
            f"{found.port.process}, cannot answer there; ask in the model's own process and hand the answer on"
        )
    return found


_current: ContextVar[Caller] = ContextVar("caller")


@contextlib.contextmanager
def calling(caller: Caller) -> Iterator[Caller]:
    """Makes the function ``current`` return ``caller`` in the ``with`` block. Calls ``caller.port.ran``, if set, afterwards.

    Closes ``caller`` if the block raises.
    """
    token = _current.set(caller)
    try:
        yield caller
    except BaseException:
        caller.close()
        raise
    finally:
        _current.reset(token)
        if caller.port.ran is not None:
            caller.port.ran()


def current() -> Caller | None:
    """Returns the ``Caller`` that ``with calling(caller)`` has set in the current context, or None if there is none."""
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
