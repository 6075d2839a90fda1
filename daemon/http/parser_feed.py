"""Feeds a client's bytes to an HTTP parser. Limits the number of requests and chunks per iteration of the event loop.

    received bytes  | head | body ... | head | ...     | rest |     rest: fed in the next iteration
                    ╰────── fed in one iteration ──────╯

The parser reads all bytes that it is given without a stop. Without the limit, a client that sends thousands of small requests
or chunks would keep other clients waiting.

A client gets an error response if its request is refused. The status is 431 if the head, the chunk extensions or the trailers
are too large or the head has too many fields, 413 if the body is too large, 400 if the request is malformed HTTP or too many
earlier requests of the connection are unanswered, 501 if the transfer coding is not supported, 505 if the HTTP version is not
supported, and 503 if the server is stopping.
"""

from __future__ import annotations

import asyncio
import logging
import re

import httptools

from tensord.daemon.front.access import Restricted
from tensord.daemon.front.peer import ConnectionEnd
from tensord.daemon.front.status import BodyTooLarge
from tensord.daemon.http import message_head
from tensord.daemon.http.answer_order import AnswerOrder
from tensord.daemon.http.asgi import AsgiRequest
from tensord.daemon.http.chunk_sizes import ChunkRefused, ChunkSizes
from tensord.daemon.http.exchange import Exchange
from tensord.daemon.http.generate import Generate, GenerateStream, InferStream
from tensord.daemon.http.heads import END, MAX_HEAD
from tensord.daemon.http.message_head import InferHead
from tensord.daemon.http.serving import HttpServing
from tensord.shm.errors import DEFECT, ServingError

_log = logging.getLogger(__name__)
#: Bytes given to the parser at a time.
_PIECE = 8 << 10
#: About how many requests and chunks of bodies are parsed in one iteration of the loop; the last piece may bring some more.
_EVENTS_A_TURN = 64
#: Requests a client may send ahead on one connection before the first is answered.
_MAX_PIPELINED = 256
#: The class that handles requests of each inference endpoint but ``infer``.
_ENDPOINTS: dict[str, type[Generate | GenerateStream]] = {
    "infer_stream": InferStream,
    "generate": Generate,
    "generate_stream": GenerateStream,
}
_find_coding = re.compile(rb"transfer-encoding", re.IGNORECASE).search
#: A run of line ends from its first line feed without a carriage return on, and whether a request may begin behind it: there the
#: parser passes over it. (It begins with the line feed, because only so it is searched for as fast as memory is read, and takes
#: the whole run, because each of its bytes is looked at once then.)
_bare_line_ends = re.compile(rb"\n(?<!\r\n)[\r\n]*([A-Z]|\Z)?").finditer


def _bare_line_feed(data: bytes, begin: int, end: int) -> int:
    for found in _bare_line_ends(data, begin, end):
        if found[1] is not None:
            return found.start()
    return -1


