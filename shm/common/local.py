"""Defines ``LocalConnection``. It has the methods of a connection to a server, but its models run inside this process."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from .call import Call
from .connection import Connection
from .derivatives import original
from .errors import CLOSED, ServingError, Unavailable, Unsupported, in_plain_words, kind_of
from .pending import Deadlines, Pending
from .results import Answer, Array, Description, written


class Served(Protocol):
    """A model that a worker in this process has loaded and runs in an event loop of this process."""

    description: Description
    #: The configuration with defaults filled in.
    config: Mapping[str, Any]

    def begin(self, request: LocalRequest, call: Call) -> int:
        """Copies a call's inputs and sends the request to the worker. Each response is passed to ``request.take``.

        Returns the number of copied bytes. Raises ServingError if an input cannot be sent or the model was closed.
        """

    def took(self, request: Any) -> None:
        """Tells the worker that the caller has read a response to a request, so that the model may send more responses.

        ``request`` is the attribute ``request`` of the LocalRequest that ``begin`` got.
        """

    def withdraw(self, request: LocalRequest) -> None:
        """Tells the worker that nobody waits for an answer to a request that ``begin`` got."""

    def end_sequence(self, sequence_id: int | str) -> None:
        """Ends a sequence without a further request. It does nothing if there is no such sequence."""

    def derivative(self, name: str) -> Served:
        """Returns a derivative of this model as a model. ``name`` is the derivative's full name, such as "model.pull_back".

        Raises NotFound if there is no such derivative.
        """

    def close(self) -> None:
        """Waits until all requests are answered, then unloads the model. Idempotent."""


class LocalRequest(Pending[Answer]):
    """A request to a model that is served in this process."""

    #: The worker's request, once it was validated.
    request: Any = None

    def __init__(self, connection: LocalConnection, served: Served, call: Call) -> None:
        super().__init__(call.model, call.deadline, connection.deadlines)
        self._connection = connection
        self._served = served
        self._call = call
        with in_our_words():
            self._copied = served.begin(self, call)

    # ------------------------------------------------------------------------------------------ from the worker's loop

    def take(self, request: Any, result: Any, moments: tuple[int, int, int] | None, final: bool) -> None:
        """Stores a response, and wakes the thread or task that waits for it. The worker calls this method in its event loop.

        Args:
          request: not used.
          result: the outputs by name, or a worker's exception, or None if the request ends without a further response.
          moments: when the model's run began, when it had its inputs, and when it had computed, in ns. None: not measured.
          final: whether this is the last response.
        """
        if isinstance(result, Exception):
            self.add(ours(result))
        elif result is not None:
            self.add((result, moments))
        if final:
            self.end()
        self.notify()
        if final and self._callbacks:
            self._connection.call_back(self)

    def fail(self, error: Any) -> None:
        """Ends the request. The caller gets a ServingError with the code and the message of ``error``."""
        self.take(None, error, None, True)

    # ------------------------------------------------------------------------------------------------ from whoever waits

    def made(self, arrived: tuple[Any, tuple[int, int, int] | None]) -> Answer | ServingError:
        """Makes an answer with copies of the outputs in a response, and tells the worker that the response was read.

        ``arrived`` is the outputs by name, and the times in ns when the model's run began, had its inputs and had computed, or
        None if no times were measured. Returns an error if an output does not fit the caller's array for the output.
        """
        result, moments = arrived
        call, request = self._call, self.request
        if request is not None and request.ahead:
            self._served.took(request)
        outputs = {name: np.array(array) for name, array in result.items() if not call.outputs or name in call.outputs}
        try:
            answer = Answer(written(outputs, call.places))
        except ServingError as error:
            return error
        answer.version = self._served.description.version
        answer.parameters = getattr(result, "parameters", {})
        if moments is not None and request is not None and not call.streams:
            began, _, computed = moments
            copied = self._copied + sum([array.nbytes for array in answer.values()])
            answer.times = began - request.arrived_ns, computed - began, copied
        return answer

    def withdraw(self) -> None:
        """Tells the worker that nobody waits for the answer any more."""
        self._served.withdraw(self)


class LocalConnection(Connection):
    """A ``Connection`` to models that this process serves itself. Each model is loaded at its first use. Thread-safe."""

    def __init__(self, load: Callable[[str, int], Served]) -> None:
        """Loads nothing yet. ``load`` loads a model by name and version, where 0 means the newest version.

        If loading fails, ``load`` raises an exception with the attributes ``code`` and ``message``.
        """
        self._load = load
        #: Held while a model is loaded, and when all are closed.
        self._loading = threading.Lock()
        self._models: dict[tuple[str, int], Served] = {}
        self._closed = False
        self._process = os.getpid()
        self.deadlines = Deadlines()
        #: Requests that have ended and whose callbacks are to be called; None: their thread is to end.
        self._ended: queue.SimpleQueue[LocalRequest | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def open(self, model: str, version: int = 0) -> Description:
        return self._loaded(model, version).description

    def _loaded(self, model: str, version: int) -> Served:
        if os.getpid() != self._process:
            raise Unavailable(
                "a process that was forked off has not the models of its parent: connect in it, or spawn it"
            )
        with in_our_words():
            name, order = original(model)
            found = self._models.get((name, version))
            if found is None:
                with self._loading:
                    if self._closed:
                        raise Unavailable(CLOSED)
                    found = self._models.get((name, version)) or self._load(name, version)
                    self._models[name, version] = found
            return found.derivative(model) if order else found

    def config(self, model: str, version: int) -> Mapping[str, Any]:
        return self._loaded(model, version).config

    def ask(self, call: Call) -> LocalRequest:
        return LocalRequest(self, self._loaded(call.model, call.version), call)

    exchange = ask

    def call_back(self, request: LocalRequest) -> None:
        """Calls the callbacks of an ended request in another thread."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=_call_back, args=(self._ended,), name="tensord-answers", daemon=True
                    )
                    self._thread.start()
        self._ended.put(request)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        if self._closed:
            raise Unavailable(CLOSED)
        return np.empty(shape, dtype)

    def empty_on(self, device: str, shape: tuple[int, ...], dtype: Any) -> Any:
        raise Unsupported(f"memory on '{device}' is shared with a daemon, and this process serves the model itself")

    def end_sequence(self, model: str, sequence_id: int | str) -> None:
        for (name, _), each in list(self._models.items()):
            if name == model:
                each.end_sequence(sequence_id)

    def parameters(self, model: str, version: int) -> Any:
        raise Unsupported(
            "parameters are pushed into models that a daemon serves; this process serves the model itself"
        )

    def close(self) -> None:
        """Waits until all requests are answered, then unloads all models. Later requests raise Unavailable. Idempotent."""
        if os.getpid() != self._process:
            return
        with self._loading:
            self._closed = True
            models, self._models = self._models, {}
        for model in models.values():
            model.close()
        self.deadlines.close()
        # Only now does no request end any more.
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._ended.put(None)
            if thread is not threading.current_thread():
                thread.join()

    def __del__(self) -> None:
        self._ended.put(None)

    def __repr__(self) -> str:
        return f"<LocalConnection to {len(self._models)} models of this process>"


def _call_back(ended: queue.SimpleQueue[LocalRequest | None]) -> None:
    """Takes ended requests from the queue and calls their callbacks, until it takes None."""
    # No reference to the connection: it would never be garbage-collected.
    while (request := ended.get()) is not None:
        request.call_back()
        del request


def ours(error: Any) -> ServingError:
    """Converts an exception with the attributes ``code`` and ``message`` to the ServingError of the same code."""
    return kind_of(error.code)(in_plain_words(error.message))


@contextlib.contextmanager
def in_our_words() -> Iterator[None]:
    """Converts an exception of the ``with`` block that has ``code`` and ``message`` to the ServingError of the same code."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "code") or not hasattr(error, "message"):
            raise
        raise ours(error) from error
