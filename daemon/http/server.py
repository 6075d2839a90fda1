"""The HTTP front: a uvicorn server for the connections of given sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import uvicorn

from config import restrictions
from config.options import Options
from daemon.front.acceptor import Acceptor
from daemon.front.access import http_access
from daemon.front.endpoints import Endpoints
from daemon.front.forwarding import Forwarding
from daemon.front.longest_idle import LongestIdle
from daemon.front.process import Front
from daemon.http.generate import Generation
from daemon.http.protocol import InferProtocol, protocol_for
from daemon.http.routes import Routes
from daemon.http.serving import Serving

_log = logging.getLogger(__name__)
_CHECK_SECONDS = 1.0
_DRAIN_POLL_SECONDS = 0.02
#: How long idle connections stay open after a stop.
_LAST_CALL_NS = 250_000_000


class HttpFront(Front):
    """A front that speaks HTTP."""

    async def open(self, options: Options, endpoints: Endpoints) -> None:
        access = http_access(restrictions.parse(options.http.restricted_api))
        pattern = options.http.header_forward_pattern
        self._serving = Serving(
            options,
            self.table,
            self.submitter,
            self.place.tally.seat(self.place.row),
            infer_rule=access.rule("ModelInfer"),
            forwarding=Forwarding(pattern) if pattern else None,
            tracer=self.tracer,
        )
        self._server = _Server(
            uvicorn.Config(
                Routes(endpoints, Generation(self._serving), access).application(),
                http=protocol_for(self._serving),
                loop="none",
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
            )
        )
        connections = self._server.server_state.connections
        self._serving.longest_idle = LongestIdle(connections, options.http.max_connections)  # type: ignore[arg-type]
        # uvicorn listens nowhere: its connections come from the acceptor.
        self._running = asyncio.create_task(self._server.serve([]))
        while not self._server.started:
            await asyncio.sleep(0.001)
        self._acceptor = Acceptor(self.place.listeners, self._serving.seat, self._server.make_protocol)
        self._acceptor.start()
        self._check = asyncio.create_task(_check(self._server))

    async def drain(self, grace_ns: int) -> None:
        """No new connections; the open ones end after the answer they wait for."""
        self._serving.stopping = True
        await self._end_connections(grace_ns)
        self._check.cancel()
        self._server.should_exit = True
        await self._running

    async def _end_connections(self, grace_ns: int) -> None:
        server = self._server
        now = time.monotonic_ns()
        deadline, last_call = now + grace_ns, now + min(_LAST_CALL_NS, grace_ns)
        await self._acceptor.close(min(_LAST_CALL_NS, grace_ns) / 1e9)
        while server.server_state.connections and (now := time.monotonic_ns()) < deadline:
            for connection in list(server.server_state.connections):
                assert isinstance(connection, InferProtocol)
                if now < last_call:
                    # A request may be on its way on a connection that looks idle.
                    connection.announce_end()
                else:
                    self._serving.closed = True
                    connection.shutdown()
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        left = len(server.server_state.connections)
        if left:
            _log.warning("%d connections were cut at the end of the grace period", left)
            for connection in list(server.server_state.connections):
                assert isinstance(connection, InferProtocol)
                connection.transport.abort()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: the supervisor says when to stop."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield

    def make_protocol(self) -> asyncio.Protocol:
        """For a new connection, as uvicorn's ``startup`` has it for the sockets that it listens on."""
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


async def _check(server: _Server) -> None:
    """Lets every connection look at its deadlines."""
    while True:
        await asyncio.sleep(_CHECK_SECONDS)
        now = time.monotonic()
        for connection in list(server.server_state.connections):
            assert isinstance(connection, InferProtocol)
            connection.check(now)
