"""The connection to a daemon on this host by its socket for clients: lanes to the workers, and HTTP for what lanes do not offer.

open ─▶ lane ─ Unsupported (lanes are off, another wire version, too long a description) ─▶ HTTP, at addresses of ``hello``
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from tensord_client.common.call import Call
from tensord_client.common.connection import Connection, Prepared
from tensord_client.common.forks import forgotten_by_children
from tensord_client.common.pending import Pending
from tensord_client.common.results import Answer, Array, Description
from tensord_client.errors import ServingError, Unsupported
from tensord_client.lane import LaneConnection
from tensord_client.parameters import ModelParameters


class ServiceConnection:
    """A connection to a daemon on the same host.

    Requests go over lanes, or over HTTP if the daemon gives no lanes for their model.

    Thread-safe.
    """

    def __init__(self, path: str, over_http: Callable[[Mapping[str, Any]], Connection], patience: float) -> None:
        """Connects to the daemon's socket for clients at ``path``.

        Args:
          over_http: connects over HTTP, given the daemon's answer to ``hello``; called when HTTP is first needed.
          patience: seconds that a request waits, within its deadline, for a daemon or worker that is being replaced.

        Raises: Unavailable: no daemon answers there.
        """
        self._lane = LaneConnection(path, patience=patience)
        # These go over the socket for clients, whichever way the model is asked.
        self.push, self.drop_parameters = self._lane.push, self._lane.drop_parameters
        self.revert_parameters, self.end_sequence = self._lane.revert_parameters, self._lane.end_sequence
        self._over_http = over_http
        self._lock = threading.Lock()
        self._http: Connection | None = None
        #: Models that are asked over HTTP, with their versions.
        self._apart: set[tuple[str, int]] = set()
        forgotten_by_children(self)

    def forget(self) -> None:
        """Makes a new lock in a process that was forked off; the connections begin anew by themselves."""
        self._lock = threading.Lock()

    def http(self) -> Connection:
        """Returns the connection over HTTP, which is made at the first use.

        Raises: Unavailable: the daemon cannot be reached over HTTP.
        """
        with self._lock:
            if self._http is None:
                self._http = self._over_http(self._lane.hello)
            return self._http

    def _way(self, model: str, version: int) -> Connection | LaneConnection:
        return self.http() if (model, version) in self._apart else self._lane

    def open(self, model: str, version: int = 0) -> Description:
        """Returns the description of a model; version 0: of its newest version.

        Also decides if the model's requests go over lanes or HTTP.

        Raises: ServingError: the model is not served, or is not ready.
        """
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
        """Asks over HTTP for a model's configuration and returns it, with defaults filled in; empty if HTTP does not give it."""
        try:
            return self.http().config(model, version)
        except ServingError:
            return {}

    def ask(self, call: Call) -> Pending[Answer]:
        """Sends a request over a lane, or HTTP if its model has none. Returns its ``Pending``.

        Raises: ServingError: the request cannot be sent.
        """
        return self._way(call.model, call.version).ask(call)

    def exchange(self, call: Call) -> Answer | Pending[Answer]:
        """Sends a request whose caller waits in this thread, as ``Connection.exchange``."""
        if (call.model, call.version) in self._apart:
            return self.http().exchange(call)
        return self._lane.exchange(call)

    def prepare(self, call: Call) -> Prepared:
        """Makes a request that can be sent many times, each time with what its arrays hold then.

        Raises: ServingError: the request cannot be sent.
        """
        return self._way(call.model, call.version).prepare(call)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Makes an array in memory that workers read and write without a copy; an ordinary one if only HTTP leads to the workers.

        Raises: InvalidArgument: the array is larger than the daemon allows.  Unavailable: there is no room for it now.
        """
        return self._lane.empty(shape, dtype) if self._lane.lanes else self.http().empty(shape, dtype)

    def parameters(self, model: str, version: int) -> ModelParameters:
        """Returns the parameter sets of a model; version 0: of all versions."""
        return ModelParameters(self, model, version)

    def parameter_sets(self, model: str, version: int) -> list[dict[str, Any]]:
        """Returns a model's parameter sets, as ``Connection.parameter_sets``; over HTTP if the socket cannot carry the list."""
        try:
            return self._lane.parameter_sets(model, version)
        except Unsupported:
            found: list[dict[str, Any]] = self.http().parameters(model, version).list()
            return found

    def empty_on(self, device: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Makes an array on a GPU, which is registered with the daemon over HTTP even if requests go over lanes.

        Raises: InvalidArgument: there can be no such array on a GPU.  Unavailable: there is no CUDA driver, no such GPU, or no
          memory left on it.  ServingError: the daemon refuses the array.
        """
        return self.http().empty_on(device, shape, dtype)

    def close(self) -> None:
        """Closes the connection to the daemon, the lanes and the HTTP connection. Idempotent."""
        self._lane.close()
        with self._lock:
            if self._http is not None:
                self._http.close()

    def __repr__(self) -> str:
        return f"<ServiceConnection on {self._lane!r}>"
