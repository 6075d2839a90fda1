"""Serves one HTTP/1.1 connection: receives its requests, keeps their answers in order, and enforces its deadlines.

The client gets an error response if too many connections are open (503), if a request is not complete in time (408), or if the
module ``parser_feed`` refuses a request. The connection is closed if the client sends no request for too long. The connection
is also closed if the client does not read its answers for too long.

If the client closes its sending side, its unanswered requests are cancelled, and an incomplete request is refused with 400. If
the option ``http.answer_half_closed`` is set and the connection has no TLS, complete requests are answered instead.
"""

from __future__ import annotations

import asyncio

from tensord.daemon.front.lingering_close import has_unread
from tensord.daemon.http.answer_order import AnswerOrder
from tensord.daemon.http.asgi import AsgiRequest
from tensord.daemon.http.body import COLLECT_BYTE_SIZE, PlacedBody, TextBody
from tensord.daemon.http.body_reader import BodyReader
from tensord.daemon.http.deadlines import Late
from tensord.daemon.http.exchange import Exchange, ExchangePhase
from tensord.daemon.http.heads import END
from tensord.daemon.http.message_head import InferHead
from tensord.daemon.http.parser_feed import ParserFeed
from tensord.daemon.http.serving import HttpServing

#: A body with more to come than this is read from the socket straight to its place.
DIRECT_BYTE_SIZE = 64 << 10
#: A text is counted by such pieces while it is read: all connections together may keep only so much.
_PIECE_BYTE_SIZE = 256 << 10
#: The texts of the refusals of a request that is not complete in time.
_REFUSED = {
    Late.HEAD: "the request line and headers were not whole within {http.head_timeout:g} s",
    Late.BODY: "the request body was not whole within {http.body_timeout:g} s",
    Late.SLOW: "the request body came at fewer than {http.min_rate} bytes a second",
}
#: Encrypted bytes that may wait for a client before it counts as slow.
_TLS_BUFFER = 64 << 10
_RECEIVING, _SUBMITTED = ExchangePhase.RECEIVING, ExchangePhase.SUBMITTED


