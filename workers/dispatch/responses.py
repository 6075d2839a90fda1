"""Sends the responses of models that answer a request with several responses.

``put`` queues a response. The worker's event loop sends the queued responses in order: each over its request's lane, or to the
model in this worker that made the request. If the lane's arena has no room for a response, the event loop tries again later.

Any thread may call ``put``, ``sender`` and ``alike``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from tensord.config.options import Arenas
from tensord.shm.arrays import Array
from tensord.shm.errors import Cancelled, Internal, InvalidArgument, ServingError, Unavailable
from tensord.shm.lane import response_byte_size
from tensord.shm.messages import LAST, TIMING, AnswerRecord
from tensord.workers.dispatch.answers import complete, failure
from tensord.workers.dispatch.outbox import Outbox
from tensord.workers.models.execution import Execution
from tensord.workers.models.model_version import AgendaPart
from tensord.workers.models.statistics import Failure
from tensord.workers.requests.request import InnerRequest, Request, hand_over, named, traced
from tensord.workers.requests.response_sender import (
    NOT_COMPLETED,
    EncodedResponses,
    GivenUp,
    ResponseKind,
    ResponseReceiver,
    ResponseSender,
    Sent,
    describe,
)
from tensord.workers.requests.result import STREAMED, Response, Result
from tensord.workers.scheduling.agenda import NEVER, Agenda

_log = logging.getLogger(__name__)
#: The time in which the loop, after responses came, looks for others without being woken: a thread that makes one after the other
#: is held up by every wake-up. A last response wakes it, unless the model returns with it and has another request at hand.
_GATHER_NS = 1_000_000
#: A response, whether it is the last, and the bytes that it counts as until it is placed.
_Sent = tuple[Sent, bool, int]


class Responses(ResponseReceiver):
    """Sends the responses of a worker's streaming models. A response for which the lane's arena has no room is sent later."""

    def __init__(
        self,
        options: Arenas,
        outbox: Outbox,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], int],
        max_ahead: int,
        withdraw: Callable[[Request], None],
        agenda: Agenda[AgendaPart] | None = None,
    ) -> None:
        """Makes an object that sends models' responses to clients through ``outbox``. It holds no response yet.

        Args:
          options: sets the size up to which an output needs no arena, and how long a response waits for room in the arena.
          post: schedules a function call in the worker's event loop. Any thread may use it.
          clock: returns the time of CLOCK_MONOTONIC in ns.
          max_ahead: how many bytes of responses to one request may be sent before the client has taken them.
          withdraw: cancels whatever works on a request that ended because a response to it could not be sent.
          agenda: tells the worker's event loop when to call ``gather``. If None, the caller must do so at ``look_ns``.
        """
        self._agenda: Agenda[AgendaPart] = agenda or Agenda()
        self.inline_byte_size = options.inline_byte_size
        self._wait_ns = int(options.wait * 1e9)
        self._outbox = outbox
        self._post = post
        self._clock = clock
        self.max_ahead = max_ahead
        self._withdraw = withdraw
        self._arrived: deque[tuple[ResponseSender, _Sent]] = deque()
        #: True if the loop was posted a call for them, or looks for them by itself.
        self._posted = False
        #: When it looks for responses that do not wake it; 0: it does not.
        self.look_ns = 0
        #: Responses that found the response arena full, for each request in their order, and when they are given up.
        self.kept: dict[ResponseSender, tuple[deque[_Sent], int]] = {}

    # ------------------------------------------------------------------------------------------------------- any thread

    def sender(self, request: Request) -> ResponseSender:
        """Returns the object that sends a request's responses. If there is none, makes one that sends exactly one response."""
        version = request.version
        found = version.senders.get(request)
        if found is None and version.loaded.streams:
            # The request had one, and ended since its model was given it.
            found = self._sender(request, self._clock())
            found.end()
        return found or version.senders.setdefault(request, self._sender(request, self._clock(), single=True))

    def _sender(self, request: Request, now_ns: int, single: bool = False) -> ResponseSender:
        """Makes a request's response sender. ``now_ns``: when the run began. ``single``: whether there is just one response."""
        segments, max_ahead = request.submitter.segments, self.max_ahead
        # The limit of a client's lane is divided among its requests in flight.
        if segments is not None:
            max_ahead = min(max_ahead, segments.limits.response_byte_size // segments.limits.in_flight)
        return ResponseSender(request, self, now_ns, single, max_ahead)

    def alike(self, sender: ResponseSender, result: dict[str, Array]) -> ResponseKind | None:
        request = sender.request
        if not sender.leaves_as_it_is:
            return None
        found = describe(result, request.outputs, self.inline_byte_size, strings=False)
        # Where an output is missing another response as long may have it.
        if found is None or len(found[0]) < max(1, len(request.outputs)):
            return None
        return request.submitter.known_kind(request.version.version, found[0])

    def put(self, sender: ResponseSender, result: Sent, final: bool, byte_size: int, wake: bool = True) -> None:
        """Queues a response. The worker's event loop sends the response after the earlier responses of ``sender``.

        The loop looks at the queue within about 1 ms, or, if ``wake`` is False, when the caller makes it do so.
        """
        self._arrived.append((sender, (result, final, byte_size)))
        # Whoever takes them says so before it looks for them.
        if wake and (final or not self._posted):
            self._posted = True
            self._post(self._take)

    # ---------------------------------------------------------------------------------------------------------- the loop

    def open(self, requests: list[Request], now_ns: int) -> None:
        """Makes a response sender for each request that has none. The requests begin to run at ``now_ns`` (CLOCK_MONOTONIC)."""
        for request in requests:
            # One that goes round again has one.
            if request not in request.version.senders:
                request.version.senders[request] = self._sender(request, now_ns)

    def returned(self, execution: Execution) -> None:
        """Moves requests from ``execution.requests`` to ``execution.streamed`` after the model has run.

        First sends all responses that ``put`` has queued. Then moves each request that has a response sender, and each request
        that was answered already. If a request with a response sender failed, sends the error as the last response. If the
        client cancelled such a request, sends Cancelled.
        """
        self._take()
        requests, results = execution.requests, execution.results
        execution.requests, execution.results, execution.streamed = [], [], []
        for request, result in zip(requests, results, strict=True):
            sender = request.version.senders.get(request)
            if sender is None and request.is_open:
                execution.requests = [*execution.requests, request]
                execution.results.append(result)
                continue
            execution.streamed.append(request)
            if sender is None:
                # It has ended, and its model could read its inputs until now.
                request.release()
                continue
            sender.returned = True
            if sender.is_cancelled:
                self._end_cancelled(sender)
            elif result is not STREAMED:
                error = result if isinstance(result, ServingError) else Internal(NOT_COMPLETED)
                self._in_turn(sender, (error, True, 0))

    def respond(self, sender: ResponseSender, result: Result | None, final: bool) -> None:
        """Sends the next response to the request of ``sender``. ``final``: whether the request ends with this call.

        ``result``: the response, or an error; None: the request ends without a response, and ``final`` must be True.
        """
        self._in_turn(sender, (result, final, sender.posted(result, final)))

    def takes_small(self, sender: ResponseSender) -> bool:
        """Returns whether a small response of ``sender`` can be sent together with responses to other requests."""
        free = sender not in self.kept and not sender.is_cancelled
        return free and not sender.request.outputs and sender.leaves_as_it_is

    def taken(self, request: Request, byte_size: int) -> None:
        """Counts bytes of a request's responses as taken by the client, so that the model may send more."""
        sender = request.version.senders.get(request)
        if sender is not None:
            sender.settle(byte_size)

    @staticmethod
    def check_taken(request: Request, byte_size: int) -> None:
        """Raises InvalidArgument if a client says that it took ``byte_size`` bytes of responses, but fewer were sent."""
        sender = request.version.senders.get(request)
        if sender is None:
            return
        if byte_size > sender.outstanding:
            # Responses that left together are noted when somebody asks.
            sender.catch_up()
        if byte_size > sender.outstanding:
            raise InvalidArgument(
                f"{byte_size} bytes of responses are said to be taken, {sender.outstanding} of them can be"
            )

    def took(self, request: InnerRequest) -> None:
        """Notes that the model or ensemble that made ``request`` has taken the next response to ``request``."""
        self.taken(request, request.ahead.popleft())

    def cancelled(self, request: Request) -> None:
        """Lets a streaming model go on after the client has cancelled ``request``.

        The model stops waiting for the client to read responses. If its function has already returned, the request ends.
        """
        sender = request.version.senders.get(request)
        if sender is not None:
            sender.wake()
            if sender.returned:
                self._end_cancelled(sender)

    def retry(self, now_ns: int) -> None:
        """Sends waiting responses whose lane's arena has room now. If a response waited too long, its request gets an error."""
        for sender, (waiting, give_up_ns) in list(self.kept.items()):
            del self.kept[sender]
            while waiting and not sender.ended:
                if now_ns >= give_up_ns:
                    error = self._outbox.no_room(sender.request, waiting[0][2], now_ns)
                    waiting = deque([(GivenUp(error.message), True, 0)])
                sent = waiting.popleft()
                self._respond(sender, sent)
                if sender in self.kept:
                    waiting.appendleft(sent)
                    self.kept[sender] = waiting, give_up_ns
                    break

    @property
    def next_give_up_ns(self) -> int:
        """The latest time for the next call of ``retry`` (CLOCK_MONOTONIC, ns). It is NEVER if no response waits for memory."""
        return min([give_up_ns for _, give_up_ns in self.kept.values()], default=NEVER)

    def gather(self, now_ns: int) -> None:
        """Sends all responses that ``put`` has queued. Does nothing if ``look_ns`` is 0 or later than ``now_ns``."""
        if 0 < self.look_ns <= now_ns:
            self.look_ns = 0
            self._take()

    def _take(self) -> None:
        arrived = self._arrived
        if not self.look_ns:
            self._posted = False
        count = len(arrived)
        if count:
            self._posted, self.look_ns = True, self._clock() + _GATHER_NS
            self._agenda.put(self.gather, self.look_ns)
        for _ in range(count):
            self._in_turn(*arrived.popleft())

    def _in_turn(self, sender: ResponseSender, sent: _Sent) -> None:
        """Sends a response to a request, or an error that ends it, behind the responses that wait for room."""
        if sender in self.kept:
            self.kept[sender][0].append(sent)
        else:
            self._respond(sender, sent)

    def _respond(self, sender: ResponseSender, sent: _Sent) -> None:
        if sender.ended:
            return
        result, final, byte_size = sent
        if isinstance(result, EncodedResponses):
            records = result.take()
            if records and not sender.request.cancelled:
                sender.respond_encoded(result.kind, records, self._clock())
            return
        request, now_ns = sender.request, self._clock()
        if sender.is_cancelled:
            if final:
                self._end_cancelled(sender)
            return
        placed = self._place(sender, result, final) if request.sink is None else byte_size
        if isinstance(placed, ServingError):
            result = placed
            if isinstance(placed, Unavailable):
                # Nothing is wrong with it: it would be missing among those behind it.
                result, final = GivenUp(placed.message), True
            placed = self._place(sender, result, final)
        if not isinstance(placed, int):
            self.kept[sender] = deque([sent]), now_ns + self._wait_ns
            return
        # What it comes to on the lane is what its submitter says has been taken.
        sender.settle(byte_size - placed)
        placed_ns = self._clock()
        request.version.statistics.responded(sender, result, now_ns, placed_ns)
        if final:
            error = result if isinstance(result, ServingError) else None
            self._end(sender, placed_ns, Failure.BACKEND if sender.failed else None, error)
        if request.sink is not None:
            if final and request.timeline is not None:
                self._note_end(sender, result)
            # Who made it calls ``took`` later.
            assert isinstance(request, InnerRequest)
            request.ahead.append(byte_size)
            hand_over(request, result, None, final)
        if isinstance(result, GivenUp):
            self._withdraw(request)

    def _note_end(self, sender: ResponseSender, result: Result | None) -> None:
        """Adds a run that ends now to the timeline of ``sender.request``. ``result``: the last outputs; None: no outputs."""
        request, shown = sender.request, {} if result is None else result
        assert request.timeline is not None
        request.timeline.executed((sender.began_ns, sender.began_ns, self._clock()), request.arrays, shown)

    def _place(self, sender: ResponseSender, result: Result | None, final: bool) -> int | ServingError | None:
        """Sends ``result``. Returns how many bytes the client must take, None if the arena is full, or why it failed."""
        request = sender.request
        version, submitter = request.version, request.submitter
        if result is None:
            record = AnswerRecord(request.request_id, LAST)
        elif isinstance(result, ServingError):
            record = failure(request.request_id, result, version.version, final)
        else:
            placed = self._place_small(sender, result, final)
            if placed:
                return placed
            if request.timeline is not None:
                request.timeline.responded(self._clock())
            try:
                made = complete(request, result, self.inline_byte_size, final=final)
                if made is None:
                    return None
                record = made
            except ServingError as error:
                return error.with_traceback(None)
            except Exception as error:  # an array no one expected: this response's error, nobody else's
                name = named(request.client_id)
                _log.exception("%splacing a response of model '%s' failed", name, version.name, extra=traced([request]))
                return Internal(f"a response of model '{version.name}' could not be placed: {type(error).__name__}")
        if final and request.own.trace:
            if request.own.trace & TIMING:
                request.ran_in(sender.began_ns, self._clock(), 0)
                record = request.timed(record)
            if request.timeline is not None:
                self._note_end(sender, result)
                record = request.timeline.attach(record)
        submitter.answer(record)
        return 0 if final else response_byte_size(record.contents)

    def _place_small(self, sender: ResponseSender, result: dict[str, Array], final: bool) -> int:
        request = sender.request
        if (
            not sender.plain
            or type(result) is Response
            or (request.own.trace and (final or request.timeline is not None))
        ):
            return 0
        found = describe(result, request.outputs, self.inline_byte_size, strings=True)
        if found is None:
            return 0
        numbered = request.submitter.response_kind(request.version.version, found[0], final).numbered
        request.submitter.answer(AnswerRecord(request.request_id, numbered.number, found[1]), numbered)
        return response_byte_size(found[1])

    def _end_cancelled(self, sender: ResponseSender) -> None:
        """Answers a cancelled request with Cancelled and closes its sender."""
        request, error = sender.request, Cancelled()
        sender.catch_up()
        if request.sink is None and not request.submitter.closed:
            request.submitter.answer(failure(request.request_id, error))
        self._end(sender, self._clock(), Failure.CANCELED, error)
        if request.sink is not None:
            hand_over(request, error)

    def _end(self, sender: ResponseSender, now_ns: int, failure: Failure | None, error: ServingError | None) -> None:
        request = sender.request
        sender.end()
        self.kept.pop(sender, None)
        request.version.senders.pop(request, None)
        request.version.statistics.streamed(sender, now_ns, failure)
        if request.sink is None:
            self._outbox.end(request, error, runs=not sender.returned)
        self._outbox.ended(request)

    def __repr__(self) -> str:
        return f"<Responses {len(self._arrived)} to be placed, {len(self.kept)} requests wait for room>"
