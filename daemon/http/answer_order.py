"""The outgoing half of a connection: answers in the order of their requests, refusals, and the end.

Requests of one connection are answered in their order, whichever way each goes:

    _order   [ active | next | next ]     an Exchange (infer, short way) or uvicorn's cycle (everything else, through Starlette)

A refusal is the last answer: what comes behind it is thrown away. ``protocol`` is the incoming half.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from time import monotonic
from typing import Any, ClassVar

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from daemon.front.body_reader import BodyReader
from daemon.front.connection_end import ConnectionEnd
from daemon.front.each import call_each
from daemon.http.answering import Answering
from daemon.http.deadlines import Deadlines, Late
from daemon.http.exchange import Exchange
from daemon.http.response_codec import CLOSE, Buffer, error_response
from daemon.http.serving import Serving
from daemon.submit.accounts import Account


class AnswerOrder(HttpToolsProtocol):
    """Base of a connection. Who receives appends to ``_order`` and says in ``_receiving`` whose body is arriving."""

    serving: ClassVar[Serving]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._order: deque[Exchange | RequestResponseCycle] = deque()
        #: The exchange or cycle whose body is arriving.
        self._receiving: Exchange | RequestResponseCycle | None = None
        #: Whose turn comes next, while one is being given.
        self._turning = False
        self._next: Exchange | None = None
        #: The one whose answer ends the connection because the server stops.
        self._ends_with: Exchange | RequestResponseCycle | None = None
        #: Exchanges whose answers are partly in the transport's buffer.
        self._unwritten: list[Exchange] = []
        self._write_paused = False
        self._closing = False
        self._refusal: bytes | None = None
        #: The client has ended its sending side.
        self._ended = False
        #: Reads large bodies past this object; there while the connection sends such.
        self._reader: BodyReader | None = None
        self._times = Deadlines(monotonic())
        self._end = ConnectionEnd()
        #: Since when the body that is arriving has no place, monotonic seconds; 0: it has.
        self._body_waits_since = 0.0
        #: The next request may be begun once the client takes its answers.
        self._turn_due = False
        #: What it holds of the arenas.
        self.account: Account | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.close()
        if self.account is not None:
            self.serving.submitter.accounts.close(self.account)
        ends = {*self._order, *self._unwritten}
        call_each(
            (each.abandon if isinstance(each, Exchange) else partial(_disconnect, each) for each in ends),
            "leaving a request",
        )
        self._order.clear()
        self._unwritten.clear()
        self._receiving = None
        self.cycle = None  # type: ignore[assignment]
        super().connection_lost(exc)
        self.serving.seat.count(len(self.connections))

    def _append(self, exchange: Exchange | RequestResponseCycle) -> None:
        """Its body comes next."""
        self._order.append(exchange)
        self._receiving = exchange
        if self.serving.stopping:
            self.announce_end()

    # ------------------------------------------------------------------------------------------------ answers

    def write_answer(self, pieces: list[Buffer]) -> bool:
        """True when nothing of it is left in the transport's buffer."""
        if len(pieces) == 1:
            self.transport.write(pieces[0])
        else:
            self.transport.writelines(pieces)
        if self._write_paused:
            active = self._order[0]
            assert isinstance(active, Exchange)
            self._unwritten.append(active)
        return not self._write_paused

    def answer_whole(self, answer: bytes) -> None:
        """The active request's, in one piece; there is nothing to give back when it has left, and the connection stays."""
        self.transport.write(answer)
        self.server_state.total_requests += 1
        answered = self._order.popleft()
        if self._order or self._closing or self._times.head_since or self.flow.read_paused:
            self._take_turns(answered)
        else:
            self._times.idle_since = monotonic()

    def answer_pieces(self, pieces: list[Buffer]) -> bool:
        """The same in several, of which something has to be given back. True when nothing is left in the transport's buffer."""
        self.transport.writelines(pieces)
        self.server_state.total_requests += 1
        answered = self._order.popleft()
        if self._write_paused:
            assert isinstance(answered, Exchange)
            self._unwritten.append(answered)
        self._take_turns(answered)
        return not self._write_paused

    def answered(self) -> None:
        """The active request has its answer: the next one's turn."""
        self.server_state.total_requests += 1
        self._take_turns(self._order.popleft())

    def _take_turns(self, answered: Exchange | RequestResponseCycle) -> None:
        if not answered.keep_alive or self.transport.is_closing():
            if not self.transport.is_closing():
                self._hang_up()
            return
        if self._order:
            if self._write_paused:
                # What it asks next would lie beside what it has not taken.
                self._turn_due = True
            else:
                self._next_turn()
            return
        if self._refusal is not None:
            self._write_refusal()
            return
        self._times.idle_since = monotonic() if not self._times.head_since else 0.0
        if not self._write_paused:
            self.flow.resume_reading()

    def _next_turn(self) -> None:
        if not self._order:
            return
        following = self._order[0]
        if isinstance(following, Exchange):
            if following is self._receiving and self.expect_100_continue:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._steer_reading()
            self._give_turn(following)
        else:
            self._start_asgi_task(following, self.app)

    def owes(self, exchange: Answering) -> bool:
        """Whether the answer that is written next is that exchange's."""
        return bool(self._order) and self._order[0] is exchange

    def cut(self) -> None:
        """Its client cannot be answered any more."""
        self.transport.abort()

    def _give_turn(self, exchange: Exchange) -> None:
        """And to those behind it, as long as each is answered at once. One inside of the other they would be too deep."""
        self._next = exchange
        if self._turning:
            return
        self._turning = True
        try:
            while (following := self._next) is not None:
                self._next = None
                following.take_turn()
        finally:
            self._turning = False

    def pause_writing(self) -> None:
        self._write_paused = True
        self._times.stalled_since = monotonic()
        # A client that does not take its answers gets no more of its requests read.
        self.flow.pause_reading()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._times.stalled_since = 0.0
        unwritten, self._unwritten = self._unwritten, []
        call_each((exchange.written for exchange in unwritten), "what follows an answer")
        super().resume_writing()
        if self._turn_due:
            self._turn_due = False
            self._next_turn()
        if not self._closing:
            self._steer_reading()

    def pause_body(self, pause: bool) -> None:
        if pause:
            self._body_waits_since = monotonic()
        elif self._body_waits_since:
            # It is we who held it up: the client's time runs from now on.
            if self._times.body_since:
                self._times.body_since += monotonic() - self._body_waits_since
            self._body_waits_since = 0.0
        self._steer_reading()

    def _steer_reading(self) -> None:
        """Reads while a body arrives, or nothing waits for its answer; not while the client or the arena is full."""
        if self._write_paused or self._body_waits_since:
            self.flow.pause_reading()
        elif isinstance(self._receiving, Exchange) or not self._order:
            self.flow.resume_reading()

    # ------------------------------------------------------------------------------------------------ refusals

    def _refuse(self, status: int, message: str) -> None:
        """Answers after everything that came before, then hangs up. What still arrives is thrown away."""
        self._closing = True
        self._refusal = error_response(status, message, CLOSE)
        if self._reader is not None:
            # Before the lease that it fills is given back.
            self._reader.stop()
        receiving, self._receiving = self._receiving, None
        if receiving is not None and receiving in self._order:
            self._order.remove(receiving)
            if isinstance(receiving, Exchange):
                receiving.abandon()
            else:
                _disconnect(receiving)
        if not self._order:
            self._write_refusal()

    def _write_refusal(self) -> None:
        if self._refusal is not None and not self.transport.is_closing():
            self.transport.write(self._refusal)
            self._refusal = None
            self._hang_up()

    def _hang_up(self) -> None:
        """Ends our side; the client may still be sending, and must not be reset before it has read the answer."""
        self._closing = True
        if self._ended or (self._receiving is None and not self._linger_needed()):
            self.transport.close()
            return
        self._times.linger_since = monotonic()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()

    def _linger_needed(self) -> bool:
        return self._times.body_since > 0 or self._times.head_since > 0

    # ------------------------------------------------------------------------------------------------- the end

    def check(self, now: float) -> None:
        """Ends what has waited too long; called about once a second by the server."""
        http, times = self.serving.options.http, self._times
        received = -1
        if isinstance(self._receiving, Exchange) and not self._body_waits_since:
            received = self._receiving.received
        match times.late(http, now, self.transport.get_write_buffer_size(), received, self._closing):
            case None:
                pass
            case Late.HEAD:
                self._refuse(408, f"the request line and headers were not whole within {http.head_timeout:g} s")
            case Late.BODY:
                self._refuse(408, f"the request body was not whole within {http.body_timeout:g} s")
            case Late.SLOW:
                self._refuse(408, f"the request body came at fewer than {http.min_rate} bytes a second")
            case Late.IDLE if self._order:
                pass
            case _:
                self.transport.abort()

    def shutdown(self) -> None:
        """The server stops: an idle connection closes, a busy one after its last answer."""
        if self.idle:
            self.transport.close()
        else:
            self.announce_end()

    def announce_end(self) -> None:
        """The last answer says that there will be no more; not those before it: what the client sent ahead is answered."""
        last = self._order[-1] if self._order else None
        if last is None or not last.keep_alive:
            return
        if self._ends_with is not None:
            self._ends_with.keep_alive = True
        last.keep_alive = False
        self._ends_with = last

    @property
    def used_at(self) -> float:
        """When it was last of use to its client, where it asks nothing; monotonic seconds."""
        return self._times.idle_since or self._times.head_since

    @property
    def asks_nothing(self) -> bool:
        """Whether it waits for no answer, nor for all of one to leave. A head that is not whole asks nothing yet."""
        return not self._order and not self._times.body_since and not self._write_paused

    def make_room(self) -> None:
        """Others need its place."""
        self.transport.abort()

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return not self._order and not self._times.head_since and not self._times.body_since


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Nobody hears what it says, its 100 Continue least of all."""
    cycle.disconnected = True
    cycle.waiting_for_100_continue = False
    cycle.message_event.set()
