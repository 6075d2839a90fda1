"""Defines ``Connection``, the interface of all connections to models: over a lane, over HTTP, or to models in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from .call import FOREVER, Call
from .forks import forgotten_by_children
from .pending import Pending
from .results import Answer, Array, Description


class Prepared:
    """A request that is made once and sent many times, each time with its arrays' values at that time.

    ``Model.prepare`` makes it. Several threads may use it, but its calls run one after the other.
    """

    #: Seconds to wait for an answer; None: without limit.
    timeout: float | None = None

    def __init__(self, exchange: Callable[[Call], Answer | Pending[Answer]], call: Call) -> None:
        """Stores a request that may be sent many times. Sends nothing. ``exchange`` sends it, as ``Connection.exchange`` does."""
        self._exchange = exchange
        self._call = call
        call.repeats = True
        self.forget()
        forgotten_by_children(self)

    def forget(self) -> None:
        """Resets this object, so that no request is in flight. It is called in a child process after a fork."""
        self._lock: Any = threading.Lock()
        self._call.last = None

    def __call__(self, timeout: float | None = None) -> Answer:
        """Sends the request with its arrays' present values, waits for the answer and returns it: the outputs by name.

        ``timeout`` is the seconds to wait. None means the attribute ``timeout``.

        Raises: ServingError: the answer is an error.  DeadlineExceeded: no answer came in time. The next call then first waits
          until this request has ended, so that two requests never write to the same arrays.
        """
        call = self._call
        if timeout is None:
            timeout = self.timeout
        until = None if timeout is None or timeout >= FOREVER else time.monotonic() + timeout
        with self._lock:
            call.deadline = until
            if call.last is not None:
                call.last.settle(until)
                call.last = None
            if call.sources:
                call.copy_sources()
            came = self._exchange(call)
            return came if type(came) is Answer else self.wait_for(came)  # type: ignore[arg-type]

    def wait_for(self, pending: Pending[Answer]) -> Answer:
        """Waits for the answer to the request that was just sent, and returns the answer. The caller holds this object's lock."""
        self._call.last = pending
        answer = pending.result()
        self._call.last = None
        return answer

    def __repr__(self) -> str:
        return f"<Prepared {self._call.model}>"


class Connection(Protocol):
    """The interface of a connection to a server or to models in this process. Requests are sent over it. Thread-safe.

    The classes of connections inherit from it. A method without a docstring there does what is said here.
    """

    def open(self, model: str, version: int = 0) -> Description:
        """Returns the description of a model. ``version`` is the model's version, or 0 for the newest.

        A model of this process is loaded if needed. Raises: NotFound: the model is not served.  Unavailable: the model is not
        ready, or no server answers.  ServingError: any other error, such as one of loading.
        """

    def config(self, model: str, version: int) -> Mapping[str, Any]:
        """Returns a model's configuration with defaults filled in, or {} if the server gives no configuration.

        ``version`` is the model's version, or 0 for the newest. Raises ServingError if the model is not ready, or no answer came.
        """

    def ask(self, call: Call) -> Pending[Answer]:
        """Sends a request. Returns a ``Pending``, an object that waits for the answer.

        The caller must not change the input arrays until the answer has come. If ``call.detached`` is True, this rule
        covers only the input arrays that this connection's methods ``empty`` and ``empty_on`` made.

        Raises: InvalidArgument: the request cannot be encoded.  Unavailable: ``close`` was called, or too many requests wait.
          ServingError: the request cannot be sent for any other reason.
        """

    def exchange(self, call: Call) -> Answer | Pending[Answer]:
        """Sends a request. Returns the answer, or a ``Pending`` whose method ``result`` waits for the answer and returns it.

        If this returns a ``Pending``, the same thread must then call ``result``.

        Raises: ServingError: the request cannot be sent, or the answer is an error.
        """

    def prepare(self, call: Call) -> Prepared:
        """Makes a request that can be sent many times, each time with its arrays' values at that time. Sends nothing yet."""
        return Prepared(self.ask, call)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Makes an array in memory that the server uses without a copy. The array's content is undefined.

        If the server shares no memory with this process, the result is an ordinary array. Raises: InvalidArgument: the array is
        larger than the server allows, or its dtype or shape is not valid.  Unavailable: there is no room now, or ``close`` was
        called.
        """

    def empty_on(self, device: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Makes an uninitialized array on the GPU ``device``, such as "cuda:0". Workers use the array there without a copy.

        The server, which must be on this host, registers it as a region.

        Raises: Unsupported: this process serves the models itself.  InvalidArgument: ``device`` is no GPU, or no array of this
          dtype or size can be on a GPU.  Unavailable: there is no CUDA driver, no such GPU, or no memory left on it, or the
          connection is closed.  ServingError: the server refuses the array.
        """

    def end_sequence(self, model: str, sequence_id: int | str) -> None:
        """Ends the sequence ``sequence_id`` of requests to ``model``, once its waiting requests have run. Does not wait for that.

        Sends no request to the model. Does nothing if no request of the sequence was sent over this connection, or over HTTP:
        the server itself ends a sequence that gets no request for some time.
        """

    def parameters(self, model: str, version: int) -> Any:
        """Returns a ``ModelParameters``, which lists and changes the parameter sets of a model.

        If ``version`` is 0, the object lists the sets of all versions, and changes those of the newest version. Raises
        Unsupported if this process serves the model itself.
        """

    def close(self) -> None:
        """Closes the connection. Idempotent."""
