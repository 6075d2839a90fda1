"""Protocols that every kind of connection to models implements: over lanes, over HTTP, and in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .call import Call
from .pending import Pending
from .results import Answer, Array, Description


class PreparedCall(Protocol):
    """A request that is made once and sent many times, each time with what its arrays hold then."""

    def __call__(self, timeout: float | None = None) -> Answer:
        """Sends the request with what its arrays hold now, waits for the answer and returns the outputs by name.

        ``timeout``: seconds to wait; None: without limit.

        Raises: ServingError: the answer is an error.  DeadlineExceeded: no answer came in time.
        """


class RepeatedCall:
    """A prepared call for connections that cannot prepare requests: each call sends an ordinary request."""

    def __init__(self, connection: Connection, call: Call) -> None:
        self._connection = connection
        self._call = call

    def __call__(self, timeout: float | None = None) -> Answer:
        """Sends the request and waits for its answer, as ``PreparedCall`` says."""
        return self._connection.ask(self._call).result(timeout)


class Connection(Protocol):
    """A connection to a server, over which requests are sent. Thread-safe."""

    def open(self, model: str, version: int = 0) -> Description:
        """Returns the description of a model; version 0: of its newest version. Raises ServingError: the model is not served."""

    def config(self, model: str, version: int) -> Mapping[str, Any]:
        """Returns a model's configuration with defaults filled in; empty: the server gives none. Version 0: of the newest."""

    def ask(self, call: Call) -> Pending[Answer]:
        """Sends a request. Returns a ``Pending``, by which to wait for the answer.

        With ``call.detached`` the input arrays may be written to at once. Without it, and arrays of ``empty`` in any case, they
        must stay as they are until the answer has come.

        Raises: ServingError: the request cannot be sent.
        """

    def prepare(self, call: Call) -> PreparedCall:
        """Makes a request to be sent many times, each time with what its arrays hold then; nothing is sent yet.

        Raises: ServingError: the request cannot be sent.
        """

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