class Http1Connection(asyncio.Protocol):
    """Serves the HTTP/1.1 connection of one client.

    ``owner``: the client, which is a host, or a user on a unix socket. The connection's memory counts against the client's share
    of the arenas.
    """

    __slots__ = ("_direct", "_feed", "_held", "_owner", "_serving", "order", "transport")

    def __init__(self, serving: HttpServing, owner: str) -> None:
        self._serving = serving
        self._owner = owner
        #: Feeds the parser; None until a head has come that was not parsed before.
        self._feed: ParserFeed | None = None
        #: The beginning of a small request whose head was parsed before, until its body is complete.
        self._held = b""
        #: The large body that is read straight to its place.
        self._direct: PlacedBody | TextBody | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        serving, connections = self._serving, self._serving.connections
        counters, limit = serving.counters, serving.options.http.max_connections
        full = counters.total() >= limit and not serving.longest_idle.make_room(serving.clock())
        self.transport = transport
        self.order = AnswerOrder(serving, transport, serving.submitter.accounts.open(self._owner))
        if serving.tls and self._speaks_tls:
            # It has a buffer of its own, with what it has encrypted; at first that is what is left of the handshake.
            transport.set_write_buffer_limits(high=_TLS_BUFFER)
        connections[self] = None
        counters.count(len(connections))
        if full:
            self.order.refuse(503, f"{counters.total()} connections are open, at most {limit} are allowed")

    def connection_lost(self, exc: Exception | None) -> None:
        serving, order = self._serving, self.order
        serving.connections.pop(self, None)
        serving.counters.count(len(serving.connections))
        serving.submitter.accounts.close(order.account)
        order.lost()
        self._direct = None
        if self._feed is not None:
            self._feed.close()

    # ---------------------------------------------------------------------------------------------- what arrives

    def data_received(self, data: bytes) -> None:
        order, held, serving = self.order, self._held, self._serving
        if held:
            data, self._held = held + data, b""
        between = not (order.requests or order.receiving or order.times.head_since)
        if between:
            size = data.find(END) + 4
            head = serving.heads[data[:size]]
            if head is not None and (held or not serving.closed) and self._take(head, data, size):
                return
        if not order.closing:
            self._parse(data, between)

    def _take(self, head: InferHead, data: bytes, head_size: int) -> bool:
        order, serving, length = self.order, self._serving, head.content_length
        received = len(data) - head_size
        if order.closing:
            return False
        order.origin_lines = head.origin_lines
        if received == length:
            order.times.body_since = 0.0
            small = head.text_size >= 0
            phase = _SUBMITTED if small else _RECEIVING
            exchange = Exchange(serving, head, order, head.keep_alive, phase=phase, account=order.account)
            order.requests.append(exchange)
            if serving.stopping:
                order.announce_end()
            if order.reader is not None:
                self._leave_reader()
            if small:
                exchange.take(data, head_size)
            else:
                exchange.begin()
                exchange.receive(data[head_size:])
                exchange.complete()
                exchange.take_turn()
            return True
        assert length is not None
        if received > length or head.coding:
            return False  # the parser must read it
        if length <= COLLECT_BYTE_SIZE:
            # Many clients send a head and its body one after the other.
            self._held = data
            order.times.idle_since = 0.0
            order.times.body_since = order.times.body_since or self._serving.clock()
            return True
        return (
            length - received >= DIRECT_BYTE_SIZE
            and head.json_size is not None
            and self._take_large(head, data[head_size:])
        )

    def _take_large(self, head: InferHead, first: bytes) -> bool:
        order = self.order
        if order.flow.read_paused or self._speaks_tls:
            return False
        exchange = Exchange(self._serving, head, order, head.keep_alive, account=order.account)
        body = exchange.begin_now()
        if body is None:
            return False
        if first:
            body.write(first)
        order.append(exchange)
        times = order.times
        times.body_since = self._serving.clock()
        times.idle_since = 0.0
        self._read_rest(body)
        return True

    def _parse(self, data: bytes, between: bool) -> None:
        """Parses ``data``, received bytes. ``between``: whether no earlier request is arriving or waiting for its answer."""
        order, feed = self.order, self._feed
        if feed is None:
            feed = self._feed = ParserFeed(self._serving, self.transport, order)
        feed.receive(data, between)
        if order.closing or order.flow.resting:
            return
        receiving = order.receiving
        if receiving is not None:
            body = None if isinstance(receiving, AsgiRequest) else receiving.body
            if (
                isinstance(body, PlacedBody | TextBody)
                and len(body.rest()) >= DIRECT_BYTE_SIZE
                and not self._speaks_tls
            ):
                # The parser will not see the end of this one.
                feed.begin_anew()
                self._read_rest(body)
        elif order.reader is not None and not order.times.head_since:
            self._leave_reader()

    def eof_received(self) -> bool:
        """Handles the end of the client's sending side. Refuses an incomplete request with 400.

        Returns True, which keeps the connection open, if requests are unanswered, ``http.answer_half_closed`` is set, and the
        connection has no TLS.
        """
        order = self.order
        order.ended = True
        if not order.closing:
            if order.times.head_since or self._held or order.receiving is not None:
                order.refuse(400, "the connection ended in the middle of a request")
            else:
                order.announce_end()
        return bool(order.requests) and self._serving.options.http.answer_half_closed and not self._speaks_tls

    @property
    def _speaks_tls(self) -> bool:
        """Returns whether the connection is encrypted."""
        return self._serving.tls and self.transport.get_extra_info("sslcontext") is not None

    # ---------------------------------------------------------------------------------------------- large bodies

    def _read_rest(self, body: PlacedBody | TextBody) -> None:
        """Has a ``BodyReader`` read the rest of a large body into the body's memory."""
        order = self.order
        order.reader = order.reader or BodyReader(self, self.transport)
        self._direct = body
        order.reader.receive(body.rest()[:_PIECE_BYTE_SIZE] if isinstance(body, TextBody) else body.rest())

    def _leave_reader(self) -> None:
        order = self.order
        if order.reader is not None and not order.flow.read_paused:
            order.reader.leave()
            order.reader = None

    def direct_body_complete(self) -> None:
        """Called when the ``BodyReader`` has read a piece of a request's body. If bytes are missing, reads the next piece.

        After the last piece, tells the request that its body is complete.
        """
        order = self.order
        body, self._direct = self._direct, None
        assert body is not None
        assert order.reader is not None
        body.advance(order.reader.byte_size)
        if len(body.rest()):
            self._read_rest(body)
            return
        order.received_whole()
        if order.flow.read_paused and not (order.closing or self.transport.is_closing()):
            self.transport.pause_reading()  # it was resumed past the flow control, for this body

    # --------------------------------------------------------------------------------------------------- the rest

    def pause_writing(self) -> None:
        self.order.pause_writing()

    def resume_writing(self) -> None:
        self.order.resume_writing()

    def check(self, now: float) -> None:
        """Answers 408 if a request arrives too slowly. Closes the connection if the client reads too slowly or idles too long.

        ``now``: seconds of the front's clock.
        """
        http, order = self._serving.options.http, self.order
        if order.holds_up:
            order.times.held_up(now)
        late = order.times.late(http, now, self.transport.get_write_buffer_size(), order.received, order.closing)
        if late in _REFUSED:
            order.refuse(408, _REFUSED[late].format(http=http))
        elif late is Late.ANSWER:
            self.transport.abort()
        elif late is Late.IDLE and not order.requests:
            order.leave()

    def shutdown(self) -> None:
        """Closes the connection if it is idle, and otherwise has it closed after the newest unanswered request is answered.

        An idle connection stays open while received bytes wait to be read.
        Call this method repeatedly until the connection is closed. An incomplete request is refused with 503 if the client has
        sent no byte of the request for two seconds.
        """
        order = self.order
        if self.idle:
            # What came while its client did not take the last answer is read first.
            if not has_unread(self.transport):
                order.leave()
            return
        order.announce_end()
        if (
            not order.closing
            and not order.flow.read_paused
            and order.times.stopped(self._serving.clock(), self._came())
        ):
            order.refuse(503, "the server is stopping, and the rest of the request does not come")

    def abort(self) -> None:
        """Closes the connection at once. Bytes that are not sent yet are dropped."""
        self.transport.abort()

    def _came(self) -> int:
        """Returns how many bytes of the arriving request have come, or -1 if no request is arriving."""
        order = self.order
        if order.receiving is not None:
            return order.received
        if order.times.head_since and self._feed is not None:
            return self._feed.head_size
        return len(self._held) if self._held else -1

    @property
    def idle(self) -> bool:
        """Returns whether no request on this connection is arriving or waiting for its answer."""
        order = self.order
        return not (order.requests or order.times.head_since or order.times.body_since)

    @property
    def used_at(self) -> float:
        """Returns the time since which the connection has been idle, in seconds of the front's clock.

        While the head of a request arrives, returns when its first bytes came. Use the result only if ``asks_nothing`` is True.
        """
        return self.order.times.idle_since or self.order.times.head_since

    @property
    def asks_nothing(self) -> bool:
        """Returns whether the client waits for nothing: all requests that came were answered, and the answers were sent.

        A head that is still arriving does not count as a request.
        """
        order = self.order
        return not (order.requests or order.times.body_since or order.flow.write_paused)

    def make_room(self) -> None:
        """Closes this idle connection, so that a new connection can be accepted."""
        self.order.leave()
