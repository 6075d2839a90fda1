"""The large bodies of a connection: read past the parser, and with them whole requests, where they repeat themselves.

    head ─▶ parser (protocol) ─▶ Exchange.begin  ─▶ body ─▶ on_message_complete ─▶ learnt: the next one may be
    head ─▶ known             ─▶ Exchange.expect ─▶ body ─▶ Exchange.repeat_large, or like any other from there on

A part of a connection's incoming half, which is ``protocol``.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.server import ServerState

from daemon.body_reader import Body, BodyReader
from daemon.http.answer_order import AnswerOrder
from daemon.http.answering import Phase
from daemon.http.body import PlacedBody
from daemon.http.exchange import Exchange
from daemon.http.known_head import KnownHead
from daemon.http.known_large_request import KnownLargeRequest, recognise_large

#: A body with more to come than this is read from the socket straight into the arena.
DIRECT_BYTE_SIZE = 64 << 10
_SUBMITTED = Phase.SUBMITTED


class LargeBodies(AnswerOrder):
    """Base of a connection: its large bodies."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        #: The head of the last request, where the next one may repeat it.
        self._known: KnownHead | None = None

    def _expect(self, known: KnownLargeRequest, data: bytes) -> bool:
        """Takes the head of a large request, perhaps with the beginning of its body, for the known one's. False: it is not."""
        size, start_size = len(data), len(known.start)
        if not data.startswith(known.start) or size >= known.request_size or self.flow.read_paused:
            return False
        exchange = Exchange(self.serving, known.head, self, True, known.decoded, known.answer)
        body = exchange.expect(known)
        if body is None:
            return False
        if size > start_size:
            body.write(data[start_size:])
        self._append(exchange)
        self._times.body_since = monotonic()
        assert self._reader is not None
        self._reader.receive(body)
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
        exchange, large = self._receiving, self._large
        assert isinstance(exchange, Exchange)
        if large is not None:
            body: object = exchange.placed
            self._receiving = None
            self._times.body_since = 0.0
            if exchange.repeat_large(large):
                return
        else:
            body = exchange.reception.body
            self.parser = httptools.HttpRequestParser(self)
            self.on_message_complete()
            if self.flow.read_paused and not self.transport.is_closing():
                self.transport.pause_reading()  # it was resumed past the flow control, for this body
        self._large = None
        if self._known is not None and isinstance(body, PlacedBody) and exchange.phase is _SUBMITTED:
            assert exchange.decoded is not None
            inline = self.serving.submitter.inline_byte_size
            self._large = recognise_large(self._known, body, exchange.decoded, inline)
