"""The way to a daemon of this host by its socket for clients: lanes to its workers, and HTTP for what lanes do not have.

open ─▶ lane ─ UNSUPPORTED (off, another edition, a description that is too long) ─▶ HTTP, at what hello told
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensord_client.call import Call
from tensord_client.connection import Connection, Pending, PreparedCall
from tensord_client.errors import ServingError, Unsupported
from tensord_client.http_channel import Buffer
from tensord_client.lane import LaneConnection
from tensord_client.results import Array, Description


class ServiceConnection:
    """A daemon on the same host. Any thread may use it."""

    def __init__(self, path: str, over_http: Callable[[Mapping[str, Any]], Connection], patience: float) -> None:
        """Connects to ``clients.sock``; ``over_http`` connects to what it told. Raises Unavailable."""
        self._lane = LaneConnection(path, patience=patience)
        self._over_http = over_http
        self._lock = threading.Lock()
        self._http: Connection | None = None
        #: Models that are asked over HTTP, with their versions.
        self._apart: set[tuple[str, int]] = set()

    def http(self) -> Connection:
        """Returns the way over HTTP, which is found when it is first needed. Raises Unavailable: there is none."""
        with self._lock:
            if self._http is None:
                self._http = self._over_http(self._lane.hello)
            return self._http

    def _way(self, model: str, version: int) -> Connection | LaneConnection:
        return self.http() if (model, version) in self._apart else self._lane

    def open(self, model: str, version: int = 0) -> Description:
        """Describes a model; version 0 is the newest. Raises ServingError."""
        if self._lane.lanes:
            try:
                found = self._lane.open(model, version)
                self._apart.discard((model, version))
                return found
            except Unsupported:
                pass
        self._apart.add((model, version))
        return self.http().open(model, version)

    def config(self, model: str, version: int) -> Mapping[str, Any]:
        """Returns a model's completed configuration; empty where HTTP is not to be had."""
        try:
            return self.http().config(model, version)
        except ServingError:
            return {}

    def ask(self, call: Call) -> Pending:
        """Begins a request."""
        return self._way(call.model, call.version).ask(call)

    def prepare(self, call: Call) -> PreparedCall:
        """Prepares a request that is asked again and again."""
        return self._way(call.model, call.version).prepare(call)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Makes an array in memory that workers have mapped; without lanes, in this process's own."""
        return self._lane.empty(shape, dtype) if self._lane.lanes else self.http().empty(shape, dtype)

    def push(
        self,
        model: str,
        version: int,
        name: str,
        said: Mapping[str, Any],
        pieces: Sequence[Buffer],
        timeout: float | None,
    ) -> dict[str, Any]:
        """Pushes parameters. Raises ServingError."""
        return self._lane.push(model, version, name, said, pieces, timeout)

    def parameter_sets(self, model: str, version: int) -> list[dict[str, Any]]:
        """Returns what parameter sets a model has; where they are many, over HTTP. Raises ServingError."""
        try:
            return self._lane.parameter_sets(model, version)
        except Unsupported:
            return self.http().parameter_sets(model, version)

    def drop_parameters(self, model: str, version: int, name: str) -> None:
        """Drops a parameter set. Raises ServingError."""
        self._lane.drop_parameters(model, version, name)

    def revert_parameters(self, model: str, version: int, name: str) -> dict[str, Any]:
        """Puts the former parameters of a set into use again. Raises ServingError."""
        return self._lane.revert_parameters(model, version, name)

    def empty_on(self, device: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Makes an array on a GPU, which is registered over HTTP whatever way requests take. Raises as ``DeviceMemory.empty``."""
        return self.http().empty_on(device, shape, dtype)

    def end_sequence(self, model: str, sequence_id: int | str) -> None:
        """Ends a sequence as far as that can be said."""
        self._lane.end_sequence(model, sequence_id)

    def close(self) -> None:
        """Ends the connection and its lanes. Idempotent."""
        self._lane.close()
        with self._lock:
            if self._http is not None:
                self._http.close()

    def __repr__(self) -> str:
        return f"<ServiceConnection on {self._lane!r}>"
