"""Holds what all connections of an HTTP front share, such as options, caches and CORS settings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from tensord.config.options import COMPRESSION_LEVELS, Options
from tensord.daemon.control.shared_counters import FrontCounters
from tensord.daemon.front.access import Rule
from tensord.daemon.front.answered import Answered
from tensord.daemon.front.forwarding import Forwarding
from tensord.daemon.front.lingering_close import LingeringClose
from tensord.daemon.front.longest_idle import LongestIdle
from tensord.daemon.http.conversions import Conversions
from tensord.daemon.http.heads import Heads
from tensord.daemon.http.prepared import PreparedRequests
from tensord.daemon.submit.model_states import ModelStates
from tensord.daemon.submit.submitter import Submitter
from tensord.shm.running_time import RunningTime
from tensord.shm.tracer import Tracer

if TYPE_CHECKING:
    from tensord.daemon.http.connection import Http1Connection

_EXPOSED = "Inference-Header-Content-Length"


class CrossOrigin:
    """Adds CORS headers to answers, so that web pages of other origins may use this server.

    ``origins``: the allowed origins as browsers send them, such as ``https://example.org``. ``*`` allows all.
    Source: the Fetch standard, "HTTP-CORS protocol".
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = tuple(origins)
        self._any = "*" in origins
        self._known = frozenset(origin.encode() for origin in origins)

    def around(self, application: ASGIApp) -> ASGIApp:
        return CORSMiddleware(
            application,
            allow_origins=self._origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=(_EXPOSED,),
        )

    def lines(self, fields: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Returns the answer's CORS header lines. Returns b"" if the request's header fields (``fields``) have no ``origin``."""
        origin = next((value for name, value in fields if name == b"origin"), None)
        if origin is None:
            return b""
        allowed = b"*" if self._any else origin if origin in self._known else b""
        # Whoever keeps answers must not give another page what this one got.
        vary = b"" if self._any else b"Vary: Origin\r\n"
        if not allowed:
            return vary
        return b"Access-Control-Allow-Origin: %b\r\nAccess-Control-Expose-Headers: %b\r\n%b" % (
            allowed,
            _EXPOSED.encode(),
            vary,
        )


@dataclass(slots=True)
class HttpServing:
    """Holds what all connections of an HTTP front share."""

    options: Options
    table: ModelStates
    submitter: Submitter
    #: Counts this front's connections, and shows those of the other fronts.
    counters: FrontCounters
    tracer: Tracer
    #: Counts the answers, and writes the access log.
    answered: Answered = field(init=False)
    prepared: PreparedRequests = field(init=False)
    heads: Heads = field(init=False)
    #: The ASGI application, which answers everything but inference requests; the front sets it before it serves.
    application: ASGIApp = field(init=False)
    #: The tasks in which the ASGI application answers.
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    #: True if the server gives an id to each request that has none.
    makes_ids: bool = field(init=False)
    #: True if there is an ``infer_rule``, ``forwarding`` or ``cross_origin``.
    has_rules: bool = field(init=False)
    #: The key that an inference request needs; None: none.
    infer_rule: Rule | None = None
    #: Headers that become parameters; None: none.
    forwarding: Forwarding | None = None
    #: The origins whose web pages may send requests; None: none.
    cross_origin: CrossOrigin | None = None
    conversions: Conversions = field(default_factory=Conversions)
    #: The time by which clients are late.
    clock: RunningTime = field(default_factory=RunningTime)
    #: Bytes of all bodies that are collected in ordinary memory.
    collected_byte_size: int = 0
    connections: dict[Http1Connection, None] = field(default_factory=dict)
    #: Finds the connection to close when there are too many.
    longest_idle: LongestIdle = field(init=False)
    #: Connections that this side has closed, until their clients have closed as well.
    lingering: LingeringClose = field(init=False)
    #: Every answer is the last of its connection.
    stopping: bool = False
    #: True if connections over TCP speak TLS.
    tls: bool = False
    #: The server stops, and refuses requests that begin now.
    closed: bool = False
    #: zlib level of answers for clients that accept gzip or deflate; 0: none.
    compression: int = field(init=False)

    def __post_init__(self) -> None:
        http, expert = self.options.http, self.options.expert
        self.makes_ids = self.options.requests.make_ids
        self.answered = Answered(self.counters, self.submitter.refusals, "http", self.options.log.access)
        self.prepared = PreparedRequests(expert.max_prepared, self.submitter.inline_byte_size)
        self.longest_idle = LongestIdle(self.connections, http.max_connections)
        self.lingering = LingeringClose(http.min_rate, self.clock)
        self.compression = COMPRESSION_LEVELS[http.response_compression]
        self.has_rules = not (self.infer_rule is None and self.forwarding is None and self.cross_origin is None)
        self.heads = Heads(
            http.max_head_byte_size, http.max_head_fields, not self.has_rules, expert.max_prepared, self.tracer.joins
        )
