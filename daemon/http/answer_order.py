"""The requests of a connection in their order: whose body arrives, whose answer is written, the refusal that is the last answer.

    requests   [ active | next | next ]     an Exchange (infer), a Generation (generate, generate_stream),
                                            or an AsgiRequest (everything else, which Starlette answers)

Requests are answered in their order, whichever way each goes. What comes behind a refusal is thrown away.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic

from tensord.daemon.front.body_reader import BodyReader
from tensord.daemon.front.each import call_each
from tensord.daemon.front.lingering_close import is_quiet
from tensord.daemon.http.asgi import AsgiRequest
from tensord.daemon.http.deadlines import Deadlines
from tensord.daemon.http.exchange import Exchange
from tensord.daemon.http.generate import Generation
from tensord.daemon.http.response_codec import CLOSE, Buffer, error_response
from tensord.daemon.http.serving import HttpServing
from tensord.daemon.submit.accounts import Account

#: One that has its place in the order.
HttpRequest = Exchange | Generation | AsgiRequest


class AnswerOrder:
    """Keeps the requests of one connection in their order, and writes their answers.

    Args:
      account: what its client holds of the arenas.
    """

    def __init__(self, serving: HttpServing, transport: asyncio.Transport, account: Account) -> None:
        self._serving = serving
        self.transport = transport
        self.account = account
        self.flow = Flow(transport)
        self.times = Deadlines(monotonic())
        #: Those that are not answered.
        self.requests: deque[HttpRequest] = deque()
        #: The one whose body is arriving; it may be answered already.
        self.receiving: HttpRequest | None = None
        #: Whether that is sent only once it is asked for.
        self.expects_continue = False
        #: Reads large bodies past the connection; there while it sends such.
        self.reader: BodyReader | None = None
        #: The client has ended its sending side.
        self.ended = False
        #: What arrives is thrown away.
        self.closing = False
        #: Nothing more is written; the connection ends when everything that was has left.
        self._hung_up = False
        self._refusal: bytes | None = None
        #: The CORS header lines of answers to the request whose head came last.
        self.origin_lines = b""
        #: The one whose answer ends the connection because the server stops.
        self._ends_with: HttpRequest | None = None
        #: Since when the body that is arriving has no place, monotonic seconds; 0: it has.
        self._body_waits_since = 0.0
        #: Whose turn comes next, while one is being given.
        self._turning = False
        self._next: HttpRequest | None = None
        #: The next request may be begun once the client takes its answers.
        self._turn_due = False
        #: Those whose answers are partly in the transport's buffer.
        self._unwritten: list[Exchange | Generation] = []

    def append(self, request: HttpRequest) -> None:
        """Adds a request whose head has come, and whose body comes next."""
        self.requests.append(request)
        self.receiving = request
        if self._serving.stopping:
            self.announce_end()

    def received_whole(self) -> None:
        """Notes that the arriving body is complete, and continues its request."""
        receiving, self.receiving = self.receiving, None
        self.times.body_since = 0.0
        if len(self.requests) > 1:
            # Whoever sends ahead is read no further until it is answered.
            self.flow.pause_reading()
        if receiving is not None:
            receiving.complete()

    @property
    def between(self) -> bool:
        """Returns whether no request is under way, so that the next bytes begin a head."""
        return not (self.requests or self.receiving or self.times.head_since)

    # ------------------------------------------------------------------------------------------------ answers

    def answer_whole(self, answer: bytes) -> None:
        """Writes the active answer in one piece; for answers without a lease on connections that are kept alive."""
        self.transport.write(answer)
        answered = self.requests.popleft()
        if self.requests or self._refusal or self.times.head_since or self.flow.read_paused:
            self._go_on(answered)
        else:
            self.times.idle_since = monotonic()

    def answer_pieces(self, pieces: list[Buffer]) -> bool:
        """Writes any answer. Returns True if the transport took all of it; else ``written`` of its request is called later."""
        if len(pieces) == 1:
            self.transport.write(pieces[0])
        else:
            self.transport.writelines(pieces)
        answered, waits = self.requests.popleft(), self.flow.write_paused
        if waits:
            assert not isinstance(answered, AsgiRequest)
            self._unwritten.append(answered)
        self._go_on(answered)
        return not waits

    def answer_part(self, part: bytes) -> bool:
        """Writes a part of the active generation's answer. Returns as ``answer_pieces``; ``answered`` ends the answer."""
        self.transport.write(part)
        if not self.flow.write_paused:
            return True
        active = self.requests[0]
        if active not in self._unwritten:
            assert isinstance(active, Generation)
            self._unwritten.append(active)
        return False

    def answered(self) -> None:
        """Gives the next request its turn, as the active one has its answer."""
        self._go_on(self.requests.popleft())

    def _go_on(self, answered: HttpRequest) -> None:
        if not answered.keep_alive:
            if not self.transport.is_closing():
                self._hang_up()
        elif self.requests:
            if self.transport.is_closing():
                return
            if self.flow.write_paused:
                # What it asks next would lie beside what it has not taken.
                self._turn_due = True
            else:
                self._give_turn()
        elif self._refusal is not None:
            self._write_refusal()
        else:
            self.times.idle_since = monotonic() if not self.times.head_since else 0.0
            if self.flow.read_paused and not self.flow.write_paused:
                self.flow.resume_reading()

    def _give_turn(self) -> None:
        """Gives the first request its turn, then those behind it while each is answered at once, in a loop and not nested."""
        if not self.requests:
            return
        following: HttpRequest | None = self.requests[0]
        self._next = following
        if following is self.receiving and self.expects_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._steer_reading()
        if self._turning:
            return
        self._turning = True
        try:
            while (following := self._next) is not None:
                self._next = None
                following.take_turn()
        finally:
            self._turning = False

    def owes(self, exchange: Exchange) -> bool:
        """Returns whether the next answer to be written belongs to that exchange."""
        return bool(self.requests) and self.requests[0] is exchange

    def cut(self) -> None:
        """Aborts the connection, because its client cannot be answered any more."""
        self.transport.abort()

    def announce_end(self) -> None:
        """Lets the last answer say that the connection ends; what the client sent ahead is answered before."""
        last = self.requests[-1] if self.requests else None
        if last is None or not last.keep_alive:
            return
        if self._ends_with is not None:
            self._ends_with.keep_alive = True
        last.keep_alive = False
        self._ends_with = last

    # ------------------------------------------------------------------------------------------- reading and writing

    def pause_writing(self) -> None:
        """Stops reading a client that does not take its answers."""
        self.flow.write_paused = True
        self.times.stalled_since = monotonic()
        self.flow.pause_reading()

    def resume_writing(self) -> None:
        """Goes on once the client has taken its answers."""
        self.times.stalled_since = 0.0
        unwritten, self._unwritten = self._unwritten, []
        self.flow.resume_writing()
        call_each([request.written for request in unwritten], "what follows an answer")
        if self.flow.write_paused:
            return  # there was more of an answer, and that waits
        if self._turn_due:
            self._turn_due = False
            self._give_turn()
        if not self.closing:
            self._steer_reading()
        elif self._hung_up:
            self._serving.lingering.see_out(self.transport)

    def pause_body(self, pause: bool) -> None:
        """Stops or resumes reading as the body that is arriving has no place, or has one."""
        if pause:
            self._body_waits_since = monotonic()
        elif self._body_waits_since:
            # It is we who held it up: the client's time runs from now on.
            if self.times.body_since:
                self.times.body_since += monotonic() - self._body_waits_since
            self._body_waits_since = 0.0
        self._steer_reading()

    def _steer_reading(self) -> None:
        """Pauses or resumes reading: it pauses while the client does not read, the arena is full, or an answer is awaited."""
        if self.flow.write_paused or self._body_waits_since:
            self.flow.pause_reading()
        elif isinstance(self.receiving, Exchange | Generation) or not self.requests:
            self.flow.resume_reading()

    @property
    def received(self) -> int:
        """Returns the received bytes of the arriving body; -1: there is none, or it is the server that holds it up."""
        if self.receiving is None or self._body_waits_since:
            return -1
        direct = self.reader.byte_size if self.reader is not None and self.reader.reads_body else 0
        return self.receiving.received + direct

    # ------------------------------------------------------------------------------------------------ the end

    def refuse(self, status: int, message: str) -> None:
        """Answers after everything that came before, then hangs up. What still arrives is thrown away."""
        self.closing = True
        self._serving.answered.failed(str(status), message, account=self.account)
        self._refusal = error_response(status, message, CLOSE + self.origin_lines)
        if self.reader is not None:
            # Before the lease that it fills is given back.
            self.reader.stop()
        receiving, self.receiving = self.receiving, None
        if receiving is not None and receiving in self.requests:
            self.requests.remove(receiving)
            receiving.abandon()
        if not self.requests:
            self._write_refusal()

    def _write_refusal(self) -> None:
        if self._refusal is not None and not self.transport.is_closing():
            self.transport.write(self._refusal)
            self._refusal = None
            self._hang_up()

    def _hang_up(self) -> None:
        """Closes the connection after everything written has left."""
        if self._hung_up:
            return
        self.closing = self._hung_up = True
        if self.ended:
            self.transport.close()
        elif not self.flow.write_paused:
            self._serving.lingering.see_out(self.transport)

    def leave(self) -> None:
        """Closes an idle connection: at once if the client has received all answers, because many never notice a half-close."""
        if is_quiet(self.transport) and not self._hung_up:
            self.transport.close()
        else:
            self._hang_up()

    def lost(self) -> None:
        """Abandons all requests, because the connection is gone."""
        if self.requests or self._unwritten:
            call_each([request.abandon for request in {*self.requests, *self._unwritten}], "leaving a request")
            self.requests.clear()
            self._unwritten.clear()
        self.receiving = self.reader = self._ends_with = None
        self.flow.resume_writing()


class Flow:
    """Controls the flow of one connection: whether it is read, and whether its client takes what is written."""

    __slots__ = ("_writable", "read_paused", "resting", "transport", "write_paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.read_paused = False
        #: Not read either way, because what came before waits for the next turn of the loop.
        self.resting = False
        #: Something that was written is still in the transport's buffer.
        self.write_paused = False
        self._writable: asyncio.Event | None = None

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._steer()

    def rest(self, resting: bool) -> None:
        """Pauses reading until the next iteration of the loop (True), or ends that pause."""
        self.resting = resting
        self._steer()

    def _steer(self) -> None:
        if self.read_paused or self.resting:
            self.transport.pause_reading()
        elif not self.transport.is_closing():
            self.transport.resume_reading()

    def resume_writing(self) -> None:
        """Notes that everything written has left, or never will."""
        self.write_paused = False
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    async def drain(self) -> None:
        """Returns when ``write_paused`` has ended."""
        if self.write_paused:
            self._writable = self._writable or asyncio.Event()
            await self._writable.wait()
