"""Protocols that every kind of connection to a server implements, in ``http``, ``local``, ``lane`` and ``service``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tensord_client.call import Call
from tensord_client.http_channel import Buffer
from tensord_client.results import Answer, Array, Description


class Pending(Protocol):
    """A request that was sent. ``await`` on it returns its answer, like ``result``; cancelling the task cancels the request."""

    def result(self, timeout: float | None = None) -> Answer:
        """Waits for the answer and returns it, or raises it if it is an error (ServingError).

        Args:
          timeout: seconds to wait; None: until the request's deadline.

        Raises: DeadlineExceeded: no answer came in time; the request is cancelled.
        """

    def responses(self, timeout: float | None = None) -> Iterator[Answer]:
        """Iterates over the responses. ``timeout``: seconds to wait for each; None: until the request's deadline.

        Leaving the iteration early cancels the request. Raises ServingError: a response is an error; DeadlineExceeded: none came
        in time.
        """

    def async_responses(self, timeout: float | None = None) -> AsyncIterator[Answer]:
        """Iterates over the responses on the running event loop.

        ``timeout``: seconds to wait for each; None: until the request's deadline. Leaving the iteration early cancels the
        request. Raises ServingError: a response is an error; DeadlineExceeded: none came in time.
        """

    def __await__(self) -> Generator[Any, None, Answer]: ...

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Registers ``callback`` to be called with this request once it has ended: in any thread, perhaps before this returns."""

    def cancel(self) -> None:
        """Cancels the request: nobody waits for its answer any more. Idempotent; from any thread."""


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

    def ask(self, call: Call) -> Pending:
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

    def push(
        self,
        model: str,
        version: int,
        name: str,
        said: Mapping[str, Any],
        pieces: Sequence[Buffer],
        timeout: float | None,
    ) -> dict[str, Any]:
        """Pushes parameters into the parameter set ``name`` of a model.

        Returns the server's answer, whose "number" identifies the push.

        Args:
          version: the model's version; 0: the newest.
          said: the other fields of the push, such as "number", "partial" or "file".
          pieces: the parameters' bytes in safetensors' layout; empty: ``said`` names a file with the parameters.
          timeout: seconds to wait for the server's answer; None: without limit.

        Raises: ServingError: the server refuses the parameters, or does not answer in time.
        """

    def parameter_sets(self, model: str, version: int) -> list[dict[str, Any]]:
        """Returns the parameter sets of a model, as ``ModelParameters.list`` explains them; version 0: of all versions.

        Raises: ServingError: there is no such model, or no answer came.
        """

    def drop_parameters(self, model: str, version: int, name: str) -> None:
        """Drops the parameter set ``name`` of a model: requests for it fail. Raises ServingError: no such set, or ``main``."""

    def revert_parameters(self, model: str, version: int, name: str) -> dict[str, Any]:
        """Puts the parameters that the set ``name`` had before its newest push into use again.

        Returns the server's answer, with the "number" that identifies these parameters.

        Raises: ServingError: nothing was pushed into the set, or the server has not kept the earlier parameters.
        """

    def close(self) -> None:
        """Closes the connection. Idempotent."""
