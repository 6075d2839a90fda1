"""Runs the gRPC front: opens HTTP/2 connections on accepted sockets, and maps each RPC to the code that answers it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from tensord.config import restrictions
from tensord.config.options import Options
from tensord.daemon.control.certificates import Certificates
from tensord.daemon.front.acceptor import Acceptor
from tensord.daemon.front.access import grpc_access
from tensord.daemon.front.answered import Answered
from tensord.daemon.front.endpoints import Endpoints
from tensord.daemon.front.forwarding import Forwarding
from tensord.daemon.front.longest_idle import described
from tensord.daemon.front.opening import Opening
from tensord.daemon.front.process import Front
from tensord.daemon.grpc.call import Call
from tensord.daemon.grpc.connection import Http2Connection
from tensord.daemon.grpc.infer import Infer
from tensord.daemon.grpc.management import SERVICE, Management
from tensord.daemon.grpc.serving import GrpcServing
from tensord.daemon.grpc.standard_services import StandardServices
from tensord.daemon.grpc.stream import Stream
from tensord.daemon.grpc.stream_infer import StreamInfer
from tensord.daemon.grpc.unary_infer import UnaryInfer

_log = logging.getLogger(__name__)
_CHECK_SECONDS = 1.0
_DRAIN_POLL_SECONDS = 0.02
#: How long a client may take to learn that no new calls are taken.
_LAST_CALL_NS = 250_000_000


class GrpcFront(Front):
    """Serves gRPC clients in a front process: accepts their connections, checks deadlines, and closes them when it stops."""

    protocol = "grpc"
    parts: ClassVar[Mapping[str, str]] = {
        "tensord.daemon.grpc._hpack": "header blocks are decoded in Python",
        "tensord.daemon.grpc._walk": "messages are walked over in Python",
    }

    async def open(self, options: Options, endpoints: Endpoints) -> None:
        pattern = options.grpc.header_forward_pattern
        infer = Infer(
            self.submitter,
            self.table,
            options.grpc.max_stream_requests,
            Forwarding(pattern) if pattern else None,
            self.tracer,
            options.requests.make_ids,
            options.expert.max_prepared,
        )
        methods: dict[str, Callable[[Stream], Call]] = {
            **dict(Management(endpoints).methods()),
            **dict(StandardServices(endpoints).methods()),
            f"/{SERVICE}/ModelInfer": functools.partial(UnaryInfer, infer),
            f"/{SERVICE}/ModelStreamInfer": functools.partial(StreamInfer, infer),
        }
        access = grpc_access(restrictions.parse(options.grpc.restricted_protocol))
        rules = {path: rule for path in methods if (rule := access.rule(path.rpartition("/")[2])) is not None}
        counters = self.place.counters.front(self.place.row)
        self.answered = Answered(counters, self.submitter.refusals, self.protocol, options.log.access)
        serving = self._serving = GrpcServing(
            options.grpc, methods, counters, self.submitter.accounts, self.answered, rules, self.submitter
        )
        self._certificates = Certificates(options.grpc)
        opening = Opening(lambda owner: Http2Connection(serving, owner), self._certificates)
        self._acceptor = Acceptor(self.place.listeners, serving.counters, opening.open, opening.pending)
        self._acceptor.start()
        self._check = asyncio.create_task(self._check_connections())

    async def drain(self, grace_ns: int) -> None:
        """Stops accepting connections and calls, and waits until open calls are answered.

        Connections that are still open after ``grace_ns`` nanoseconds are cut.
        """
        now = time.monotonic_ns()
        deadline, last_call = now + grace_ns, now + min(_LAST_CALL_NS, grace_ns)
        await self._acceptor.close(min(_LAST_CALL_NS, grace_ns) / 1e9)
        self._serving.stopping = True
        connections, lingering = self._serving.connections, self._serving.lingering
        for connection in list(connections):
            connection.announce_end()
        while (connections or lingering) and (now := time.monotonic_ns()) < deadline:
            if now >= last_call:
                for connection in list(connections):
                    connection.stop()
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        if connections:
            _log.warning("%d connections were cut at the end of the grace period", len(connections))
            for connection in list(connections):
                connection.abort()
        self._check.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._check

    def connections(self) -> Iterator[dict[str, Any]]:
        now = asyncio.get_running_loop().time()
        for connection in self._serving.connections:
            yield described(connection, connection.account, now) | {"requests": len(connection.http2.streams)}

    def is_busy(self) -> bool:
        return any(not connection.asks_nothing for connection in self._serving.connections)

    async def _check_connections(self) -> None:
        """Checks the deadlines of every connection, once a second."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            now = asyncio.get_running_loop().time()
            self._certificates.look()
            for connection in list(self._serving.connections):
                connection.check(now)
            self._serving.lingering.check(now)
