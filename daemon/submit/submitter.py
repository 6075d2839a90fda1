"""Requests in flight: sending, waiting, and what happens when a worker dies.

The numbered story of one request:

1. ``send`` notes it under its id; ``choice`` says which worker gets it, and ``sending`` puts its record on that worker's lane.
2. Where there is no worker it waits, until there is one or for too long.
3. The Completion comes back on the lane; the request (``pending``) gets it, with the lane its tensors lie in.
4. Its owner calls ``release`` when the answer's bytes have left.

What a request takes (its place in flight, its leases, its place on a lane) is the submitter's from ``send`` until its end, also
where sending it fails; and what fails is one request: those beside it go on.

A lane's end-of-file only stops the sending. The dead worker's requests run elsewhere when the supervisor says it is fenced,
because until then it might still write. Each request gets exactly one final answer, and this is the only place that gives it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, takewhile

from config.options import Options
from daemon.control.refusals import OnRefusal, Refusals, uncounted
from daemon.submit.accounts import Account, Accounts, part
from daemon.submit.arena_space import ArenaSpace, OnLease
from daemon.submit.busy_poll import BusyPoll
from daemon.submit.choice import Choice, load
from daemon.submit.held_back import HeldBack
from daemon.submit.lent import Lent
from daemon.submit.model_table import ModelTable
from daemon.submit.pending import Calling, OnCompletion, Pending, Worker
from daemon.submit.sending import Sending
from daemon.submit.workerless import Workerless
from shm.arena import Arena, Lease, LeaseKey
from shm.channel import ChannelClosed
from shm.control_records import LaneOpened, ModelGone, ModelState, RegionPlace, WorkerFenced
from shm.errors import DEFECT, Cancelled, Internal, InvalidArgument, ServingError, Unavailable
from shm.forms import Forms, OnMint
from shm.lane import SubmitterLane
from shm.messages import Completion, Submit
from shm.refusals import Refusal
from shm.sequence_page import SequencePage
from shm.status_page import StatusPage

_log = logging.getLogger(__name__)

_SWEEP_SECONDS = 0.1


class Submitter:
    """All requests of one front. Owns the request arena."""

    def __init__(
        self,
        incarnation: int,
        options: Options,
        table: ModelTable,
        row: int = 0,
        counted: OnRefusal = uncounted,
        minted: OnMint | None = None,
    ) -> None:
        """
        Args:
          row: this front's place among those of its protocol.
          counted: hears of every request that is refused.
          minted: hears of every form that gets a number.
        """
        self._incarnation = incarnation
        self._max_in_flight = options.requests.max_in_flight
        self._timeout = options.requests.timeout
        arenas = options.arenas
        #: Tensors up to this size travel inside their record.
        self.inline_byte_size = arenas.inline_byte_size
        #: The kinds of requests that its clients repeat.
        self.forms: Forms[Submit] = Forms(minted, options.requests.max_forms)
        #: An id for the next request; never used again.
        self.next_id: Callable[[], int] = count(1).__next__
        self._arena = Arena(arenas.byte_size, arenas.max_byte_size, arenas.keep_byte_size)
        #: All that are in flight, in order of arrival.
        self._pending: dict[int, Pending] = {}
        self._lent = Lent()
        self._loop = asyncio.get_running_loop()
        self.refusals = Refusals(self._loop, counted)
        self._busy_poll = BusyPoll(self._loop, options.lanes.spin_us * 1000, self._pending)
        self._choice = Choice(table, row, self._pending, options.requests.max_sequences)
        self._workerless = Workerless(self._pending, self._choice, options.requests.worker_wait)
        self._sending = Sending(self._loop, self._busy_poll, self._pending, self._readable)
        # Workers that still map a segment that was closed keep its pages: they are told.
        closed = partial(self._sending.flush_all_later, self._choice.workers.values())
        self._space = ArenaSpace(self._arena, arenas.wait, part(arenas, arenas.arriving_share), closed)
        #: Room for inputs; see there.
        self.loan, self.arrived, self.give_back = self._space.loan, self._space.arrived, self._space.give_back
        #: Whom the connections belong to, and what they hold.
        self.accounts = Accounts(arenas, self._arena.small_byte_size, self._arena.shared_byte_size)
        self._held_back = HeldBack(self._pending, arenas.wait, self._lent, self._choice, self._sending)
        self._sweeper: asyncio.TimerHandle | None = None

    # -------------------------------------------------------------------------------------------- requests

    def submit(
        self, record: Submit, leases: Sequence[Lease], on_completion: OnCompletion, account: Account | None = None
    ) -> None:
        """Sends a request whose inputs are in place; ``on_completion`` is called exactly once with ``final``, never from here.

        Raises: Unavailable: too many requests are in flight. Or whatever is wrong: nothing was sent then, and no callback comes.
          The leases are the submitter's from now on, also then.
        """
        self.send(Calling(on_completion, record=record, leases=leases, holder=account))

    def send(self, pending: Pending) -> None:
        """Sends a request that knows itself what to do with its answer. Raises as ``submit``."""
        everything = self._pending
        try:
            if len(everything) >= (limit := self._max_in_flight):
                self.refusals.note(pending.submit.model, Refusal.IN_FLIGHT)
                raise Unavailable(f"{len(everything)} requests are in flight, at most {limit} are allowed")
            everything[pending.record.request_id] = pending
            if self._timeout:
                pending.sent_at = self._loop.time()
                self._sweep_later()
            if (self._lent.full or self._held_back.lines) and self._held_back.holds(pending):
                self._held_back.add(pending, self._loop.time())
                return self._sweep_later()
            workers = self._choice.remembered.get(pending.form)
            if workers is None:
                self._dispatch(pending)
            else:
                self._sending.send(workers[0] if len(workers) == 1 else min(workers, key=load), pending)
        except BaseException:
            everything.pop(pending.record.request_id, None)
            self._give_back(pending)
            raise

    def cancel(self, request_id: int) -> None:
        """Nobody waits for it any more: no callback will come. Its memory is given back when its worker is done with it."""
        pending = self._pending.get(request_id)
        if pending is None or pending.cancelled:
            return
        pending.cancelled, pending.recalled = True, False
        if pending.worker is not None:
            pending.worker.lane.cancel(request_id)
            self._sending.flush_later(pending.worker)
        else:
            self._finish(pending)

    def release(self, lane: SubmitterLane, key: LeaseKey) -> None:
        """The bytes of an answer have left. Harmless where it was said before."""
        if (account := self._lent.take_back(lane, key)) is None:
            return
        for worker in self._choice.workers.values():
            if worker.lane is lane:
                self._sending.flush_later(worker)
        if self._held_back.lines:
            self._held_back.let_go(account, self._send_again)

    def in_flight(self) -> int:
        """Requests accepted and not yet answered."""
        return len(self._pending)

    def statistics(self) -> dict[str, int]:
        """Counts for operators."""
        waiting = {"waiting_for_worker": len(self._workerless), "held_back": len(self._held_back)}
        forms = {"forms_minted": self.forms.minted, "forms_evicted": self.forms.evicted}
        held = {"answers_held": len(self._lent), **self._arena.statistics()}
        return {"in_flight": len(self._pending), **waiting, **forms, **held}

    # ------------------------------------------------------------------------------------------------ room

    def wait_for_room(
        self, byte_size: int, on_lease: OnLease, model: str = "", account: Account | None = None, arriving: bool = False
    ) -> None:
        """Calls back with a lease, or with Unavailable when there is no room for ``arenas.wait`` seconds; ``model``: if known."""
        self._space.wait(byte_size, self.refusals.of_room(model, on_lease), self._loop.time(), account, arriving)
        self._sweep_later()

    # -------------------------------------------------------------------------------------- workers and models

    def open_lane(self, opened: LaneOpened, fds: list[int]) -> None:
        """A worker can be reached. Takes the descriptors: the lane's socket, the status page and the sequence page."""
        lane = SubmitterLane(socket.socket(fileno=fds[0]), self._arena, writable=opened.device.startswith("cuda:"))
        worker = Worker(opened.peer, opened.device, lane, StatusPage.attach(fds[1]), SequencePage.attach(fds[2]))
        self._choice.add(worker)
        self._loop.add_reader(worker.lane.fileno(), self._readable, worker)
        self._workerless.retry(self._send_again)

    def model_changed(self, state: ModelState | ModelGone) -> None:
        """The table changed: who waits may have a worker now, or a reason to give up."""
        self._choice.model_changed(state)
        self._workerless.retry(self._send_again)

    def region_placed(self, place: RegionPlace) -> None:
        """Requests that name the region go to that device from now on."""
        self._choice.region_placed(place)

    def fence(self, fenced: WorkerFenced) -> None:
        """That process is certainly gone: run its requests elsewhere."""
        worker = self._choice.workers.get(fenced.worker)
        if worker is None:
            return
        # What it answered before it died is still in the socket, all of it: the process is gone.
        while not worker.closed and self._readable(worker):
            pass
        if not worker.closed:
            self._close(worker)
        executing = {request for submitter, request in worker.page.executing() if submitter == self._incarnation}
        lost = self._choice.bury(worker)
        orphans, worker.in_flight = worker.in_flight, {}
        models = Counter(pending.submit.model for number, pending in orphans.items() if number in executing)
        _log.log(
            logging.ERROR if models else logging.WARNING,
            "the worker on %s is gone with %d requests; it was executing %s",
            worker.device,
            len(orphans),
            ", ".join(f"{count} of model '{name}'" for name, count in models.most_common()) or "none of them",
        )
        for number, pending in orphans.items():
            self._run_again(pending, lost.get(number), number in executing)
        # What belongs to its sequences may have waited for that.
        self._workerless.retry(self._send_again)
        worker.shut()

    def close(self) -> None:
        """Closes lanes and arena; what is in flight gets no answer."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.refusals.close()
        for worker in self._choice.workers.values():
            if not worker.closed:
                self._close(worker)
            worker.shut()
        self._choice.workers.clear()
        held = sum(len(pending.leases) for pending in self._pending.values())
        if forgotten := self._arena.statistics()["leases"] - held:
            _log.warning("%d leases of the request arena belong to no request and were never given back", forgotten)
        self._arena.close()

    def _run_again(self, pending: Pending, lost: ServingError | None, was_executing: bool) -> None:
        if pending.cancelled:
            self._finish(pending)
        elif error := lost or pending.orphaned(was_executing, self._choice.state_of(pending.submit)):
            self._fail(pending, error)
        else:
            self._send_again(pending)

    # ----------------------------------------------------------------------------------------------- sending

    def _dispatch(self, pending: Pending) -> None:
        """Sends to the least loaded worker that has the model, or waits for one."""
        try:
            worker = self._choice.find(pending)
        except ServingError as error:
            self._loop.call_soon(self._fail, pending, error)
            return
        if worker is not None:
            self._sending.send(worker, pending)
        else:
            self._workerless.add(pending, self._loop.time())
            self._sweep_later()

    def _send_again(self, pending: Pending) -> None:
        """Dispatches a request whose sender is not there any more: an error is its answer."""
        pending.recalled = False
        try:
            self._dispatch(pending)
        except ServingError as error:
            self._fail(pending, error)
        except Exception:
            _log.exception("a request for model '%s' could not be sent", pending.submit.model)
            self._fail(pending, Internal(DEFECT))

    # ---------------------------------------------------------------------------------------------- receiving

    def _readable(self, worker: Worker) -> bool:
        """Takes a datagram; whether there was one. Were there more, or an end of file, the loop would say so again."""
        try:
            answers = worker.lane.receive()
        except ChannelClosed:
            self._close(worker)
            return False
        except InvalidArgument as error:
            # A worker that sends garbage is not trusted with anything more; the supervisor sees it hang or exit.
            _log.error("closing the lane of worker %d: %s", worker.incarnation, error.message)
            self._close(worker)
            self._give_up(worker, Internal("the worker's answer could not be understood"))
            return False
        if worker.lane.waiting:
            self._sending.flush_later(worker)  # what the lane has to say itself
        if not answers:
            return answers is not None
        self._busy_poll.answered()
        in_flight = worker.in_flight
        for template, own in answers:
            if own is None:
                self._complete(worker, template)
                continue
            pending = in_flight.pop(own.request_id, None)
            if own.lease is not None:
                if self._lent.note(worker.lane, own.lease, pending, own.contents):
                    self._held_back.filled(pending)
                if pending is None or pending.cancelled:
                    self.release(worker.lane, own.lease)
            if pending is None:
                continue
            del self._pending[own.request_id]
            if not pending.cancelled:
                try:
                    pending.formed(template, own)
                except Exception:
                    pending.fail_delivery()
                    if own.lease is not None:
                        self.release(worker.lane, own.lease)
            if pending.leases:
                self._give_back(pending)
        return True

    def _complete(self, worker: Worker, completion: Completion) -> None:
        take, lease = worker.in_flight.pop if completion.final else worker.in_flight.get, completion.lease
        pending = take(completion.request_id, None)
        if lease is not None:
            places = [tensor.place for tensor in completion.outputs]
            if self._lent.note(worker.lane, lease, pending, places):
                self._held_back.filled(pending)
        if pending is not None and pending.recalled and completion.code == Cancelled.code:
            self._held_back.came_back(pending, self._loop.time())
            self._sweep_later()
            return
        if pending is not None and not pending.cancelled:
            pending.answered = True
            if pending.tell(completion, worker.lane):
                lease = None  # its taker's
        if lease is not None:
            self.release(worker.lane, lease)
        if pending is not None and completion.final:
            self._finish(pending)

    def _give_up(self, worker: Worker, error: ServingError) -> None:
        """Answers what is in flight there. The process lives and may still read: memory comes back when it is fenced."""
        for pending in list(worker.in_flight.values()):
            if not pending.cancelled:
                pending.cancelled = True
                pending.tell(Completion(pending.record.request_id, error.code, error.message), None)

    def _close(self, worker: Worker) -> None:
        self._choice.close(worker)
        self._loop.remove_reader(worker.lane.fileno())
        self._sending.stop(worker)

    # --------------------------------------------------------------------------------------------- finishing

    def _fail(self, pending: Pending, error: ServingError) -> None:
        if not pending.cancelled and pending.record.request_id in self._pending:
            pending.tell(Completion(pending.record.request_id, error.code, error.message), None)
        self._finish(pending)

    def _finish(self, pending: Pending) -> None:
        """The one place where a request ends."""
        if self._pending.pop(pending.record.request_id, None) is None:
            return
        self._give_back(pending)

    def _give_back(self, pending: Pending) -> None:
        for lease in pending.leases:
            self.give_back(lease)

    # ------------------------------------------------------------------------------------------------ bounds

    def _sweep_later(self) -> None:
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(_SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        """Ends what waited too long: for a worker, for room, for an answer."""
        self._sweeper = None
        now = self._loop.time()
        for pending in self._workerless.expired(now):
            self.refusals.note(pending.submit.model, Refusal.NO_WORKER)
            self._fail(pending, self._workerless.refusal(pending.submit))
        for pending, error in self._held_back.expired(now):
            self.refusals.note(pending.submit.model, Refusal.ANSWERS_HELD)
            self._fail(pending, error)
        self._held_back.let_all_go(self._send_again)
        room_wanted = self._space.expire(now)
        if self._timeout:
            self._sweep_timeouts(now - self._timeout)
        if self._workerless or self._held_back.lines or room_wanted or (self._timeout and self._pending):
            self._sweep_later()

    def _sweep_timeouts(self, sent_before: float) -> None:
        # In order of arrival, and all have the same timeout: the first that may stay ends the walk.
        late = takewhile(lambda pending: pending.sent_at <= sent_before, self._pending.values())
        for pending in [pending for pending in late if not pending.cancelled]:
            self.refusals.note(pending.submit.model, Refusal.NO_ANSWER)
            error = Unavailable(f"no answer within {self._timeout:g} s")
            pending.tell(Completion(pending.record.request_id, error.code, error.message), None)
            self.cancel(pending.record.request_id)
