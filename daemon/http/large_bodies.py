"""The large bodies of a connection: read past the parser, straight to their place, which the head alone decides.

    head ─▶ parser (protocol)      ─▶ Exchange.begin     ─▶ body ─▶ on_message_complete
    head ─▶ parsed before (heads)  ─▶ Exchange.begin_now ─▶ body ─▶ on_message_complete

A part of a connection's incoming half, which is ``protocol``.
"""

from __future__ import annotations

from time import monotonic

import httptools

from daemon.front.body_reader import Body, BodyReader
from daemon.http.answer_order import AnswerOrder
from daemon.http.body import PlacedBody
from daemon.http.exchange import Exchange
from daemon.http.message_head import InferHead

#: A body with more to come than this is read from the socket straight into the arena.
DIRECT_BYTE_SIZE = 64 << 10


class LargeBodies(AnswerOrder):
    """Base of a connection: its large bodies."""

    def _begin_large(self, head: InferHead, first: bytes) -> bool:
        """Takes a request with that head and the beginning of its body. False: not now."""
        if self.flow.read_paused:
            return False
        exchange = Exchange(self.serving, head, self, True)
        if not exchange.begin_now():
            return False
        body = exchange.reception.body
        assert isinstance(body, PlacedBody)
        if first:
            body.write(first)
        self._append(exchange)
        exchange.take_turn()
        self._times.body_since = monotonic()
        self._times.idle_since = 0.0
        self._read_rest(body)
        return True

    def _read_rest(self, body: Body) -> None:
        """The head of a large one came, and what is to come of it goes there."""
        self._reader = self._reader or BodyReader(self, self.transport)
        self._reader.receive(body)

    def _leave_reader(self) -> None:
        """Requests of another kind come."""
        if self._reader is not None:
            self._reader.leave()
            self._reader = None

    def direct_body_complete(self) -> None:
        """The rest of a large body was read past the parser: the next bytes are a new request's."""
        self.parser = httptools.HttpRequestParser(self)
        self.on_message_complete()
        if self.flow.read_paused and not self.transport.is_closing():
            self.transport.pause_reading()  # it was resumed past the flow control, for this body
