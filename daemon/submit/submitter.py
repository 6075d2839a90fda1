"""Requests in flight: sending, waiting, and what happens when a worker dies.

The numbered story of one request:

1. ``send`` notes it under its id; ``choice`` says which worker gets it, and ``sending`` puts its record on that worker's lane.
2. Where there is no worker it waits, until there is one or for too long (``dispatch``, ``sweeper``).
3. The answer comes back on the lane (``answers``); the request (``pending``) gets it, with the lane its tensors lie in.
4. Its owner calls ``release`` when the answer's bytes have left.

What a request takes (its place in flight, its leases, its place on a lane) is the submitter's from ``send`` until its end, also
where sending it fails; and what fails is one request: those beside it go on.

A lane's end-of-file only stops the sending. The dead worker's requests run elsewhere when the supervisor says it is fenced,
because until then it might still write. Each request gets exactly one final answer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, takewhile

from tensord.config.options import Options
from tensord.daemon.control.refusals import OnRefusal, Refusals, uncounted
from tensord.daemon.submit.accounts import Account, Accounts, part
from tensord.daemon.submit.answers import Answers
from tensord.daemon.submit.arena_space import ArenaSpace, OnLease
from tensord.daemon.submit.busy_poll import BusyPoll
from tensord.daemon.submit.choice import Choice, load
from tensord.daemon.submit.dispatch import Dispatch
from tensord.daemon.submit.held_back import HeldBack
from tensord.daemon.submit.lent import Lent
from tensord.daemon.submit.model_table import ModelTable
from tensord.daemon.submit.pending import Calling, OnAnswer, Pending, Worker
from tensord.daemon.submit.sending import Sending
from tensord.daemon.submit.sweeper import Sweeper
from tensord.daemon.submit.workerless import Workerless, loading
from tensord.shm.arena import Arena, Lease
from tensord.shm.control_records import LaneOpened, ModelGone, ModelState, RegionPlace, WorkerFenced
from tensord.shm.errors import Unavailable
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import PreparedRequest, RequestRecord
from tensord.shm.prepared import Numbers, OnNumber
from tensord.shm.refusals import Refusal
from tensord.shm.sequence_page import SequencePage
from tensord.shm.spin import Spin
from tensord.shm.status_page import StatusPage

_log = logging.getLogger(__name__)


class Submitter:
    """All requests of one front. Owns the request arena."""

    def __init__(
        self,
        incarnation: int,
        options: Options,
        table: ModelTable,
        row: int = 0,
        counted: OnRefusal = uncounted,
        minted: OnNumber | None = None,
    ) -> None:
        """
        Args:
          row: this front's place among those of its protocol.
          counted: hears of every request that is refused.
          minted: hears of every kind of requests that gets a number.
        """
        self._incarnation = incarnation
        self._max_in_flight = options.requests.max_in_flight
        self._timeout = options.requests.timeout
        arenas = options.arenas
        #: Tensors up to this size travel inside their record.
        self.inline_byte_size = arenas.inline_byte_size
        #: Those of the kinds of requests that its clients repeat.
        self.numbers: Numbers[PreparedRequest] = Numbers(minted, options.requests.max_forms)
        #: An id for the next request; never used again.
        self.next_id: Callable[[], int] = count(1).__next__
        self._arena = Arena(arenas.byte_size, arenas.max_byte_size, arenas.keep_byte_size)
        #: All that are in flight, in order of arrival.
        self._pending: dict[int, Pending] = {}
        #: Who waits for a model to be loaded, to know what it is.
        self._waiting: set[asyncio.Future[None]] = set()
        self._worker_wait = options.requests.worker_wait
        self._lent = Lent()
        loop = self._loop = asyncio.get_running_loop()
        self.refusals = Refusals(loop, counted)
        busy_poll = BusyPoll(loop, Spin(options.lanes.spin_us * 1000), self._pending)
        self._choice = Choice(table, row, self._pending, options.requests.max_sequences)
        self._workerless = Workerless(self._pending, self._choice, options.requests.worker_wait)
        self._sending = Sending(loop, busy_poll, self._pending, lambda worker: self._answers.receive(worker))
        # Workers that still map a segment that was closed keep its pages: they are told.
        closed = partial(self._sending.flush_all_later, self._choice.workers.values())
        self._space = ArenaSpace(self._arena, arenas.wait, part(arenas, arenas.arriving_share), closed)
        #: Room for inputs; see there.
        self.loan, self.arrived, self.give_back = self._space.loan, self._space.arrived, self._space.give_back
        #: Whom the connections belong to, and what they hold.
        self.accounts = Accounts(arenas, self._arena.small_byte_size, self._arena.shared_byte_size)
        self._held_back = HeldBack(self._pending, arenas.wait, self._lent, self._choice, self._sending)
        self._sweeper = Sweeper(loop, self._sweep)
        self._dispatch = Dispatch(
            loop, self._pending, self._choice, self._sending, self._workerless, self._sweeper, self._space
        )
        self._answers = Answers(
            loop,
            self._pending,
            self._choice,
            self._sending,
            self._lent,
            self._held_back,
            self._dispatch,
            busy_poll,
            self._sweeper,
            options.responses.max_ahead,
        )
        #: The bytes of an answer have left, of a last one and of another; see there.
        self.release, self.taken = self._answers.release, self._answers.taken

    # -------------------------------------------------------------------------------------------- requests

    def submit(
        self, record: RequestRecord, leases: Sequence[Lease], on_answer: OnAnswer, account: Account | None = None
    ) -> None:
        """Sends a request whose inputs are in place; ``on_answer`` is called exactly once with ``final``, never from here.

        Raises: Unavailable: too many requests are in flight. Or whatever is wrong: nothing was sent then, and no callback comes.
          The leases are the submitter's from now on, also then.
        """
        self.send(Calling(on_answer, record=record, leases=leases, holder=account))

    def send(self, pending: Pending) -> None:
        """Sends a request that knows itself what to do with its answer. Raises as ``submit``."""
        everything = self._pending
        try:
            if len(everything) >= (limit := self._max_in_flight):
                self.refusals.note(pending.prepared.model, Refusal.IN_FLIGHT)
                raise Unavailable(f"{len(everything)} requests are in flight, at most {limit} are allowed")
            everything[pending.record.request_id] = pending
            if self._timeout:
                pending.sent_at = self._loop.time()
                self._sweeper.later()
            if (self._lent.full or self._held_back.lines) and self._held_back.holds(pending):
                self._held_back.add(pending, self._loop.time())
                return self._sweeper.later()
            workers = self._choice.remembered.get(pending.numbered)
            if workers is None:
                self._dispatch.send(pending)
            else:
                self._sending.send(workers[0] if len(workers) == 1 else min(workers, key=load), pending)
        except BaseException:
            everything.pop(pending.record.request_id, None)
            self._dispatch.give_back(pending)
            raise

    def cancel(self, request_id: int) -> None:
        """Nobody waits for it any more: no callback will come. Its memory is given back when its worker is done with it."""
        pending = self._pending.get(request_id)
        if pending is None or pending.cancelled:
            return
        pending.cancelled, pending.recalled = True, False
        if pending.worker is not None:
            self._dispatch.take_back(pending)
        elif not self._choice.is_step(pending):
            self._dispatch.finish(pending)
        # A step of a sequence that waits here goes to its worker when it is its turn, and is cancelled there: that ends the
        # sequence. If it were only left out, those behind it would run on another state.

    def in_flight(self) -> int:
        """Requests accepted and not yet answered."""
        return len(self._pending)

    def statistics(self) -> dict[str, int]:
        """Counts for operators."""
        waiting = {"waiting_for_worker": len(self._workerless), "held_back": len(self._held_back)}
        forms = {"forms_minted": self.numbers.minted, "forms_evicted": self.numbers.evicted}
        held = {"answers_held": len(self._lent), **self._arena.statistics()}
        return {"in_flight": len(self._pending), **waiting, **forms, **held}

    # ------------------------------------------------------------------------------------------------ room

    def wait_for_room(
        self, byte_size: int, on_lease: OnLease, model: str = "", account: Account | None = None, arriving: bool = False
    ) -> None:
        """Calls back with a lease, or with Unavailable when there is no room for ``arenas.wait`` seconds; ``model``: if known."""
        self._space.wait(byte_size, self.refusals.of_room(model, on_lease), self._loop.time(), account, arriving)
        self._sweeper.later()

    # -------------------------------------------------------------------------------------- workers and models

    def open_lane(self, opened: LaneOpened, fds: list[int]) -> None:
        """A worker can be reached. Takes the descriptors: the lane's socket, the status page and the sequence page."""
        lane = SubmitterLane(socket.socket(fileno=fds[0]), self._arena, writable=opened.device.startswith("cuda:"))
        worker = Worker(opened.peer, opened.device, lane, StatusPage.attach(fds[1]), SequencePage.attach(fds[2]))
        self._choice.add(worker)
        self._answers.listen(worker)
        self._dispatch.send_waiting()

    def model_changed(self, state: ModelState | ModelGone) -> None:
        """The table changed: who waits may have a worker now, or a reason to give up."""
        self._choice.model_changed(state)
        self._dispatch.send_waiting()
        waiting, self._waiting = self._waiting, set()
        for one in waiting:
            if not one.done():
                one.set_result(None)

    def is_loading(self, model: str, version: int) -> bool:
        """Whether a version is being loaded, and none serves that would answer for it."""
        return self._choice.is_loading(model, version)

    async def loaded(self, model: str, version: int) -> None:
        """Returns when a model that is being loaded is there, or is not to come. Raises Unavailable: that takes too long."""
        deadline = self._loop.time() + self._worker_wait
        while self._choice.is_loading(model, version):
            changed = self._loop.create_future()
            self._waiting.add(changed)
            await asyncio.wait((changed,), timeout=max(0.0, deadline - self._loop.time()))
            if not changed.done():
                self._waiting.discard(changed)
                self.refusals.note(model, Refusal.NO_WORKER)
                raise loading(model, self._worker_wait)

    def region_placed(self, place: RegionPlace) -> None:
        """Requests that name the region go to that device from now on."""
        self._choice.region_placed(place)

    def fence(self, fenced: WorkerFenced) -> None:
        """That process is certainly gone: run its requests elsewhere."""
        worker = self._choice.workers.get(fenced.worker)
        if worker is None:
            return
        self._answers.drain(worker)
        executing = {request for submitter, request in worker.page.executing() if submitter == self._incarnation}
        lost = self._choice.bury(worker)
        orphans, worker.in_flight = worker.in_flight, {}
        models = Counter(pending.prepared.model for number, pending in orphans.items() if number in executing)
        _log.log(
            logging.ERROR if models else logging.WARNING,
            "the worker on %s is gone with %d requests; it was executing %s",
            worker.device,
            len(orphans),
            ", ".join(f"{count} of model '{name}'" for name, count in models.most_common()) or "none of them",
        )
        for number, pending in orphans.items():
            self._dispatch.run_again(pending, lost.get(number), number in executing)
        # What belongs to its sequences may have waited for that.
        self._dispatch.send_waiting()
        worker.shut()

    def close(self) -> None:
        """Closes lanes and arena; what is in flight gets no answer."""
        self._sweeper.close()
        self.refusals.close()
        for worker in self._choice.workers.values():
            self._answers.close(worker)
            worker.shut()
        self._choice.workers.clear()
        held = sum(len(pending.leases) for pending in self._pending.values())
        if forgotten := self._arena.statistics()["leases"] - held:
            _log.warning("%d leases of the request arena belong to no request and were never given back", forgotten)
        self._arena.close()

    # ------------------------------------------------------------------------------------------------ bounds

    def _sweep(self, now: float) -> bool:
        """Ends what waited too long: for a worker, for room, for an answer."""
        for pending in self._workerless.expired(now):
            if not pending.cancelled:
                self.refusals.note(pending.prepared.model, Refusal.NO_WORKER)
            self._dispatch.fail(pending, self._workerless.refusal(pending.prepared))
        for pending, error in self._held_back.expired(now):
            if pending.cancelled:
                self._dispatch.send_again(pending)
            else:
                self.refusals.note(pending.prepared.model, Refusal.ANSWERS_HELD)
                self._dispatch.fail(pending, error)
        self._held_back.let_all_go(self._dispatch.send_again)
        room_wanted = self._space.expire(now)
        if self._timeout:
            self._sweep_timeouts(now - self._timeout)
        return bool(self._workerless or self._held_back.lines or room_wanted or (self._timeout and self._pending))

    def _sweep_timeouts(self, sent_before: float) -> None:
        # In order of arrival, and all have the same timeout: the first that may stay ends the walk.
        late = takewhile(lambda pending: pending.sent_at <= sent_before, self._pending.values())
        for pending in [pending for pending in late if not pending.cancelled]:
            self.refusals.note(pending.prepared.model, Refusal.NO_ANSWER)
            error = Unavailable(f"no answer within {self._timeout:g} s")
            pending.fail(error)
            self.cancel(pending.record.request_id)
