"""Sends a front's requests to workers, receives the answers, and sends the requests of dead workers to other workers.

The steps of one request, in the order of this file:

1. ``send`` stores the request under its id, chooses a worker and puts the request's record on the lane of this worker.
2. If no worker can run the request now, the request waits for at most ``requests.worker_wait`` seconds.
3. An idle worker gets a record at once. A busy worker gets the records of one event loop iteration together.
4. The answer comes back on the lane. ``completed`` of the request is called with the answer and the lane.
5. When the answer's bytes have been sent to the client, the front calls ``release``, which gives the memory back. Until then
   the bytes count for the client's connection. If these bytes reach a limit, the connection's next requests must wait.

After end of file on a lane, no more requests are sent on it. When the supervisor reports the death of the worker, each request
that the worker has not answered is sent to another worker, or fails if it cannot safely run again. Each request that is not
cancelled gets exactly one final answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable
from itertools import count, takewhile

from tensord.config.options import Options
from tensord.daemon.control.refusals import Refusals
from tensord.daemon.control.shared_counters import FrontCounters
from tensord.daemon.submit.accounts import Account, Accounts, part
from tensord.daemon.submit.arena_space import ArenaSpace, OnLease
from tensord.daemon.submit.busy_poll import BusyPoll
from tensord.daemon.submit.in_flight import InFlight, WorkerLink
from tensord.daemon.submit.model_states import ModelStates
from tensord.daemon.submit.routing import Routing
from tensord.daemon.submit.throttle import Throttle
from tensord.shm import descriptors
from tensord.shm.arena import Arena, LeaseKey
from tensord.shm.channel import ChannelClosed
from tensord.shm.common.submission import load, lost_sequence
from tensord.shm.control_records import LaneOpened, ModelGone, ModelState, WorkerFenced
from tensord.shm.device_names import number_of
from tensord.shm.errors import DEFECT, Cancelled, Internal, InvalidArgument, ServingError, Unavailable, from_code
from tensord.shm.lane import SubmitterLane, response_byte_size
from tensord.shm.messages import AnswerRecord, PreparedAnswer, PreparedRequest, TraceContext
from tensord.shm.prepared import Numbers
from tensord.shm.refusals import Refusal
from tensord.shm.seldom import Seldom
from tensord.shm.sequence_page import SequencePage
from tensord.shm.spin import Spin
from tensord.shm.status_page import StatusPage, WorkerState

_log = logging.getLogger(__name__)
#: Seconds after which a lane that could not be written to is tried again.
_AGAIN_SECONDS = 0.1
#: Seconds between two looks at what waits, while anything does.
_TIMER_SECONDS = 0.1


class Submitter:
    """Sends all requests of one front to workers, and owns the arena in which the front stores the tensors of requests."""

    def __init__(
        self,
        incarnation: int,
        options: Options,
        table: ModelStates,
        row: int,
        counters: FrontCounters,
        on_untaken: Callable[[int], None],
    ) -> None:
        """Creates a submitter that has no lanes yet, and an arena for the tensors of requests.

        Args:
          incarnation: the number of the front process, which no other process ever has.
          table: the states of all models.
          row: the number of this front among the fronts of its protocol.
          counters: the front's counters in shared memory, which also say whether the front has read all that it was sent.
          on_untaken: called with a worker's number if the front or the worker could not open the lane between them.
        """
        self._incarnation = incarnation
        self._max_in_flight = self._most_in_flight = options.requests.max_in_flight
        #: True if no new request is taken at all.
        self._refuses = False
        self._timeout = options.requests.timeout
        arenas = options.arenas
        #: The most bytes of a request's tensors together that travel inside its record.
        self.inline_byte_size = arenas.inline_byte_size
        #: The numbers of prepared requests, which clients repeat.
        self.numbers: Numbers[PreparedRequest] = Numbers(counters.note_number, options.expert.max_prepared)
        #: An id for the next request; never used again.
        self.next_id: Callable[[], int] = count(1).__next__
        self._arena = Arena(arenas.byte_size, arenas.max_byte_size, arenas.keep_byte_size)
        #: All that are in flight, in order of arrival.
        self._in_flight: dict[int, InFlight] = {}
        #: The requests that no worker can run now, each with the time at which it gives up.
        self._waiting: dict[InFlight, float] = {}
        self._worker_wait = options.requests.worker_wait
        self._is_behind, self._on_untaken = counters.is_behind, on_untaken
        self._seldom = Seldom()
        #: The requests that wait until everything is read that the supervisor has sent, with the refusals of their workers.
        self._refused: dict[InFlight, tuple[WorkerLink, AnswerRecord]] = {}
        #: Some requests wait for a worker because not everything was read.
        self._unread = False
        #: Set, and replaced, with every change of a model.
        self._model_changed = asyncio.Event()
        loop = self._loop = asyncio.get_running_loop()
        self.refusals = Refusals(counters.refuse)
        spin_ns = options.expert.spin_us * 1000
        #: Keeps this front awake while answers are about to come; None: the operator does not want that.
        self._busy_poll = BusyPoll(loop, Spin(spin_ns), self._in_flight) if spin_ns else None
        self._routing = Routing(table, row, self._in_flight, options.requests.max_sequences)
        self.is_loading, self.region_placed = self._routing.is_loading, self._routing.region_placed
        self._throttle = Throttle(self._in_flight, arenas.wait)
        # Workers that still map a segment that was closed keep its pages: the closure is announced to them.
        self._space = ArenaSpace(self._arena, arenas.wait, part(arenas, arenas.arriving_share), self._flush_all_later)
        #: Room for inputs; see there.
        self.loan, self.arrived, self.give_back = self._space.loan, self._space.arrived, self._space.give_back
        #: The accounts: to whom connections belong, and what they hold.
        self.accounts = Accounts(arenas, self._arena.small_byte_size, self._arena.shared_byte_size)
        #: A request's responses that were taken are acknowledged when they are so many bytes.
        self._acknowledged_at = options.expert.max_ahead // 4
        #: Workers to be flushed when this iteration of the loop ends; and whether anything is to be done then.
        self._dirty: list[WorkerLink] = []
        self._ends_iteration = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def load(self) -> tuple[int, float]:
        """Returns how many requests are in flight, and which fraction (0 to 1) of the connected workers runs a model now."""
        states = [worker.page.state[0] for worker in self._routing.workers.values() if not worker.closed]
        return len(self._in_flight), states.count(WorkerState.EXECUTING) / max(1, len(states))

    # ------------------------------------------------------------------------------------------------ sending

    def send(self, request: InFlight, state: ModelState | None = None) -> None:
        """Sends a request to a worker at once, or later if the request must wait.

        After ``send`` has returned, ``request.completed`` is called with each answer, unless the request is cancelled. The
        submitter gives ``request.leases`` back, even after an exception.
        ``state``: the state of the request's model. If it is None, the submitter looks the state up.
        Raises Unavailable if too many requests are in flight, or if the front takes no new requests (``refuse``). If ``send``
        raises any exception, the request gets no answer.
        """
        everything = self._in_flight
        try:
            if len(everything) >= self._max_in_flight:
                raise self._too_many(request)
            everything[request.record.request_id] = request
            if self._timeout:
                request.sent_at = self._loop.time()
                self._start_timer()
            if (self._throttle.full or self._throttle.lines) and self._throttle.holds(request):
                self._throttle.add(request, self._loop.time())
                return self._start_timer()
            workers = self._routing.remembered.get(request.numbered)
            if workers is None:
                self._route(request, state)
            else:
                self._put(workers[0] if len(workers) == 1 else min(workers, key=load), request)
        except BaseException:
            self._finish(request)
            raise

    def _too_many(self, request: InFlight) -> Unavailable:
        if self._refuses:
            self.refusals.note(request.prepared.model, Refusal.DRAINING)
            return Unavailable("the server is draining: it takes no new requests")
        self.refusals.note(request.prepared.model, Refusal.IN_FLIGHT)
        return Unavailable(f"{len(self._in_flight)} requests are in flight, at most {self._max_in_flight} are allowed")

    def refuse(self, refuses: bool) -> None:
        """Sets whether new requests are refused. Requests in flight go on."""
        self._refuses = refuses
        # It is the limit that each request is compared with anyhow.
        self._max_in_flight = 0 if refuses else self._most_in_flight

    def _route(self, request: InFlight, state: ModelState | None = None) -> None:
        try:
            # Where a sequence is may be known to its client, by another front, earlier than here.
            if request.record.sequence_id and self._is_behind():
                worker, self._unread = None, True
            else:
                worker = self._routing.find(request, state)
        except ServingError as error:
            self._loop.call_soon(self._fail, request, error)
            return
        if worker is not None:
            self._put(worker, request)
        else:
            self._waiting[request] = self._loop.time() + self._worker_wait
            self._start_timer()

    def _send_again(self, request: InFlight) -> None:
        """Sends a request that had to wait or whose worker is gone. If sending fails, the request is answered with an error."""
        request.recalled = False
        try:
            self._route(request)
            if request.cancelled and request.worker is not None:
                self._take_back(request)
        except ServingError as error:
            self._fail(request, error)
        except Exception:
            _log.exception("a request for model '%s' could not be sent", request.prepared.model)
            self._fail(request, Internal(DEFECT))

    def _send_waiting(self) -> None:
        """Sends the waiting requests for which there is a worker now, in the order in which they arrived."""
        waiting, self._waiting = self._waiting, {}
        for request, gives_up in waiting.items():
            if request.record.request_id in self._in_flight:
                self._send_again(request)
                if request in self._waiting:
                    self._waiting[request] = gives_up  # it waits since it came, not since we looked

    def look_again(self) -> None:
        """Sends the waiting requests, if this front has read all records that the supervisor has sent.

        The requests wait because an unread record may say that their model is now on another worker.
        """
        if (self._refused or self._unread) and not self._is_behind():
            refused, self._refused, self._unread = self._refused, {}, False
            for request, (worker, answer) in refused.items():
                self._route_anew(worker, request, answer)
            self._send_waiting()

    def cancel(self, request: InFlight) -> None:
        """Cancels a request. The submitter gives the request no answer afterwards. May be called again."""
        number = request.record.request_id
        if request.cancelled or (number and number not in self._in_flight):
            return
        request.cancelled, request.recalled = True, False
        if not number:
            return  # it waits for room, or was never sent
        if request.worker is not None:
            self._take_back(request)
        elif not request.record.sequence_id:
            self._finish(request)
        # A step of a sequence that waits here goes to its worker when it is its turn, and is cancelled there: that ends the
        # sequence. If it were only left out, those behind it would run on another state.

    def _take_back(self, request: InFlight) -> None:
        assert request.worker is not None
        request.worker.lane.cancel(request.record.request_id)
        self._flush_later(request.worker)

    def _fail(self, request: InFlight, error: ServingError) -> None:
        """Ends a request and gives its leases back. If the request was not cancelled, the client gets ``error`` as answer."""
        if not request.cancelled and request.record.request_id in self._in_flight:
            request.fail(error)
        self._finish(request)

    def _finish(self, request: InFlight) -> None:
        """Removes a request from those in flight, and gives its leases back."""
        self._in_flight.pop(request.record.request_id, None)
        for lease in request.leases:
            self.give_back(lease)

    # --------------------------------------------------------------------------------------- records leave for workers

    def _put(self, worker: WorkerLink, request: InFlight) -> None:
        """Puts a request on the lane of a worker. After an exception the request is on no lane."""
        record, numbered, in_flight = request.record, request.numbered, worker.in_flight
        request.worker = worker
        in_flight[record.request_id] = request
        try:
            for lease in request.leases:
                if lease.place.segment not in worker.lane.announced:
                    worker.lane.announce(lease.place.segment)
            if request.context is not None:
                worker.lane.submit_traced(TraceContext(record.request_id, *request.context), record, numbered)
                if not worker.dirty:
                    self._flush_later(worker)
                return
            if len(in_flight) > 1 or worker.writing:
                worker.lane.submit(record, numbered)
                if not worker.dirty:
                    self._flush_later(worker)
                return
            if not worker.lane.submit_at_once(record, numbered):
                self._flush(worker)
        except BaseException:
            # Nothing of it is on the lane: what is queued there is sent, later if not now.
            in_flight.pop(record.request_id, None)
            request.worker = None
            raise
        if self._busy_poll is not None and not self._ends_iteration:
            self._ends_iteration = True
            self._loop.call_soon(self._end_iteration)

    def _flush_later(self, worker: WorkerLink) -> None:
        # In one datagram: workers mostly run its requests as one batch.
        if not worker.dirty:
            worker.dirty = True
            self._dirty.append(worker)
            if not self._ends_iteration:
                self._ends_iteration = True
                self._loop.call_soon(self._end_iteration)

    def _flush_all_later(self) -> None:
        for worker in self._routing.workers.values():
            if not worker.closed:
                self._flush_later(worker)

    def _end_iteration(self) -> None:
        self._ends_iteration = False
        if self._dirty:
            dirty, self._dirty = self._dirty, []
            for worker in dirty:
                worker.dirty = False
                if not worker.closed:
                    self._flush(worker)
        busy_poll, in_flight = self._busy_poll, len(self._in_flight)
        if busy_poll is None:
            return
        if in_flight == 1:
            for request in self._in_flight.values():
                # A large one takes the worker longer than waking up, and it wants the processor.
                if request.worker is not None and not request.leases:
                    busy_poll.look(request.worker.lane.ready, self._look, request.worker)
                break
        elif in_flight:
            busy_poll.flushed()

    def _look(self, worker: WorkerLink) -> bool:
        if not worker.closed:
            self._receive(worker)
        return bool(worker.in_flight) and not worker.closed

    def _flush(self, worker: WorkerLink) -> None:
        try:
            if not worker.lane.flush():
                if not worker.writing:
                    self._loop.add_writer(worker.lane.fileno(), self._flush, worker)
                    worker.writing = True
            elif worker.writing:
                worker.writing = False
                self._loop.remove_writer(worker.lane.fileno())
        except Exception:
            # Not raised: the lane holds other requests as well.
            _log.exception("the lane of worker %d could not be written to; it is tried again", worker.incarnation)
            self._loop.call_later(_AGAIN_SECONDS, self._flush_later, worker)

    # ------------------------------------------------------------------------------------------------ answers

    def _receive(self, worker: WorkerLink) -> bool:
        try:
            answers = worker.lane.receive()
        except ChannelClosed:
            self._close_lane(worker)
            if not worker.lane.agreed:
                # The worker could not take it, and has read nothing.
                orphans, worker.in_flight = worker.in_flight, {}
                for orphan in orphans.values():
                    orphan.worker = None
                    self._send_again(orphan)
                self._on_untaken(worker.incarnation)
            return False
        except InvalidArgument as error:
            # A worker that sends garbage is not trusted with anything more; the supervisor sees it hang or exit.
            _log.error("closing the lane of worker %d: %s", worker.incarnation, error.message)
            self._close_lane(worker)
            self._give_up(worker, Internal("the worker's answer could not be understood"))
            return False
        if worker.lane.unsaid:
            self._flush_later(worker)
        if not answers:
            return answers is not None
        if self._busy_poll is not None:
            self._busy_poll.answered()
        in_flight = worker.in_flight
        for prepared, record in answers:
            if record.code or not prepared.final:
                self._take(worker, prepared, record)
                continue
            request = in_flight.pop(record.request_id, None)
            if record.lease is not None:
                self._hold(worker, record.lease, request, record)
                if request is None or request.cancelled:
                    self.release(worker.lane, record.lease)
            if request is None:
                continue
            del self._in_flight[record.request_id]
            if not request.cancelled:
                try:
                    request.completed(prepared, record, worker.lane)
                except Exception:
                    request.fail_delivery()
                    if record.lease is not None:
                        self.release(worker.lane, record.lease)
            for lease in request.leases:
                self.give_back(lease)
        return True

    def _take(self, worker: WorkerLink, prepared: PreparedAnswer, record: AnswerRecord) -> None:
        take = worker.in_flight.pop if prepared.final else worker.in_flight.get
        request, lease = take(record.request_id, None), record.lease
        if lease is not None:
            self._hold(worker, lease, request, record)
        if request is not None and request.recalled and record.code == Cancelled.code:
            # It was called back and had not begun.
            request.recalled, request.worker = False, None
            self._throttle.add(request, self._loop.time())
            self._start_timer()
            return
        if (
            record.code
            and request is not None
            and request.sequence is None
            and request.may_be_elsewhere(record.code, record.message)
        ):
            # Its worker has its model no more, because that has moved to another one meanwhile: that is no answer.
            request.worker = None
            self._refused[request] = worker, record
            self.look_again()
            return
        if request is not None and not request.cancelled:
            request.answered = True
            if request.sent_at and not prepared.final:
                # It has as long for its next response.
                request.sent_at = self._loop.time()
                self._in_flight[record.request_id] = self._in_flight.pop(record.request_id)
            try:
                request.completed(prepared, record, worker.lane)
                lease = None  # its taker's
            except Exception:
                request.fail_delivery()
        if lease is not None:
            self.release(worker.lane, lease)
        if request is not None and prepared.final:
            self._finish(request)

    def _route_anew(self, worker: WorkerLink, request: InFlight, answer: AnswerRecord) -> None:
        if request.record.request_id not in self._in_flight:
            return  # cancelled meanwhile
        state = self._routing.state_of(request.prepared)
        if state is not None and worker.incarnation not in state.workers:
            self._send_again(request)
        else:
            self._fail(request, from_code(answer.code, answer.message))

    def _hold(self, worker: WorkerLink, key: LeaseKey, request: InFlight | None, record: AnswerRecord) -> None:
        for concerned in self._throttle.hold(worker, key, request, record):
            self._recall(concerned)

    def _recall(self, concerned: Callable[[InFlight], bool]) -> None:
        """Asks workers to withdraw the requests for which ``concerned`` returns True."""
        for worker in self._routing.workers.values():
            for request_id, request in worker.in_flight.items():
                if not (request.cancelled or request.recalled) and concerned(request) and self._may_come_back(request):
                    request.recalled = True
                    worker.lane.cancel(request_id)
        self._flush_all_later()

    def _may_come_back(self, request: InFlight) -> bool:
        state = self._routing.state_of(request.prepared)
        return state is not None and state.repeatable and not state.sticky and not state.streams

    def release(self, lane: SubmitterLane, key: LeaseKey) -> None:
        """Gives the lease ``key`` of an answer back over ``lane``. May be called again for the same lease."""
        left = self._throttle.leave(lane, key)
        if left is None:
            return
        lane.release(key)
        account, worker = left
        if not worker.dirty and not worker.closed:
            self._flush_later(worker)
        if self._throttle.lines:
            for request in self._throttle.let_go(account):
                self._send_again(request)

    def taken(self, lane: SubmitterLane, response: AnswerRecord) -> None:
        """Gives back over ``lane`` the memory of a response that was sent to its client. The worker may then send more."""
        if response.lease is not None:
            self.release(lane, response.lease)
        request = self._in_flight.get(response.request_id)
        if request is None or request.worker is None:
            return
        request.taken += response_byte_size(response.contents)
        if request.taken >= self._acknowledged_at:
            lane.taken(response.request_id, request.taken)
            request.taken = 0
            self._flush_later(request.worker)

    # ------------------------------------------------------------------------------------------------ room

    def wait_for_room(
        self, byte_size: int, on_lease: OnLease, model: str = "", account: Account | None = None, arriving: bool = False
    ) -> None:
        """Puts a client's request into the queue of requests that wait for memory in this front's arena.

        Args:
          byte_size: the number of bytes that the request needs.
          on_lease: called once, later, within about ``arenas.wait`` seconds. Its argument is a lease or an error. The error is
            Unavailable, or InvalidArgument if the arena could never lend so many bytes.
          model: the name of the model, under which a refusal is counted, or "" if it is not known.
          account: counts the memory for a connection. If it is None, the memory is not counted.
          arriving: True if the request's body is incomplete. Incomplete medium and large bodies share a part of the arena.
        """
        self._space.wait(byte_size, self.refusals.of_room(model, on_lease), self._loop.time(), account, arriving)
        self._start_timer()

    # -------------------------------------------------------------------------------------- workers and models

    def open_lane(self, opened: LaneOpened, fds: list[int]) -> None:
        """Opens a lane to a worker. Closes an earlier lane to the same worker.

        ``fds``: three descriptors, of the lane's socket and of two shared pages in which the worker shows its state and its
        sequences. The submitter closes all three. If one is missing, or a page cannot be mapped now, no lane is opened and
        ``on_untaken``, an argument of the constructor, is called.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(descriptors.close, fds)
            try:
                sequences = undo.enter_context(contextlib.closing(SequencePage.attach(fds.pop(2))))
                page = undo.enter_context(contextlib.closing(StatusPage.attach(fds.pop(1))))
            except (IndexError, Unavailable) as error:
                if self._seldom.is_due(opened.device):
                    why = error if isinstance(error, Unavailable) else "no descriptor is left"
                    _log.error("the lane to the worker on %s cannot be opened: %s", opened.device, why)
                self._on_untaken(opened.peer)
                return
            undo.pop_all()
        if (former := self._routing.workers.get(opened.peer)) is not None:
            former.shut()
        lane = SubmitterLane(socket.socket(fileno=fds[0]), self._arena, writable=opened.device.startswith("cuda:"))
        worker = WorkerLink(opened.peer, opened.device, lane, page, sequences)
        self._routing.add(worker)
        self._loop.add_reader(lane.fileno(), self._receive, worker)
        self._send_waiting()

    def model_changed(self, state: ModelState | ModelGone) -> None:
        """Stores ``state``, or removes the model version if ``state`` is ModelGone. Then tries to send waiting requests."""
        self._routing.model_changed(state)
        self._send_waiting()
        self._model_changed.set()
        self._model_changed = asyncio.Event()

    async def loaded(self, model: str, version: int) -> None:
        """Waits until a model version is not being loaded. Raises Unavailable after ``requests.worker_wait`` seconds."""
        try:
            async with asyncio.timeout(self._worker_wait):
                while self.is_loading(model, version):
                    await self._model_changed.wait()
        except TimeoutError:
            self.refusals.note(model, Refusal.NO_WORKER)
            raise self._still_loading(model) from None

    def _still_loading(self, model: str) -> Unavailable:
        return Unavailable(f"model '{model}' is still being loaded after {self._worker_wait:g} s; ask again later")

    # ---------------------------------------------------------------------------------------- a worker's death

    def fence(self, fenced: WorkerFenced) -> None:
        """Sends the unanswered requests of a dead worker to other workers. Fails each request that cannot safely run again."""
        worker = self._routing.workers.get(fenced.worker)
        if worker is None:
            return
        # What it answered before is all in the socket.
        while not worker.closed and self._receive(worker):
            pass
        self._close_lane(worker)
        executing = {request for submitter, request in worker.page.executing() if submitter == self._incarnation}
        lost = self._routing.bury(worker)
        orphans, worker.in_flight = worker.in_flight, {}
        models = Counter(request.prepared.model for number, request in orphans.items() if number in executing)
        level = logging.ERROR if models else logging.WARNING if orphans else logging.INFO
        running = ", ".join(f"{count} of model '{name}'" for name, count in models.most_common()) or "none of them"
        said = "the worker on %s is gone with %d requests; it was executing %s"
        _log.log(level, said, worker.device, len(orphans), running)
        for number, request in orphans.items():
            self._run_again(request, request in lost, number in executing)
        # They came before others that waited for the fence.
        self._waiting = dict(sorted(self._waiting.items(), key=lambda each: each[0].record.request_id))
        # What belongs to its sequences may have waited for that.
        self._send_waiting()
        worker.shut()

    def _run_again(self, request: InFlight, is_lost: bool, was_executing: bool) -> None:
        if request.cancelled:
            self._finish(request)
            return
        state = self._routing.state_of(request.prepared)
        streams, sticky = (False, False) if state is None else (state.streams, state.sticky)
        # A model with several responses may have begun it and have gone on to others.
        error = request.after_end("the worker process died", was_executing or streams, not (was_executing and sticky))
        # A worker notes that it runs a START before it notes the sequence on its page, and may die in between.
        if is_lost or (was_executing and sticky and request.record.sequence_id):
            error = lost_sequence(request.prepared.model, request.record.sequence_id)
        if error is None:
            self._send_again(request)
        else:
            self._fail(request, error)

    def _close_lane(self, worker: WorkerLink) -> None:
        """Stops sending requests to a worker and receiving answers from it."""
        if not worker.closed:
            self._routing.close(worker)
            self._loop.remove_reader(worker.lane.fileno())
            if worker.writing:
                self._loop.remove_writer(worker.lane.fileno())
                worker.writing = False

    def _give_up(self, worker: WorkerLink, error: ServingError) -> None:
        # Their memory is kept until the process is gone, because it might still write.
        for request in list(worker.in_flight.values()):
            if not request.cancelled:
                request.cancelled = True
                request.fail(error)

    # ------------------------------------------------------------------------------------------------ timeouts

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_TIMER_SECONDS, self._time_out)

    def _time_out(self) -> None:
        self._timer = None
        now = self._loop.time()
        late = self._without_worker_since(now)
        for request in late:
            if not request.cancelled:
                self.refusals.note(request.prepared.model, Refusal.NO_WORKER)
            self._fail(request, self._no_worker(request.prepared))
        for request, error in self._throttle.expired(now):
            if request.cancelled:
                self._send_again(request)
            else:
                self.refusals.note(request.prepared.model, Refusal.ANSWERS_HELD)
                self._fail(request, error)
                late.append(request)
        for request in self._routing.steps_behind(late):
            state = self._routing.state_of(request.prepared)
            if state is None or state.sticky:
                why = f"a request of sequence {request.record.sequence_id} before this one did not run"
                self._fail(request, Cancelled(why))
        for request in self._throttle.let_all_go():
            self._send_again(request)
        room_wanted = self._space.expire(now)
        if self._timeout:
            self._time_out_answers(now - self._timeout)
        if self._waiting or self._throttle.lines or room_wanted or (self._timeout and self._in_flight):
            self._start_timer()

    def _without_worker_since(self, now: float) -> list[InFlight]:
        late: list[InFlight] = []
        for request, gives_up in list(self._waiting.items()):
            ended = request.record.request_id not in self._in_flight
            if gives_up <= now or ended:
                del self._waiting[request]
                if not ended:
                    late.append(request)
        return late

    def _no_worker(self, prepared: PreparedRequest) -> Unavailable:
        """Returns the error for a request that has waited too long for a worker."""
        gpu = self._routing.gpu_of(prepared)
        where = f" on GPU {number_of(gpu)}, where its regions are," if gpu else ""
        state = self._routing.state_of(prepared)
        if state is not None and state.state == "LOADING":
            return self._still_loading(prepared.model)
        return Unavailable(f"no worker was ready for model '{prepared.model}'{where} within {self._worker_wait:g} s")

    def _time_out_answers(self, sent_before: float) -> None:
        # In order of arrival, and all have the same timeout: the first that may stay ends the walk.
        late = takewhile(lambda request: request.sent_at <= sent_before, self._in_flight.values())
        for request in [request for request in late if not request.cancelled]:
            self.refusals.note(request.prepared.model, Refusal.NO_ANSWER)
            request.fail(Unavailable(f"no answer within {self._timeout:g} s"))
            self.cancel(request)

    # ------------------------------------------------------------------------------------------------ the whole

    def in_flight(self) -> int:
        """Returns how many requests were accepted and have no final answer yet."""
        return len(self._in_flight)

    def statistics(self) -> dict[str, int]:
        """Returns counts for operators: requests in flight and waiting, prepared requests, leases of answers, arena memory."""
        waiting = {"waiting_for_worker": len(self._waiting), "throttled": len(self._throttle)}
        prepared = {"prepared_numbered": self.numbers.assigned, "prepared_evicted": self.numbers.evicted}
        held = {"answers_held": self._throttle.held, **self._arena.statistics()}
        return {"in_flight": len(self._in_flight), **waiting, **prepared, **held}

    def close(self) -> None:
        """Closes the lanes to all workers and the request arena. Requests in flight get no answer."""
        if self._timer is not None:
            self._timer.cancel()
        self.refusals.close()
        for worker in self._routing.workers.values():
            self._close_lane(worker)
            worker.shut()
        self._routing.workers.clear()
        held = sum(len(request.leases) for request in self._in_flight.values())
        if forgotten := self._arena.statistics()["leases"] - held:
            _log.warning("%d leases of the request arena belong to no request and were never given back", forgotten)
        self._arena.close()
