"""Writes the answers of one HTTP connection in the order of the requests, and closes the connection after the last answer.

Each request is an ``Exchange`` (infer), a ``Generation`` (generate, generate_stream, infer_stream) or an ``AsgiRequest`` (any
other request).
"""

from __future__ import annotations

import asyncio
from collections import deque

from tensord.daemon.front.each import call_each
from tensord.daemon.front.lingering_close import is_quiet
from tensord.daemon.http.asgi import AsgiRequest
from tensord.daemon.http.body_reader import BodyReader
from tensord.daemon.http.deadlines import ClientDeadlines
from tensord.daemon.http.exchange import Exchange
from tensord.daemon.http.generate import Generation
from tensord.daemon.http.response_codec import CLOSE, error_response
from tensord.daemon.http.serving import HttpServing
from tensord.daemon.submit.accounts import Account
from tensord.shm.messages import Buffer
from tensord.shm.running_time import RunningTime

#: A request that has its place in the order of answers.
HttpRequest = Exchange | Generation | AsgiRequest


class AnswerOrder:
    """Keeps the requests of one connection in order, and writes their answers in that order.

    ``account`` counts the arena memory that the connection holds.
    """

    def __init__(self, serving: HttpServing, transport: asyncio.Transport, account: Account) -> None:
        self._serving = serving
        self.transport = transport
        self.account = account
        self.times = ClientDeadlines(serving.clock())
        self.flow = Flow(transport, self.times, serving.clock)
        #: The requests that are not answered yet, oldest first.
        self.requests: deque[HttpRequest] = deque()
        #: The request whose body is arriving; it may be answered already.
        self.receiving: HttpRequest | None = None
        #: The client sends the body of ``receiving`` only after ``100 Continue``, which it was not sent yet.
        self._expects_continue = False
        #: Reads large bodies straight from the socket, while the client sends such.
        self.reader: BodyReader | None = None
        #: The client has ended its sending side.
        self.ended = False
        #: Bytes that arrive are discarded.
        self.closing = False
        #: Nothing more is written; the connection ends when everything that was written has been sent.
        self._hung_up = False
        self._refusal: bytes | None = None
        #: The CORS header lines of answers to the request whose head came last.
        self.origin_lines = b""
        #: The request whose answer ends the connection, because the server stops.
        self._ends_with: HttpRequest | None = None
        #: The arriving body waits for room in the arena.
        self._body_waits = False
        #: True while ``_give_turn`` gives requests their turn; ``_next`` is the request whose turn comes next.
        self._turning = False
        self._next: HttpRequest | None = None
        #: The next request gets its turn once the client has read its answers.
        self._turn_due = False
        #: Requests whose answers are partly in the transport's buffer.
        self._unwritten: list[Exchange | Generation] = []

    def append(self, request: HttpRequest, expects_continue: bool = False) -> None:
        """Adds a request whose head has arrived and whose body arrives next.

        The request is answered after the earlier requests.
        ``expects_continue``: whether the client sends the body only after ``100 Continue``, which ``ask_for_body`` sends.
        """
        self.requests.append(request)
        self.receiving = request
        self._expects_continue = expects_continue
        if self._serving.stopping:
            self.announce_end()

    def received_whole(self) -> None:
        """Tells the request whose body is arriving that the body is complete."""
        receiving, self.receiving = self.receiving, None
        self.times.body_since = 0.0
        if len(self.requests) > 1:
            # Whoever sends ahead is read no further until it is answered.
            self.flow.pause_reading()
        if receiving is not None:
            receiving.complete()

    @property
    def between(self) -> bool:
        """Returns whether no request on this connection is arriving or waiting for its answer."""
        return not (self.requests or self.receiving or self.times.head_since)

    # ------------------------------------------------------------------------------------------------ answers

    def answer_whole(self, answer: bytes) -> None:
        """Writes the whole answer to the oldest request of the connection, and removes this request from the queue.

        Call it only if the connection stays open after the answer, and if ``answer`` is a copy, not a view of an arena.
        """
        self.transport.write(answer)
        answered = self.requests.popleft()
        if self.requests or self._refusal or self.times.head_since or self.flow.read_paused:
            self._go_on(answered)
        else:
            self.times.idle_since = self._serving.clock()

    def answer_pieces(self, pieces: list[Buffer]) -> bool:
        """Writes the whole answer to the oldest request, and removes that request.

        ``pieces``: the answer, in order.
        Returns True if the transport no longer needs the memory of the pieces. Returns False if the transport's buffer is full.
        Then the request's ``written`` is called once the buffer has drained.
        """
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
        """Sends ``part``, the next bytes of the streamed answer to the connection's oldest unanswered request.

        Returns False if the transport's write buffer is full. Once that buffer has drained, this object calls the method
        ``written`` of the request, and the caller may send the next part. The caller calls ``answered`` after the last part.
        """
        self.transport.write(part)
        if not self.flow.write_paused:
            return True
        active = self.requests[0]
        if active not in self._unwritten:
            assert isinstance(active, Generation)
            self._unwritten.append(active)
        return False

    def answered(self) -> None:
        """Removes the oldest request, whose answer is written, and lets the next request be answered.

        If the removed request was the last of the connection, the connection is closed instead.
        """
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
            self.times.idle_since = self._serving.clock() if not self.times.head_since else 0.0
            if self.flow.read_paused and not self.flow.write_paused:
                self.flow.resume_reading()

    def _give_turn(self) -> None:
        # In a loop, because ``take_turn`` may answer at once and call this method again: recursion could go too deep.
        if not self.requests:
            return
        following: HttpRequest | None = self.requests[0]
        self._next = following
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

    def announce_end(self) -> None:
        """Has the connection closed after the answer to the newest unanswered request.

        That answer says ``Connection: close`` unless its head was sent already. If its head was sent already and the client can
        still send, or if all requests are answered, this method does nothing.
        """
        last = self.requests[-1] if self.requests else None
        if last is None or not last.keep_alive:
            return
        if isinstance(last, Generation) and last.begun and not self.ended:
            return  # its head has left: its client would not know that what it has sent behind it is not read
        if self._ends_with is not None:
            self._ends_with.keep_alive = True
        last.keep_alive = False
        self._ends_with = last

    # ------------------------------------------------------------------------------------------- reading and writing

    def pause_writing(self) -> None:
        """Stops reading requests because the write buffer for the client's answers is full."""
        self.flow.write_paused = True
        self.times.stalled_since = self._serving.clock()
        self.flow.pause_reading()

    def resume_writing(self) -> None:
        """Continues the unfinished answers of this connection. Called when the transport's write buffer has drained.

        If the buffer is not full afterwards, lets the client's next request be answered, and may read from the client again.
        """
        self.times.stalled_since = 0.0
        unwritten, self._unwritten = self._unwritten, []
        self.flow.write_paused = False
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
        """Pauses reading from the client if ``pause`` is True. If ``pause`` is False, ends the pause that this method began."""
        self._body_waits = pause
        self._steer_reading()

    def _steer_reading(self) -> None:
        """Pauses reading if the client reads no answers, or if a body waits for memory or is decompressed.

        Otherwise, resumes reading if an infer or generate request is arriving, or if all requests are answered.
        """
        if self.flow.write_paused or self._body_waits:
            self.flow.pause_reading()
        elif isinstance(self.receiving, Exchange | Generation) or not self.requests:
            self.flow.resume_reading()

    def ask_for_body(self, request: HttpRequest) -> None:
        """If the client waits for ``100 Continue`` for ``request``, sends it and restarts the time limit for the body."""
        if self._expects_continue and self.receiving is request:
            self._expects_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.times.held_up(self._serving.clock())

    def forgo_body(self, request: HttpRequest) -> None:
        """Ensures that no ``100 Continue`` is sent for ``request``, because the answer to ``request`` has begun."""
        if self.receiving is request and self._expects_continue:
            self._expects_continue = False
            # Its client may send the body all the same, from now on.
            self.times.held_up(self._serving.clock())

    @property
    def holds_up(self) -> bool:
        """Returns whether the server, and not the client, delays the arriving request."""
        return self.flow.read_paused or (self.receiving is not None and self.received < 0)

    @property
    def received(self) -> int:
        """Returns how many bytes of the request body that is arriving have come. Returns -1 if no body is arriving.

        Also returns -1 while the client waits for ``100 Continue``, and while the body waits for memory or is decompressed.
        """
        if self.receiving is None or self._body_waits or self._expects_continue:
            return -1
        direct = self.reader.byte_size if self.reader is not None and self.reader.reads_body else 0
        return self.receiving.received + direct

    # ------------------------------------------------------------------------------------------------ the end

    def stop_direct(self, request: HttpRequest) -> bool:
        """Stops a ``BodyReader`` that reads the body of the refused ``request``. Returns False if no reader reads that body.

        If this method returns True, the caller must close the connection after the answer: where the body ends is not known.
        """
        if self.receiving is not request or self.reader is None or not self.reader.reads_body:
            return False
        self.reader.stop()
        self.receiving = None
        return True

    def discard_rest(self) -> None:
        """Discards what the client sends from now on, because the answer that begins now says ``Connection: close``."""
        self.closing = True

    def refuse(self, status: int, message: str) -> None:
        """Refuses the arriving request with the error ``status`` and ``message``, and closes the connection afterwards.

        The error is written after the answers to earlier requests, and not at all if the arriving request was answered before.
        Bytes that still arrive are discarded. Does nothing if the connection is closing already.
        """
        if self.closing:
            return
        self.closing = True
        if self.reader is not None:
            # Before the lease that it fills is given back.
            self.reader.stop()
        receiving, self.receiving = self.receiving, None
        if receiving is not None and receiving not in self.requests:
            # It was answered before its body was whole, and a second answer would be taken for that of the next request.
            self._hang_up()
            return
        self._serving.answered.failed(str(status), message, account=self.account)
        self._refusal = error_response(status, message, CLOSE + self.origin_lines)
        if receiving is not None:
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
        """Closes the connection once everything that was written has been sent."""
        if self._hung_up:
            return
        self.closing = self._hung_up = True
        if self.ended:
            self.transport.close()
        elif not self.flow.write_paused:
            self._serving.lingering.see_out(self.transport)

    def leave(self) -> None:
        """Closes the connection once all written answers are sent. Call it only if no request waits for an answer."""
        if is_quiet(self.transport) and not self._hung_up:
            self.transport.close()
        else:
            self._hang_up()

    def lost(self) -> None:
        """Cancels all unanswered requests, because the client has disconnected."""
        if self.requests or self._unwritten:
            call_each([request.abandon for request in {*self.requests, *self._unwritten}], "leaving a request")
            self.requests.clear()
            self._unwritten.clear()
        self.receiving = self.reader = self._ends_with = None
        self.flow.write_paused = False


class Flow:
    """Pauses and resumes reading from the client of one connection.

    ``times``: the client's deadlines. Each pause postpones the deadlines of an arriving head or body.
    ``clock``: the front's clock.
    """

    __slots__ = ("_clock", "_paused_at", "_times", "read_paused", "resting", "transport", "write_paused")

    def __init__(self, transport: asyncio.Transport, times: ClientDeadlines, clock: RunningTime) -> None:
        self.transport = transport
        self._times = times
        self._clock = clock
        self._paused_at = 0.0
        self.read_paused = False
        #: The client is not read, because bytes that came before wait for the next iteration of the loop.
        self.resting = False
        #: Something that was written is still in the transport's buffer.
        self.write_paused = False

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._steer()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._steer()

    def rest(self, resting: bool) -> None:
        """Pauses reading until the next iteration of the event loop (``resting`` True), or ends that pause (False)."""
        self.resting = resting
        self._steer()

    def _steer(self) -> None:
        if self.read_paused or self.resting:
            self._paused_at = self._paused_at or self._clock()
            self.transport.pause_reading()
        elif not self.transport.is_closing():
            self._times.held_up(self._clock(), self._paused_at)
            self._paused_at = 0.0
            self.transport.resume_reading()
