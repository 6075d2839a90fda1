"""The HTTP front process: accepts connections on the listening sockets that the supervisor gave it, and serves them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

from tensord.config import restrictions
from tensord.config.options import Options
from tensord.daemon.control.certificates import Certificates
from tensord.daemon.front.access import Access
from tensord.daemon.front.endpoints import Endpoints
from tensord.daemon.front.forwarding import Forwarding
from tensord.daemon.front.longest_idle import described
from tensord.daemon.front.opening import Opening
from tensord.daemon.front.process import Front
from tensord.daemon.front.socket_transport import SocketWatch
from tensord.daemon.http.connection import Http1Connection
from tensord.daemon.http.routes import Routes
from tensord.daemon.http.serving import CrossOrigin, HttpServing

#: How long the tasks of answers that were cut may take to end.
_TASK_SECONDS = 0.25
#: How long a client may take to answer the end of TLS, when all that it was owed has left.
_TLS_END_SECONDS = 1.0


class HttpFront(Front):
    """The front process that serves clients over HTTP."""

    protocol = "http"

    async def open(self, options: Options, endpoints: Endpoints) -> None:
        access = Access(restrictions.parse(options.http.restricted_api), self.protocol)
        pattern = options.http.header_forward_pattern
        cross_origin = CrossOrigin(options.http.cors_origins) if options.http.cors_origins else None
        self._serving = HttpServing(
            options,
            self.table,
            self.submitter,
            self.counters,
            self.tracer,
            infer_rule=access.rule("ModelInfer"),
            forwarding=Forwarding(pattern) if pattern else None,
            cross_origin=cross_origin,
        )
        self.answered = self._serving.answered
        application = Routes(endpoints, access).application()
        self._serving.application = application if cross_origin is None else cross_origin.around(application)
        self.open_connections, self.lingering = self._serving.connections, self._serving.lingering
        self.clock = self._serving.clock
        self._sockets = SocketWatch(heeds_end=not options.http.answer_half_closed)
        certificates = Certificates(options.http)
        self._serving.tls = certificates.context is not None
        opening = Opening(
            lambda owner: Http1Connection(self._serving, owner),
            certificates,
            options.http.head_timeout or None,
            _TLS_END_SECONDS,
        )

        def accepted(connection: socket.SocketType, owner: str) -> None:
            if certificates.context is not None and connection.family != socket.AF_UNIX:
                opening.open(connection, owner)
            else:
                self._sockets.open(connection, Http1Connection(self._serving, owner))

        self.accept(certificates, opening, accepted)

    async def drain(self, grace_ns: int) -> None:
        self._serving.stopping = True
        await super().drain(grace_ns)
        if self._serving.tasks:
            await asyncio.wait(self._serving.tasks, timeout=_TASK_SECONDS)

    def end(self, connection: Any, at_once: bool) -> None:
        if at_once:
            self._serving.closed = True
            connection.shutdown()
        else:
            connection.order.announce_end()

    def connections(self) -> Iterator[dict[str, Any]]:
        now = self.clock()
        for connection in self.open_connections:
            yield described(connection, connection.order.account, now) | {"requests": len(connection.order.requests)}
