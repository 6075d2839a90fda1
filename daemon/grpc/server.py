"""Runs the gRPC front: opens HTTP/2 connections on accepted sockets, and maps each RPC to the code that answers it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from tensord.config import restrictions
from tensord.config.options import Options
from tensord.daemon.control.certificates import Certificates
from tensord.daemon.front.access import Access
from tensord.daemon.front.answered import Answered
from tensord.daemon.front.endpoints import Endpoints
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


class GrpcFront(Front):
    """The front process that serves gRPC clients."""

    protocol = "grpc"
    parts: ClassVar[Mapping[str, str]] = {
        "tensord.daemon.grpc._hpack": "header blocks are decoded in Python",
        "tensord.daemon.grpc._walk": "every message is decoded in full",
    }

    async def open(self, options: Options, endpoints: Endpoints) -> None:
        infer = Infer(self.submitter, self.table, options, self.tracer)
        methods: dict[str, Callable[[Stream], Call]] = {
            **dict(Management(endpoints).methods()),
            **dict(StandardServices(endpoints).methods()),
            f"/{SERVICE}/ModelInfer": functools.partial(UnaryInfer, infer),
            f"/{SERVICE}/ModelStreamInfer": functools.partial(StreamInfer, infer),
        }
        access = Access(restrictions.parse(options.grpc.restricted_protocol), self.protocol)
        rules = {path: rule for path in methods if (rule := access.rule(path.rpartition("/")[2])) is not None}
        self.answered = Answered(self.counters, self.submitter.refusals, self.protocol, options.log.access)
        serving = self._serving = GrpcServing(
            options.grpc, methods, self.counters, self.submitter.accounts, self.answered, rules, self.submitter
        )
        self.open_connections, self.lingering, self.clock = serving.connections, serving.lingering, serving.clock
        certificates = Certificates(options.grpc)
        opening = Opening(lambda owner: Http2Connection(serving, owner), certificates)
        self.accept(certificates, opening, opening.open)

    def end(self, connection: Any, at_once: bool) -> None:
        self._serving.stopping = True
        connection.announce_end()
        if at_once:
            connection.stop()

    def connections(self) -> Iterator[dict[str, Any]]:
        now = self.clock()
        for connection in self.open_connections:
            yield described(connection, connection.account, now) | {"requests": len(connection.http2.streams)}
