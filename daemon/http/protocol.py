"""A connection: uvicorn's httptools protocol, with a short way for inference requests and guards for everything.

This is its incoming half, from the socket to requests; ``large_bodies`` has those that are read past it, ``answer_order`` is the
other half.

The guards, each with a clear answer: size of the head and number of its fields (431), size of the body (413), malformed HTTP
(400), what message_head refuses, number of connections (503), a request that does not get whole in time (408). Whoever asks
nothing, or does not take its answers, for too long is cut off.

A client may end its sending side: what it sent whole is answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, ClassVar

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from daemon.front.access import Restricted
from daemon.front.peer import client_of
from daemon.http import message_head
from daemon.http.answering import Phase
from daemon.http.body import COLLECT_BYTE_SIZE, PlacedBody, TextBody
from daemon.http.exchange import Exchange
from daemon.http.heads import END, MAX_HEAD
from daemon.http.infer_route import InferRoute, InferRoutes
from daemon.http.large_bodies import DIRECT_BYTE_SIZE
from daemon.http.message_head import InferHead
from daemon.http.parser_feed import ParserFeed
from daemon.http.serving import Serving
from shm.errors import ServingError

_log = logging.getLogger(__name__)

#: Requests a client may send ahead on one connection before the first is answered.
_MAX_PIPELINED = 256
_RECEIVING, _SUBMITTED = Phase.RECEIVING, Phase.SUBMITTED


class InferProtocol(ParserFeed):
    """One connection. ``serving`` and ``routes`` are set once per process, by ``protocol_for``."""

    routes: ClassVar[InferRoutes]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        #: What the head of the last message meant that began.
        self._meaning: InferHead | None = None
        #: The beginning of a small request whose head was parsed before, until its body is whole.
        self._held = b""
        #: Headers of the message that are forwarded, with their names as they were sent.
        self._forwarded: list[tuple[bytes, bytes]] = []
        self._head_size = 0
        #: The message began when the server took nothing any more.
        self._late = False

    # ------------------------------------------------------------------------------------------- connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        seat, limit = self.serving.seat, self.serving.options.http.max_connections
        full = seat.total() >= limit and not self.serving.longest_idle.make_room(time.monotonic())
        super().connection_made(transport)
        # With no room to buffer, a write goes to the socket at once and says whether all of it went.
        transport.set_write_buffer_limits(high=0)
        self.account = self.serving.submitter.accounts.open(client_of(transport))
        seat.count(len(self.connections))
        if full:
            self._refuse(503, f"{seat.total()} connections are open, at most {limit} are allowed")

    def data_received(self, data: bytes) -> None:
        if self._resting and self._hold_back(data):
            return
        held = self._held
        if held:
            data, self._held = held + data, b""
        between = not (self._order or self._receiving or self._times.head_since)
        if between:
            size = data.find(END, 0, MAX_HEAD) + 4
            head = self.serving.heads[data[:size]]
            if head is not None and (held or not self.serving.closed) and self._take(head, data, size):
                return
        if not self._closing:
            self._receive(data, between)

    def _take(self, head: InferHead, data: bytes, head_size: int) -> bool:
        """A request whose head was parsed before, or the beginning of one, where nothing else is under way. False: parse it."""
        length, received = head.content_length, len(data) - head_size
        assert length is not None
        if received == length and not self._closing:
            self._times.body_since = 0.0
            exchange = Exchange(self.serving, head, self, True, None, _SUBMITTED if head.is_small else _RECEIVING)
            self._order.append(exchange)
            if self.serving.stopping:
                self.announce_end()
            if self._reader is not None and not self.flow.read_paused:
                # What came was read as everything is: no large bodies, for now.
                self._leave_reader()
            if head.is_small:
                exchange.take(data[head_size:])
            else:
                exchange.begin()
                exchange.reception.receive(data[head_size:])
                exchange.complete()
                exchange.take_turn()
            return True
        if received > length or head.coding or self._closing:
            return False
        if length <= COLLECT_BYTE_SIZE:
            # Many clients send a head and its body one after the other.
            self._held = data
            self._times.idle_since = 0.0
            self._times.body_since = self._times.body_since or time.monotonic()
            return True
        return (
            length - received >= DIRECT_BYTE_SIZE
            and head.json_size is not None
            and self._begin_large(head, data[head_size:])
        )

    def _receive(self, data: bytes, between: bool) -> None:
        """Anything else. ``between``: nothing was under way when it came."""
        if self._receiving is None:
            self._head_size += len(data)
            if not self._times.head_since:
                self._times.head_since = time.monotonic()
                self._times.idle_since = 0.0
        self._feed(data, between)
        if self._closing or self._resting:
            return
        if self._head_size:
            # It ended with a part of a head.
            if between:
                self._head_tail = data[-3:]
            if self._head_size > self.serving.options.http.max_head_byte_size:
                self._refuse_head()
                return
        if between and self._begun == 1 and self._meaning is not None:
            self._learn(data, self._meaning)
        receiving = self._receiving
        if isinstance(receiving, Exchange):
            body = receiving.reception.body
            if isinstance(body, PlacedBody | TextBody) and len(body.rest()) >= DIRECT_BYTE_SIZE:
                self._read_rest(body)
        elif (
            self._reader is not None and receiving is None and not self._times.head_since and not self.flow.read_paused
        ):
            # What came was small and whole.
            self._leave_reader()

    def _learn(self, data: bytes, meaning: InferHead) -> None:
        """What arrived was one head, and at most its body."""
        size = data.find(END, 0, MAX_HEAD) + len(END)
        received = len(data) - size
        if meaning.content_length is not None and received <= meaning.content_length:
            self.serving.heads.learn(data[:size], meaning)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more, and may still read. True: the connection stays open for what it is owed."""
        while self._resting and not self._closing:
            self._go_on()
        self._ended = True
        if not self._closing:
            if self._times.head_since or self._held or self._receiving is not None:
                self._refuse(400, "the connection ended in the middle of a request")
            else:
                self.announce_end()
        return bool(self._order)

    # ------------------------------------------------------------------------------------------------- head

    def on_message_begin(self) -> None:
        self._begun += 1
        if not self._times.head_since:
            self._times.head_since = time.monotonic()
            self._times.idle_since = 0.0
        self._meaning = None
        self._late = self.serving.closed
        self.url = b""
        self.headers = []
        if self._forwarded:
            self._forwarded = []
        self.expect_100_continue = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._receiving is None:
            super().on_header(name, value)
            if self.serving.forwarding is not None and self.serving.forwarding.wants(name):
                self._forwarded.append((name, value))
        # Else it is a trailer, which nobody wants.

    def on_headers_complete(self) -> None:
        if self._closing:
            return  # refused already; the parser goes on to the end of what it was fed
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._refuse(400, "malformed HTTP request")
            return  # see _feed_piece
        limit = self.serving.options.http.max_head_byte_size
        if sum([len(name) + len(value) + 4 for name, value in self.headers], len(self.url)) > limit:
            self._refuse_head()
            return
        limit = self.serving.options.http.max_head_fields
        if len(self.headers) > limit:
            self._refuse(431, f"the request has {len(self.headers)} header fields, at most {limit} are allowed")
            return
        self._head_size = 0
        self._times.head_since = 0.0
        # Of a request that was held it is known already: whoever sends it by the byte gains no time by that.
        self._times.body_since = self._times.body_since or time.monotonic()
        if self._late:
            # Whoever sends the next request before the last answer would go on until the end of the grace period, and be cut.
            self._refuse(503, "the server is stopping")
            return
        if len(self._order) >= _MAX_PIPELINED:
            self._refuse(400, f"more than {_MAX_PIPELINED} requests are waiting for their answers on this connection")
            return
        version = self.parser.get_http_version()
        wrong = message_head.refusal(version, self.headers)
        if wrong is not None:
            self._refuse(*wrong)
            return
        if version == "1.0":
            self.expect_100_continue = False  # that version has no interim answers
        route = self.routes.find(self.url) if self.parser.get_method() == b"POST" else None
        if route is None:
            self._begin_cycle()
        else:
            self._begin_exchange(route)

    def _begin_exchange(self, route: InferRoute) -> None:
        keep_alive = bool(self.parser.should_keep_alive())
        head = message_head.infer_head(
            route, self.parser.get_http_version(), keep_alive, self.headers, self.serving.compression > 0
        )
        if self.serving.infer_rule is not None or self._forwarded:
            self._apply_rules(head)
        http = self.serving.options.http
        if (head.content_length or 0) > http.max_body_byte_size:
            self._refuse(
                413, f"the request body has {head.content_length} bytes, at most {http.max_body_byte_size} are allowed"
            )
            return
        if head.content_length is None:
            self._chunks_begin()
        if not self.expect_100_continue:
            self._meaning = head
        exchange = Exchange(self.serving, head, self, head.keep_alive)
        self._append(exchange)
        exchange.begin()
        if exchange.refused and (self.expect_100_continue or head.content_length is None):
            # Its body is not wanted, and how much would come is unknown: answer now and hang up.
            exchange.keep_alive = False
            self._receiving = None
            exchange.complete()
        elif self.expect_100_continue and len(self._order) == 1:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if len(self._order) == 1:
            exchange.take_turn()

    def _apply_rules(self, head: InferHead) -> None:
        """What the operator has asked for: a key, headers as parameters."""
        try:
            if self.serving.infer_rule is not None:
                self.serving.infer_rule.check(self.headers)
            if self.serving.forwarding is not None:
                head.forwarded = self.serving.forwarding.parameters(self._forwarded)
        except Restricted as refusal:
            head.error = refusal  # before anything else that is wrong: nothing is told to who may not ask
        except ServingError as error:
            head.error = head.error or error

    def _begin_cycle(self) -> None:
        """Everything but infer: uvicorn's own cycle, run by Starlette."""
        headers, url, expects = self.headers, self.url, self.expect_100_continue
        super().on_message_begin()
        self.headers.extend(headers)
        if any(name == b"transfer-encoding" for name, _ in headers):
            self._chunks_begin()
        version = self.parser.get_http_version()
        keep_alive = bool(self.parser.should_keep_alive())
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["http_version"] = version
        # Who asks: read from it only where that matters (daemon.front.peer).
        self.scope["tensord.socket"] = self.transport.get_extra_info("socket")  # type: ignore[typeddict-unknown-key]
        self.scope["tensord.account"] = self.account  # type: ignore[typeddict-unknown-key]
        self.scope["tensord.end"] = self._end  # type: ignore[typeddict-unknown-key]
        self.scope["tensord.forwarded"] = self._forwarded  # type: ignore[typeddict-unknown-key]
        self.scope["path"], self.scope["raw_path"], self.scope["query_string"] = message_head.path_and_query(url)
        cycle = RequestResponseCycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=[(b"connection", b"keep-alive")] if keep_alive and version == "1.0" else [],
            message_event=asyncio.Event(),
            expect_100_continue=expects,
            keep_alive=keep_alive,
            on_response=self.answered,
        )
        self.cycle = cycle
        self._append(cycle)
        if len(self._order) == 1:
            self._start_asgi_task(cycle, self.app)

    # ------------------------------------------------------------------------------------------------- body

    def on_body(self, body: bytes) -> None:
        receiving = self._receiving
        if self._chunks is not None:
            self._chunk_count += 1
        if isinstance(receiving, Exchange):
            limit = self.serving.options.http.max_body_byte_size
            if receiving.reception.received + len(body) > limit:
                self._refuse(413, f"the request body has more than {limit} bytes, at most {limit} are allowed")
            else:
                receiving.reception.receive(body)
        elif receiving is not None and not receiving.response_complete:
            super().on_body(body)

    def on_message_complete(self) -> None:
        receiving, self._receiving = self._receiving, None
        self._times.body_since = 0.0
        if len(self._order) > 1:
            # Whoever sends ahead is read no further until it is answered.
            self.flow.pause_reading()
        if isinstance(receiving, Exchange):
            if receiving.phase is Phase.RECEIVING:
                receiving.complete()
        elif receiving is not None and not receiving.response_complete:
            receiving.more_body = False
            receiving.message_event.set()

    # ------------------------------------------------------------------------------------------------ guards

    def _refuse_head(self) -> None:
        limit = self.serving.options.http.max_head_byte_size
        self._refuse(431, f"the request line and headers have more than {limit} bytes, at most {limit} are allowed")


def protocol_for(serving: Serving) -> type[InferProtocol]:
    """The protocol class for a server: uvicorn makes the instances."""
    return type("Connection", (InferProtocol,), {"serving": serving, "routes": InferRoutes()})
