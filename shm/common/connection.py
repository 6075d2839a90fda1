"""Protocols that every kind of connection to models implements: over lanes, over HTTP, and in this process."""

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
    """A request that is made once and sent many times, each time with what its arrays hold then.

    Threads may share it; they take turns. Made by ``Model.prepare``.
    """

    def __init__(
        self, exchange: Callable[[Call], Answer | Pending[Answer]], call: Call, timeout: float | None = None
    ) -> None:
        """``exchange``: that of a ``Connection``. ``timeout``: seconds that a call waits; None: without limit."""
        self._exchange = exchange
        self._call = call
        self.timeout = timeout
        # So that a connection keeps where the arrays lie.
        call.layouts = {}
        self.forget()
        forgotten_by_children(self)

    def forget(self) -> None:
        """Begins without a request, also in a process that was forked off, where no other thread uses this object."""
        self._lock = threading.Lock()
        self._call.last = None

    def __call__(self, timeout: float | None = None) -> Answer:
        """Sends what the arrays hold now, waits for the answer and returns it: the outputs by name.

        ``timeout``: seconds to wait; None: as long as the constructor said.

        Raises: ServingError: the answer is an error.  DeadlineExceeded: no answer came in time. The next call then waits for the
          end of this one first, so that two calls never write to the same places.
        """
        call = self._call
        timeout = self.timeout if timeout is None else timeout
        until = None if timeout is None or timeout >= FOREVER else time.monotonic() + timeout
        with self._lock:
            call.deadline = until
            if call.last is not None:
                call.last.settle(until)
                call.last = None
            came = self._exchange(call)
            if type(came) is not Answer:
                call.last = came
                came = came.result()  # type: ignore[union-attr]
                call.last = None
            return came

    def __repr__(self) -> str:
        return f"<Prepared {self._call.model}>"


class Connection(Protocol):
    """A connection to a server, over which requests are sent. Thread-safe."""

    def open(self, model: str, version: int = 0) -> Description:
        """Returns the description of a model; version 0: of its newest version. Raises ServingError: the model is not served."""

    def config(self, model: str, version: int) -> Mapping[str, Any]:
        """Returns a model's configuration with defaults filled in; empty: the server gives none. Version 0: of the newest."""

    def ask(self, call: Call) -> Pending[Answer]:
        """Sends a request. Returns a ``Pending``, by which to wait for the answer. Raises: ServingError: it cannot be sent.

        With ``call.detached`` the input arrays may be written to at once. Without it, and arrays of ``empty`` in any case, they
        must stay as they are until the answer has come.
        """

    def exchange(self, call: Call) -> Answer | Pending[Answer]:
        """Sends a request whose caller waits in this thread. Returns its answer, or a ``Pending`` if it did not come at once."""

    def prepare(self, call: Call) -> Prepared:
        """Makes a request to be sent many times, each time with what its arrays hold then; nothing is sent yet."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Makes an array in memory that the server reads and writes without a copy; without such memory an ordinary array."""

    def empty_on(self, device: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Makes an array on a GPU, such as "cuda:0", in memory that workers use without a copy.

        Raises: Unsupported: this process serves the models itself.  InvalidArgument: there can be no such array on a GPU.
          Unavailable: there is no CUDA driver, no such GPU, or no memory left on it.
        """

    def end_sequence(self, model: str, sequence_id: int | str) -> None:
        """Ends a sequence without a further request; over HTTP it does nothing: the server ends an idle sequence by itself."""

    def parameters(self, model: str, version: int) -> Any:
        """Returns the ``ModelParameters`` of a model; version 0: of all. Raises Unsupported: this process serves the model."""

    def close(self) -> None:
        """Closes the connection. Idempotent."""
