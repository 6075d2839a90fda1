"""Protocols of a connection to a server; three modules implement them: ``http``, ``local`` and ``lane``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tensord_client.call import Call
from tensord_client.http_channel import Buffer
from tensord_client.results import Answer, Array, Description


class Pending(Protocol):
    """A request that was sent. ``await`` gives the answer as well; cancelling the task cancels the request."""

    def result(self, timeout: float | None = None) -> Answer:
        """Waits for the answer. Raises ServingError.  DeadlineExceeded: none came in time; the request is cancelled."""

    def responses(self, timeout: float | None = None) -> Iterator[Answer]:
        """Iterates over the responses, waiting for each at most so long; stopping early cancels the request."""

    def async_responses(self, timeout: float | None = None) -> AsyncIterator[Answer]:
        """Iterates as ``responses`` on the running loop."""

    def __await__(self) -> Generator[Any, None, Answer]: ...

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Has a function called with this once ``result`` does not wait any more, in whatever thread."""

    def cancel(self) -> None:
        """Tells the server that nobody waits any more. Idempotent; from any thread."""


class PreparedCall(Protocol):
    """A request that is asked again and again."""

    def __call__(self, timeout: float | None = None) -> Mapping[str, Array]:
        """Sends what its arrays hold now, waits, and returns the outputs. Raises as ``Pending.result``."""


class Connection(Protocol):
    """A way to a server. Any thread may use it."""

    def open(self, model: str, version: int = 0) -> Description:
        """Describes a model; version 0 is the newest. Raises ServingError: it is not served."""

    def config(self, model: str, version: int) -> Mapping[str, Any]:
        """Returns a model's completed configuration; empty where it is not to be had."""

    def ask(self, call: Call) -> Pending:
        """Begins a request. Arrays may be written to afterwards, unless their memory is the connection's (``empty``)."""

    def prepare(self, call: Call) -> PreparedCall:
        """Prepares a request that is asked again and again."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Makes an array in memory that the server reads and writes where it lies, as far as there is any."""

    def empty_on(self, device: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Makes an array on a GPU, "cuda:0", which workers use where it is. Raises Unsupported: without a daemon."""

    def end_sequence(self, model: str, sequence_id: int | str) -> None:
        """Ends a sequence without a further request, as far as that can be said."""

    def push(
        self,
        model: str,
        version: int,
        name: str,
        said: Mapping[str, Any],
        pieces: Sequence[Buffer],
        timeout: float | None,
    ) -> dict[str, Any]:
        """Pushes parameters into a set, ``name``: ``pieces`` of safetensors' layout, or those that ``said`` names.

        Raises: ServingError.
        """

    def parameter_sets(self, model: str, version: int) -> list[dict[str, Any]]:
        """Returns what parameter sets a model has. Raises ServingError."""

    def drop_parameters(self, model: str, version: int, name: str) -> None:
        """Drops a parameter set. Raises ServingError."""

    def revert_parameters(self, model: str, version: int, name: str) -> dict[str, Any]:
        """Puts the former parameters of a set into use again. Raises ServingError."""

    def close(self) -> None:
        """Ends the connection. Idempotent."""
