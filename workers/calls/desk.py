"""Where calls of models go: the worker's loop, as the threads that run models see it."""

from __future__ import annotations

from typing import Any, Protocol

from tensord.shm.operations import LoadModel, ModelReady, UnloadModel


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
