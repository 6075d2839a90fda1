"""The HTTP front process: accepts connections on the listening sockets that the supervisor gave it, and serves them."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

from tensord.config import restrictions
from tensord.config.options import Options
from tensord.daemon.control.certificates import Certificates
from tensord.daemon.front.acceptor import Acceptor
from tensord.daemon.front.access import http_access
from tensord.daemon.front.endpoints import Endpoints
from tensord.daemon.front.forwarding import Forwarding
from tensord.daemon.front.longest_idle import LongestIdle, described
from tensord.daemon.front.opening import Opening
from tensord.daemon.front.process import Front
from tensord.daemon.front.socket_transport import SocketWatch
from tensord.daemon.http.connection import Http1Connection
from tensord.daemon.http.cross_origin import CrossOrigin
from tensord.daemon.http.routes import Routes
from tensord.daemon.http.serving import HttpServing

_log = logging.getLogger(__name__)
_CHECK_SECONDS = 1.0
_DRAIN_POLL_SECONDS = 0.02
#: How long idle connections stay open after a stop.
_LAST_CALL_NS = 250_000_000
#: How long a client may take to answer the end of TLS, when all that it was owed has left.
_TLS_END_SECONDS = 1.0


class HttpFront(Front):
    """The front process that serves clients over HTTP."""

    protocol = "http"

    async def open(self, options: Options, endpoints: Endpoints) -> None:
        access = http_access(restrictions.parse(options.http.restricted_api))
        pattern = options.http.header_forward_pattern
        cross_origin = CrossOrigin(options.http.cors_origins) if options.http.cors_origins else None
        self._serving = HttpServing(
            options,
            self.table,
            self.submitter,
            self.place.counters.front(self.place.row),
            infer_rule=access.rule("ModelInfer"),
            forwarding=Forwarding(pattern) if pattern else None,
            cross_origin=cross_origin,
            tracer=self.tracer,
        )
        self.answered = self._serving.answered
        application = Routes(endpoints, access).application()
        self._serving.application = application if cross_origin is None else cross_origin.around(application)
        self._connections: set[Http1Connection] = set()
        self._serving.longest_idle = LongestIdle(self._connections, options.http.max_connections)
        self._sockets = SocketWatch(heeds_end=not options.http.answer_half_closed)
        self._certificates = Certificates(options.http)
        self._serving.tls = self._certificates.context is not None
        opening = Opening(
            lambda owner: Http1Connection(self._serving, self._connections, owner),
            self._certificates,
            options.http.head_timeout or None,
            _TLS_END_SECONDS,
        )

        def accepted(connection: socket.SocketType, owner: str) -> None:
            if self._certificates.context is not None and connection.family != socket.AF_UNIX:
                opening.open(connection, owner)
            else:
                self._sockets.open(connection, Http1Connection(self._serving, self._connections, owner))

        self._acceptor = Acceptor(self.place.listeners, self._serving.counters, accepted, opening.pending)
        self._acceptor.start()
        self._check = asyncio.create_task(self._check_connections())

    async def drain(self, grace_ns: int) -> None:
        """Stops accepting connections, and closes open ones once their clients have received the answers that they wait for.

        Connections that are still open after ``grace_ns`` nanoseconds are cut.
        """
        self._serving.stopping = True
        now = time.monotonic_ns()
        deadline, last_call = now + grace_ns, now + min(_LAST_CALL_NS, grace_ns)
        await self._acceptor.close(min(_LAST_CALL_NS, grace_ns) / 1e9)
        connections, lingering = self._connections, self._serving.lingering
        while (connections or lingering) and (now := time.monotonic_ns()) < deadline:
            for connection in list(connections):
                if now < last_call:
                    # A request may be on its way on a connection that looks idle.
                    connection.order.announce_end()
                else:
                    self._serving.closed = True
                    connection.shutdown()
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        if connections:
            _log.warning("%d connections were cut at the end of the grace period", len(connections))
            for connection in list(connections):
                connection.transport.abort()
        if self._serving.tasks:
            await asyncio.wait(self._serving.tasks, timeout=_LAST_CALL_NS / 1e9)
        self._check.cancel()

    def connections(self) -> Iterator[dict[str, Any]]:
        now = time.monotonic()
        for connection in self._connections:
            yield described(connection, connection.order.account, now) | {"requests": len(connection.order.requests)}

    def is_busy(self) -> bool:
        return any(not connection.asks_nothing for connection in self._connections)

    async def _check_connections(self) -> None:
        """Checks the deadlines of all connections once a second, until this task is cancelled."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            now = time.monotonic()
            self._certificates.look()
            for connection in list(self._connections):
                connection.check(now)
            self._serving.lingering.check(now)