class ParserFeed:
    """Feeds the bytes of one client to its HTTP parser, and adds each request that arrives to the ``AnswerOrder``.

    The methods whose names begin with ``on_`` are the parser's callbacks.
    A request is added as an ``Exchange``, a ``Generation`` or an ``AsgiRequest`` when its head has arrived.
    If the head of a request is not acceptable, the client gets an error response.
    """

    def __init__(self, serving: HttpServing, transport: asyncio.Transport, order: AnswerOrder) -> None:
        self._serving = serving
        self._transport = transport
        self._order = order
        self.begin_anew()
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        #: The client sends the body only after ``100 Continue``.
        self._expects_continue = False
        #: Headers of the message that are forwarded, with their names as they were sent.
        self._forwarded: list[tuple[bytes, bytes]] = []
        #: The request began when the server accepted none any more.
        self._late = False
        #: When the bytes came that are parsed, in seconds of the front's clock.
        self._came_at = 0.0
        #: The received bytes of a head that is not complete.
        self.head_size = 0
        #: Messages that began, and chunks of bodies, since these were set to 0.
        self._begun = self._chunk_count = 0
        #: The framing of the body that is arriving, if it comes in chunks.
        self._chunks: ChunkSizes | None = None
        #: Bytes that are still to come of a body whose length the head says.
        self._body_left = 0
        #: The parsed head of the last request, if another head of the same bytes means the same.
        self._meaning: InferHead | None = None
        self._connection_end = ConnectionEnd()
        #: Bytes to parse in the next iteration of the loop.
        self._rest = b""
        #: The last bytes of a head that is not complete.
        self._head_tail = b""
        #: True if the last byte that was read is a carriage return outside of a message, or the last byte of one: a line feed
        #: that comes next passes for its second half. (Behind a body it is none, but only the parser knows where a body ends.)
        self._half_line = False

    def begin_anew(self) -> None:
        """Replaces the parser by a new one, which takes the next bytes for the beginning of a request."""
        self._parser = httptools.HttpRequestParser(self)
        self._body_left = 0
        #: A message has begun and has not ended.
        self._inside = False

    def close(self) -> None:
        """Drops the HTTP parser. Tells the processes that watch the client's connection that the connection has been closed."""
        self._connection_end.close()
        del self._parser  # which refers to this object

    # ------------------------------------------------------------------------------------------------- head

    def on_message_begin(self) -> None:
        self._begun += 1
        self._inside = True
        times = self._order.times
        if not times.head_since:
            times.head_since = self._came_at
            times.idle_since = 0.0
        self._meaning = None
        self._body_left = 0
        self._late = self._serving.closed
        self._url = b""
        self._headers = []
        if self._forwarded:
            self._forwarded = []
        self._expects_continue = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._order.receiving is not None:
            return  # a trailer, which nobody wants
        if self._serving.forwarding is not None and self._serving.forwarding.wants(name):
            self._forwarded.append((name, value))
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        elif name == b"content-length":
            self._body_left = int(value)
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        order, parser = self._order, self._parser
        # Where it is refused already, the parser goes on to the end of what it was fed. An offered upgrade: see ``_feed``.
        if order.closing or (parser.should_upgrade() and parser.get_method() != b"CONNECT"):
            return
        if self._serving.cross_origin is not None:
            order.origin_lines = self._serving.cross_origin.lines(self._headers)
        version = parser.get_http_version()
        refusal = self._refusal(version)
        if refusal is not None:
            order.refuse(*refusal)
            return
        if version == "1.0":
            self._expects_continue = False  # that version has no interim answers
        route = message_head.infer_route(self._url) if parser.get_method() == b"POST" else None
        keep_alive = bool(parser.should_keep_alive())
        if route is None:
            self._begin_asgi_request(version, keep_alive)
        elif route.endpoint == "infer":
            compresses = self._serving.compression > 0
            self._begin_exchange(message_head.infer_head(route, version, keep_alive, self._headers, compresses))
        else:
            read = message_head.infer_head if route.endpoint == "infer_stream" else message_head.generate_head
            self._begin_generation(read(route, version, keep_alive, self._headers), _ENDPOINTS[route.endpoint])

    def _refusal(self, version: str) -> tuple[int, str] | None:
        http = self._serving.options.http
        self.head_size = sum([len(name) + len(value) + 4 for name, value in self._headers], len(self._url))
        if self.head_size > http.max_head_byte_size:
            return self._too_long()
        if len(self._headers) > http.max_head_fields:
            fields, limit = len(self._headers), http.max_head_fields
            return 431, f"the request has {fields} header fields, at most {limit} are allowed"
        self.head_size = 0
        times = self._order.times
        times.head_since = 0.0
        # Of a request that was held it is known already: whoever sends it by the byte gains no time by that.
        times.body_since = times.body_since or self._came_at
        if self._parser.get_method() == b"CONNECT":
            return 400, "malformed HTTP request"
        if self._late:
            # Whoever sends the next request before the last answer would go on until the end of the grace period, and be cut.
            return 503, "the server is stopping"
        if len(self._order.requests) >= _MAX_PIPELINED:
            return 400, f"more than {_MAX_PIPELINED} requests are waiting for their answers on this connection"
        return message_head.refusal(version, self._headers)

    def _too_long(self) -> tuple[int, str]:
        limit = self._serving.options.http.max_head_byte_size
        return 431, f"the request line and headers have more than {limit} bytes, at most {limit} are allowed"

    def _begin_exchange(self, head: InferHead) -> None:
        serving, order = self._serving, self._order
        self._complete(head)
        limit = serving.options.http.max_body_byte_size
        if (head.content_length or 0) > limit:
            order.refuse(*BodyTooLarge(f"has {head.content_length} bytes", limit).refusal)
            return
        if not self._expects_continue:
            self._meaning = head
        exchange = Exchange(serving, head, order, head.keep_alive, account=order.account)
        order.append(exchange, self._expects_continue)
        if head.text_size >= 0 and not self._expects_continue:
            exchange.my_turn = len(order.requests) == 1
            return
        exchange.begin()
        if exchange.refused and (self._expects_continue or head.content_length is None):
            # Its body is not wanted, and how much would come is unknown: answer now and hang up.
            exchange.keep_alive = False
            order.receiving = None
            exchange.complete()
        if len(order.requests) == 1:
            exchange.take_turn()

    def _complete(self, head: InferHead) -> None:
        if self._serving.has_rules:
            self._apply_rules(head)
        if self._serving.tracer.joins:
            head.trace_parent = dict(self._headers).get(b"traceparent", b"").decode("latin-1")
        if head.content_length is None:
            self._chunks_begin()

    def _apply_rules(self, head: InferHead) -> None:
        if self._order.origin_lines:
            head.tell_origin(self._order.origin_lines)
        try:
            if self._serving.infer_rule is not None:
                self._serving.infer_rule.check(self._headers)
            if self._forwarded and self._serving.forwarding is not None:
                head.forward(self._serving.forwarding.parameters(self._forwarded))
        except Restricted as refusal:
            head.error = refusal  # before anything else that is wrong: nothing is told to who may not ask
        except ServingError as error:
            head.error = head.error or error

    def _begin_generation(self, head: InferHead, endpoint: type[Generate | GenerateStream]) -> None:
        order = self._order
        self._complete(head)
        generation = endpoint(self._serving, head, order, head.keep_alive, account=order.account)
        order.append(generation, self._expects_continue)
        if len(order.requests) == 1:
            generation.take_turn()

    def _begin_asgi_request(self, version: str, keep_alive: bool) -> None:
        order = self._order
        if any(name == b"transfer-encoding" for name, _ in self._headers):
            # Each of them bounds its body itself; that of pushed parameters may be larger than any request's.
            self._chunks_begin(self._serving.options.workers.max_parameter_byte_size)
        scope = {
            **message_head.scope(self._parser.get_method(), self._url, version, self._headers),
            # Who asks: read from it only where that matters (tensord.daemon.front.peer).
            "tensord.socket": self._transport.get_extra_info("socket"),
            "tensord.end": self._connection_end,
        }
        request = AsgiRequest(self._serving, scope, order, keep_alive)
        order.append(request, self._expects_continue)
        if len(order.requests) == 1:
            request.take_turn()

    # ------------------------------------------------------------------------------------------------- body

    def _chunks_begin(self, limit: int = 0) -> None:
        http = self._serving.options.http
        self._chunks = ChunkSizes(max(limit, http.max_body_byte_size), http.max_head_byte_size)

    def on_body(self, body: bytes) -> None:
        receiving = self._order.receiving
        self._body_left -= len(body)
        if self._chunks is not None:
            self._chunk_count += 1
        if receiving is not None:
            try:
                receiving.receive(body)
            except BodyTooLarge as error:
                self._order.refuse(*error.refusal)

    def on_message_complete(self) -> None:
        self._inside = False
        self._body_left = 0
        self._order.received_whole()

    # ------------------------------------------------------------------------------------------------- what came

    def receive(self, data: bytes, between: bool) -> None:
        """Parses the next bytes from the client's connection. They may be a part of an HTTP request or several requests.

        ``between``: True if ``data`` starts with a new request and the connection has no unanswered request.
        """
        order = self._order
        self._came_at = self._serving.clock()
        if order.receiving is None:
            self.head_size += len(data)
            if not order.times.head_since:
                order.times.head_since = self._came_at
                order.times.idle_since = 0.0
        self._feed(data, between)
        if order.closing or order.flow.resting:
            return
        self._half_line = not self._inside and data.endswith(b"\r")
        if self.head_size:
            # It ended with a part of a head.
            if between:
                self._head_tail = data[-3:]
            if self.head_size > self._serving.options.http.max_head_byte_size:
                order.refuse(*self._too_long())
        elif between and self._begun == 1 and (meaning := self._meaning) is not None:
            # One head, and at most its body.
            size = data.find(END, 0, MAX_HEAD) + len(END)
            if meaning.content_length is not None and len(data) - size <= meaning.content_length:
                self._serving.heads.learn(data[:size], meaning)

    def _feed(self, data: bytes, between: bool) -> None:
        order = self._order
        self._begun = 0
        if data[:1] == b"\n" and not self._half_line:
            self._refuse_empty_line()
        while not order.closing:
            try:
                if (
                    between
                    and len(data) <= _PIECE
                    and _find_coding(data) is None
                    and _bare_line_feed(data, 0, len(data)) < 0
                ):
                    # Mostly one request.
                    self._parser.feed_data(data)
                else:
                    self._feed_pieces(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # Offered (Java's client does, with its first request), not taken. The parser takes everything after the head
                # for another protocol's bytes, so it reads the head again, without the offer.
                data, between = self._head_without_upgrade() + data[upgrade.args[0] :], True
                self.begin_anew()
            except ChunkRefused as refusal:
                order.refuse(*refusal.args)
            except httptools.HttpParserCallbackError:
                _log.exception("a request met a defect of the server")
                order.refuse(500, DEFECT)
            except httptools.HttpParserError:
                order.refuse(400, "malformed HTTP request")

    def _feed_pieces(self, data: bytes) -> None:
        """Feeds ``data`` to the HTTP parser in small pieces.

        Raises HttpParserUpgrade if a request offers an upgrade, with the offset in ``data`` at which the parser has stopped.
        """
        order = self._order
        at, self._chunk_count = 0, 0
        while at < len(data) and not order.closing:
            if self._begun + self._chunk_count > _EVENTS_A_TURN:
                self._half_line = data[at - 1 : at] == b"\r"
                self._wait_a_turn(data[at:])
                return
            end = min(len(data), at + _PIECE)
            chunks = self._chunks
            if chunks is not None:
                end = chunks.take(data, at, end)
            elif self._body_left > 0:
                # No message begins in there, whatever the bytes are.
                end = min(len(data), at + self._body_left)
            else:
                if order.receiving is None:
                    end = self._end_of_head(data, at, end)
                found = _bare_line_feed(data, at + 1, end)
                end = end if found < 0 else found
            try:
                self._parser.feed_data(data[at:end])
            except httptools.HttpParserUpgrade as upgrade:
                raise httptools.HttpParserUpgrade(at + upgrade.args[0]) from None
            at = end
            if chunks is not None and chunks.ended:
                self._chunks = None
            if data[at : at + 1] == b"\n" and data[at - 1 : at] != b"\r":
                self._refuse_empty_line()

    def _refuse_empty_line(self) -> None:
        # Such a line feed is no empty line, and another server on the way might take it for the beginning of a different request.
        if not self._inside:
            self._order.refuse(400, "malformed HTTP request")

    def _end_of_head(self, data: bytes, at: int, end: int) -> int:
        tail = self._head_tail
        cut = (tail + data[at:end]).find(END) - len(tail) if tail else data.find(END, at, end) - at
        if cut < -len(tail):
            self._head_tail = (tail + data[max(at, end - 3) : end])[-3:]
            return end
        self._head_tail = b""
        return at + cut + len(END)

    def _head_without_upgrade(self) -> bytes:
        parser = self._parser
        line = b"%b %b HTTP/%b\r\n" % (parser.get_method(), self._url, parser.get_http_version().encode())
        fields = [b"%b: %b\r\n" % (name, value) for name, value in self._headers if name != b"upgrade"]
        return b"".join((line, *fields, b"\r\n"))

    # ------------------------------------------------------------------------------------------------------- the rest

    def _wait_a_turn(self, rest: bytes) -> None:
        self._rest = rest
        self._order.flow.rest(True)
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._transport.is_closing():
            return
        order, (rest, self._rest) = self._order, (self._rest, b"")
        order.flow.rest(False)
        if rest and not order.closing:
            self.receive(rest, order.between)
