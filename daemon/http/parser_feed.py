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
from abc import abstractmethod
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.server import ServerState

from daemon.front.chunk_sizes import ChunkSizes, Refusal
from daemon.http.large_bodies import LargeBodies

_log = logging.getLogger(__name__)
#: Bytes given to the parser at a time.
_PIECE = 8 << 10
#: Messages that begin and chunks of bodies in one turn of the loop: with each piece some more than that.
_EVENTS_A_TURN = 64
#: What a read of the transport may bring at most, or nearly: there is probably more, which the transport reads in the same turn.
_FULL_READ = 128 << 10
_HEAD_END = b"\r\n\r\n"
_find_coding = re.compile(rb"transfer-encoding", re.IGNORECASE).search


class ParserFeed(LargeBodies):
    """The part of an incoming half between what arrives and what the parser calls."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        #: Messages that began, and chunks of bodies, since the parser was fed.
        self._begun = self._chunk_count = 0
        #: What waits for the next turn, and whether there is one to wait for: then the client is not read.
        self._rest = b""
        self._resting = False
        #: The last bytes of a head that is not whole.
        self._head_tail = b""
        #: The framing of the body that is arriving, if it comes in chunks.
        self._chunks: ChunkSizes | None = None

    @abstractmethod
    def data_received(self, data: bytes) -> None:
        """What arrived, or what was left of it."""

    def _feed(self, data: bytes, between: bool) -> None:
        """Gives it to the parser, as far as it goes in this turn. ``between``: a message begins with it."""
        self._begun = 0
        while not self._closing:
            try:
                if between and len(data) <= _PIECE and _find_coding(data) is None:
                    # Mostly one request.
                    self.parser.feed_data(data)
                else:
                    self._feed_pieces(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # Offered (Java's client does, with its first request), not taken. The parser takes everything after the head
                # for another protocol's bytes, so it reads the head again, without the offer.
                data, between = self._head_without_upgrade() + data[upgrade.args[0] :], True
                self.parser = httptools.HttpRequestParser(self)
            except Refusal as refusal:
                self._refuse(refusal.status, refusal.message)
            except httptools.HttpParserCallbackError:
                _log.exception("a request met a defect of the server")
                self._refuse(500, "internal error; the server's log has the details")
            except httptools.HttpParserError:
                if not self._closing:
                    self._refuse(400, "malformed HTTP request")

    def _feed_pieces(self, data: bytes) -> None:
        """Raises: Refusal, HttpParserError; HttpParserUpgrade with the place in ``data``."""
        at, self._chunk_count = 0, 0
        while at < len(data) and not self._closing:
            if self._begun + self._chunk_count > _EVENTS_A_TURN:
                self._wait_a_turn(data[at:])
                return
            end = min(len(data), at + _PIECE)
            chunks = self._chunks
            if chunks is not None:
                end = chunks.take(data, at, end)
            elif self._receiving is None:
                end = self._end_of_head(data, at, end)
            try:
                self.parser.feed_data(data[at:end])
            except httptools.HttpParserUpgrade as upgrade:
                raise httptools.HttpParserUpgrade(at + upgrade.args[0]) from None
            at = end
            if chunks is not None and chunks.ended:
                self._chunks = None
        if len(data) >= _FULL_READ and self._begun + self._chunk_count > _EVENTS_A_TURN // 2 and not self._closing:
            self._wait_a_turn(b"")

    def _chunks_begin(self) -> None:
        """The body whose head came comes in chunks."""
        http = self.serving.options.http
        self._chunks = ChunkSizes(http.max_body_byte_size, http.max_head_byte_size)

    def _end_of_head(self, data: bytes, at: int, end: int) -> int:
        """Where the head that is arriving ends, if it does before ``end``."""
        tail = self._head_tail
        cut = (tail + data[at:end]).find(_HEAD_END) - len(tail) if tail else data.find(_HEAD_END, at, end) - at
        if cut < -len(tail):
            self._head_tail = (tail + data[max(at, end - 3) : end])[-3:]
            return end
        self._head_tail = b""
        return at + cut + len(_HEAD_END)

    def _head_without_upgrade(self) -> bytes:
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        fields = [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"".join((line, *fields, b"\r\n"))

    # ------------------------------------------------------------------------------------------------------- the rest

    def _wait_a_turn(self, rest: bytes) -> None:
        """It was enough for this turn of the loop: others come first now."""
        self._rest = rest
        if not self._resting:
            self._resting = True
            asyncio.get_running_loop().call_soon(self._go_on)
        self.transport.pause_reading()

    def _hold_back(self, data: bytes) -> bool:
        """Whether what arrives has to wait, because something before it does: somebody else had reading go on."""
        if self._resting:
            self._rest += data
            self.transport.pause_reading()
        return self._resting

    def _go_on(self) -> None:
        """With what was left; once nothing is, the client is read again, unless there is another reason not to."""
        if not self._resting or self.transport.is_closing():
            return
        self._resting = False
        rest, self._rest = self._rest, b""
        if rest:
            self.data_received(rest)
        if not self._resting and not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()
