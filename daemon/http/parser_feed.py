"""What arrives is given to the parser in small pieces, and so many messages or chunks of bodies in one turn of the loop.

    read ─▶ | head | body ... | head | ...     | rest |     the rest: in the next turn; meanwhile the client is not read
            ╰─── at most so much in a turn ────╯

The parser cannot be told to stop in the middle of what it was given, and a few bytes may be a request, or a chunk of a body. Cut
so, whoever sends thousands of either does not keep others waiting. Heads are given by themselves where a chunked body may follow:
so it is known where that begins, whose framing is followed (``chunk_sizes``).
"""

from __future__ import annotations

import asyncio
import logging
import re
from time import monotonic

import httptools

from tensord.daemon.front.chunk_sizes import Refusal
from tensord.daemon.http.answer_order import AnswerOrder
from tensord.daemon.http.heads import END, MAX_HEAD
from tensord.daemon.http.messages import Messages
from tensord.daemon.http.serving import Serving

_log = logging.getLogger(__name__)
#: Bytes given to the parser at a time.
_PIECE = 8 << 10
#: Messages that begin and chunks of bodies in one turn of the loop: with each piece some more than that.
_EVENTS_A_TURN = 64
_find_coding = re.compile(rb"transfer-encoding", re.IGNORECASE).search
#: A run of line ends from its first line feed without a carriage return on, and whether a request may begin behind it: there the
#: parser passes over it. (It begins with the line feed, because only so it is searched for as fast as memory is read, and takes
#: the whole run, because each of its bytes is looked at once then.)
_bare_line_ends = re.compile(rb"\n(?<!\r\n)[\r\n]*([A-Z]|\Z)?").finditer


def _bare_line_feed(data: bytes, begin: int, end: int) -> int:
    """Returns where in that part a line feed without its carriage return is behind which a request may begin; -1: nowhere."""
    for found in _bare_line_ends(data, begin, end):
        if found[1] is not None:
            return found.start()
    return -1


class ParserFeed:
    """Of one connection; made when a head comes that was not parsed before."""

    def __init__(self, serving: Serving, transport: asyncio.Transport, order: AnswerOrder) -> None:
        self._serving = serving
        self._transport = transport
        self._order = order
        self.messages = Messages(serving, transport, order)
        #: What waits for the next turn.
        self._rest = b""
        #: The last bytes of a head that is not whole.
        self._head_tail = b""
        #: Whether the last byte that was read is a carriage return, whose line feed may come next.
        self._half_line = False

    def receive(self, data: bytes, between: bool) -> None:
        """What arrived. ``between``: nothing was under way when it came."""
        order, messages = self._order, self.messages
        if order.receiving is None:
            messages.head_size += len(data)
            if not order.times.head_since:
                order.times.head_since = monotonic()
                order.times.idle_since = 0.0
        self._feed(data, between)
        if order.closing or order.flow.resting:
            return
        if messages.head_size:
            # It ended with a part of a head.
            if between:
                self._head_tail = data[-3:]
            if messages.head_size > self._serving.options.http.max_head_byte_size:
                order.refuse(*messages.too_long())
        elif between and messages.begun == 1 and (meaning := messages.meaning) is not None:
            # One head, and at most its body.
            size = data.find(END, 0, MAX_HEAD) + len(END)
            if meaning.content_length is not None and len(data) - size <= meaning.content_length:
                self._serving.heads.learn(data[:size], meaning)

    def _feed(self, data: bytes, between: bool) -> None:
        """Gives it to the parser, as far as it goes in this turn. ``between``: a message begins with it."""
        order, messages = self._order, self.messages
        messages.begun = 0
        half_line, self._half_line = self._half_line, data.endswith(b"\r")
        if data[:1] == b"\n" and not half_line:
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
                    messages.parser.feed_data(data)
                else:
                    self._feed_pieces(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # Offered (Java's client does, with its first request), not taken. The parser takes everything after the head
                # for another protocol's bytes, so it reads the head again, without the offer.
                data, between = self._head_without_upgrade() + data[upgrade.args[0] :], True
                messages.begin_anew()
            except Refusal as refusal:
                order.refuse(refusal.status, refusal.message)
            except httptools.HttpParserCallbackError:
                _log.exception("a request met a defect of the server")
                order.refuse(500, "internal error; the server's log has the details")
            except httptools.HttpParserError:
                if not order.closing:
                    order.refuse(400, "malformed HTTP request")

    def _feed_pieces(self, data: bytes) -> None:
        """Raises: Refusal, HttpParserError; HttpParserUpgrade with the place in ``data``."""
        order, messages = self._order, self.messages
        at, messages.chunk_count = 0, 0
        while at < len(data) and not order.closing:
            if messages.begun + messages.chunk_count > _EVENTS_A_TURN:
                self._half_line = data[at - 1 : at] == b"\r"
                self._wait_a_turn(data[at:])
                return
            end = min(len(data), at + _PIECE)
            chunks = messages.chunks
            if chunks is not None:
                end = chunks.take(data, at, end)
            elif messages.body_left > 0:
                # No message begins in there, whatever the bytes are.
                end = min(len(data), at + messages.body_left)
            else:
                if order.receiving is None:
                    end = self._end_of_head(data, at, end)
                found = _bare_line_feed(data, at + 1, end)
                end = end if found < 0 else found
            try:
                messages.parser.feed_data(data[at:end])
            except httptools.HttpParserUpgrade as upgrade:
                raise httptools.HttpParserUpgrade(at + upgrade.args[0]) from None
            at = end
            if chunks is not None and chunks.ended:
                messages.chunks = None
            if data[at : at + 1] == b"\n" and data[at - 1 : at] != b"\r":
                self._refuse_empty_line()

    def _refuse_empty_line(self) -> None:
        """Refuses a line feed alone between two messages: it is no empty line, and another server may read another request."""
        if not self.messages.inside:
            self._order.refuse(400, "malformed HTTP request")

    def _end_of_head(self, data: bytes, at: int, end: int) -> int:
        """Where the head that is arriving ends, if it does before ``end``."""
        tail = self._head_tail
        cut = (tail + data[at:end]).find(END) - len(tail) if tail else data.find(END, at, end) - at
        if cut < -len(tail):
            self._head_tail = (tail + data[max(at, end - 3) : end])[-3:]
            return end
        self._head_tail = b""
        return at + cut + len(END)

    def _head_without_upgrade(self) -> bytes:
        messages, parser = self.messages, self.messages.parser
        line = b"%b %b HTTP/%b\r\n" % (parser.get_method(), messages.url, parser.get_http_version().encode())
        fields = [b"%b: %b\r\n" % (name, value) for name, value in messages.headers if name != b"upgrade"]
        return b"".join((line, *fields, b"\r\n"))

    # ------------------------------------------------------------------------------------------------------- the rest

    def _wait_a_turn(self, rest: bytes) -> None:
        """It was enough for this turn of the loop: others come first now."""
        self._rest = rest
        self._order.flow.rest(True)
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """With what was left; once nothing is, the client is read again, unless there is another reason not to."""
        if self._transport.is_closing():
            return
        order, (rest, self._rest) = self._order, (self._rest, b"")
        order.flow.rest(False)
        if rest and not order.closing:
            self.receive(rest, order.between)
