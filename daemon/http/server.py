"""The front process: a control connection to the supervisor, a submitter with its lanes, and a uvicorn server on a given socket.

Start ─▶ serve ─▶ ChildReady ─▶ lanes and models come and go ─▶ Stop: stop accepting, finish, exit 0
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.metadata
import logging
import os
import socket
import time
from typing import Any

import msgspec
import uvicorn

from config.options import Options
from daemon import log
from daemon.connection import Connection
from daemon.http.calls import Calls
from daemon.http.exchange import Serving
from daemon.http.protocol import InferProtocol, protocol_for
from daemon.http.routes import Endpoints
from daemon.model_table import ModelTable
from daemon.submit import Submitter
from shm.channel import Channel
from shm.messages import (
    ChildReady,
    LaneOpened,
    ModelGone,
    ModelState,
    Reply,
    Start,
    Stop,
    ToFront,
    WorkerFenced,
    decoder,
)

_log = logging.getLogger(__name__)
_CHECK_SECONDS = 1.0
_DRAIN_POLL_SECONDS = 0.02
#: How long idle connections stay open after a stop.
_LAST_CALL_NS = 250_000_000


class Front:
    """One HTTP front. ``run`` is its whole life."""

    def __init__(self, control: socket.socket, listener: socket.socket) -> None:
        self._listener = listener
        self._connection = Connection(Channel(control, decoder(ToFront)), self._record, self._orphaned)
        self._calls = Calls(self._connection)
        self._table = ModelTable()
        self._started: asyncio.Future[Start] = asyncio.get_running_loop().create_future()
        self._stop: asyncio.Future[Stop] = asyncio.get_running_loop().create_future()
        self._submitter: Submitter | None = None

    async def run(self) -> None:
        """Returns when it was told to stop and has finished."""
        self._connection.start()
        start = await self._started
        assert self._submitter is not None
        options = msgspec.msgpack.decode(start.options, type=Options)
        endpoints = Endpoints(
            self._table, self._calls, options.server_name, _version(), options.repository.strict_readiness
        )
        serving = Serving(options, self._table, self._submitter)
        server = _Server(
            uvicorn.Config(
                endpoints.application(),
                http=protocol_for(serving),
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
        # What was imported and built lives as long as the process: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        serve = asyncio.create_task(server.serve([self._listener]))
        while not server.started:
            await asyncio.sleep(0.001)
        self._connection.send(ChildReady(start.incarnation))
        check = asyncio.create_task(_check(server))
        stop = await self._stop
        endpoints.stopping = serving.stopping = True
        await self._drain(server, stop.grace_ns)
        check.cancel()
        server.should_exit = True
        await serve
        self._submitter.close()
        self._connection.close()

    async def _drain(self, server: _Server, grace_ns: int) -> None:
        """No new connections; the open ones end after the answer they wait for."""
        assert self._submitter is not None
        now = time.monotonic_ns()
        deadline, last_call = now + grace_ns, now + min(_LAST_CALL_NS, grace_ns)
        server.stop_accepting()
        while server.server_state.connections and (now := time.monotonic_ns()) < deadline:
            for connection in list(server.server_state.connections):
                assert isinstance(connection, InferProtocol)
                if now < last_call:
                    # A request may be on its way on a connection that looks idle.
                    connection.announce_end()
                else:
                    connection.shutdown()
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        left = len(server.server_state.connections)
        if left:
            _log.warning("%d connections were cut at the end of the grace period", left)
            for connection in list(server.server_state.connections):
                assert isinstance(connection, InferProtocol)
                connection.transport.abort()

    def _record(self, record: Any, fds: list[int]) -> None:
        """Everything the supervisor says."""
        match record:
            case Start():
                options = msgspec.msgpack.decode(record.options, type=Options)
                log.configure(options.log, record.name)
                self._submitter = Submitter(record.incarnation, options, self._table)
                self._started.set_result(record)
            case Stop():
                if not self._stop.done():
                    self._stop.set_result(record)
            case Reply():
                self._calls.answered(record)
            case ModelState() | ModelGone():
                self._submit().model_changed(record)
            case LaneOpened():
                self._submit().open_lane(record, fds)
            case WorkerFenced():
                self._submit().fence(record)

    def _submit(self) -> Submitter:
        assert self._submitter is not None, "Start is the first record"
        return self._submitter

    def _orphaned(self) -> None:
        """The supervisor is gone: nobody would ever stop us."""
        os._exit(1)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: the supervisor says when to stop."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield

    def stop_accepting(self) -> None:
        """Closes the listening sockets of this process."""
        for server in self.servers:
            server.close()


async def _check(server: _Server) -> None:
    """Lets every connection look at its deadlines."""
    while True:
        await asyncio.sleep(_CHECK_SECONDS)
        now = time.monotonic()
        for connection in list(server.server_state.connections):
            assert isinstance(connection, InferProtocol)
            connection.check(now)


def _version() -> str:
    return importlib.metadata.version("tensord")
