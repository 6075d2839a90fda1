"""Requests in flight: choosing a worker, sending, waiting, and what happens when a worker dies.

The numbered story of one request:

1. ``submit`` notes it under its id, then chooses a worker and puts the record on that worker's lane.
2. What is put on a lane in one turn of the loop leaves in one datagram; but a worker that has nothing to do gets its first
   request at once.
3. The Completion comes back on the lane; its callback gets it, with the lane its tensors lie in.
4. The callback's owner calls ``release`` when the answer's bytes have left.

A lane's end-of-file only stops the sending. The dead worker's requests run elsewhere when the supervisor says it is fenced,
because until then it might still write. Each request has exactly one final callback, and this is the only place that makes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from config.options import Options
from daemon.busy_poll import BusyPoll
from daemon.model_table import ModelTable
from daemon.region_places import RegionPlaces
from shm.arena import Arena, Lease, LeaseKey
from shm.channel import ChannelClosed
from shm.errors import Internal, InvalidArgument, NotFound, ServingError, Unavailable
from shm.forms import Form, Forms, whole_answer, whole_request
from shm.lane import SubmitterLane
from shm.messages import (
    Completion,
    FormCompletion,
    FormSubmit,
    LaneOpened,
    ModelGone,
    ModelState,
    RegionPlace,
    Submit,
    WorkerFenced,
)
from shm.status_page import StatusPage

_log = logging.getLogger(__name__)

#: The owner of a request: the completion, and the lane whose response arena holds its slices (None: nothing to view).
OnCompletion = Callable[[Completion, SubmitterLane | None], None]
#: The same of an answer of a form: what those have in common, and its own. (Equal templates of one lane are one object.)
OnFormed = Callable[[Completion, FormCompletion], None]
OnLease = Callable[[Lease | ServingError], None]

_STRIKES = 2
_UNDELIVERED = "an answer could not be delivered"
_SWEEP_SECONDS = 0.1


class Pending:
    """One request in flight."""

    __slots__ = ("cancelled", "form", "leases", "on_completion", "on_formed", "record", "sent_at", "worker")

    def __init__(
        self,
        record: Submit | FormSubmit,
        leases: Sequence[Lease],
        on_completion: OnCompletion,
        now: float,
        form: Form[Submit] | None = None,
        on_formed: OnFormed | None = None,
    ) -> None:
        self.record = record
        #: Of a FormSubmit.
        self.form = form
        self.on_formed = on_formed
        #: Where its inputs lie; given back with its final completion.
        self.leases = leases
        self.on_completion = on_completion
        self.worker: Worker | None = None
        self.sent_at = now
        self.cancelled = False

    @property
    def submit(self) -> Submit:
        """What says which model is asked for, with which regions."""
        return self.record if self.form is None else self.form.template  # type: ignore[return-value]

    def unform(self) -> Submit:
        """Makes it a request like those without a form."""
        if self.form is not None:
            self.record = whole_request(self.form.template, self.record)  # type: ignore[arg-type]
            self.form = None
        return self.record  # type: ignore[return-value]


class Worker:
    """A lane and what is in flight on it."""

    __slots__ = ("closed", "device", "in_flight", "incarnation", "lane", "page", "writing")

    def __init__(self, incarnation: int, device: str, lane: SubmitterLane, page: StatusPage) -> None:
        self.incarnation = incarnation
        self.device = device
        self.lane = lane
        self.page = page
        self.in_flight: dict[int, Pending] = {}
        #: End of file was seen: nothing is sent any more, and its requests wait for the fence.
        self.closed = False
        self.writing = False


class Submitter:
    """All requests of one front. Owns the request arena."""

    def __init__(self, incarnation: int, options: Options, table: ModelTable, row: int = 0) -> None:
        """``row``: this front's place among those of its protocol."""
        self._incarnation = incarnation
        self._row = row
        self._options = options
        self._table = table
        arenas = options.arenas
        #: Tensors up to this size travel inside their record.
        self.inline_byte_size = arenas.inline_byte_size
        #: The kinds of requests that its clients repeat.
        self.forms: Forms[Submit] = Forms()
        self._arena = Arena(arenas.byte_size, arenas.max_byte_size, arenas.keep_byte_size)
        self._workers: dict[int, Worker] = {}
        self._places = RegionPlaces()
        self._pending: dict[int, Pending] = {}
        #: Requests without a worker, in order of arrival, with the time they give up.
        self._waiting: deque[tuple[float, Pending]] = deque()
        #: Who waits for room in the arena, in order of arrival.
        self._room: deque[tuple[float, int, OnLease]] = deque()
        self._dirty: set[Worker] = set()
        self._next_id = 1
        self._loop = asyncio.get_running_loop()
        self._busy_poll = BusyPoll(self._loop, options.lanes.spin_us * 1000, self.in_flight)
        self._sweeper: asyncio.TimerHandle | None = None

    # -------------------------------------------------------------------------------------------- requests

    def next_id(self) -> int:
        """An id for the next ``Submit``; never used again."""
        self._next_id += 1
        return self._next_id

    def submit(self, record: Submit, leases: Sequence[Lease], on_completion: OnCompletion) -> None:
        """Sends a request whose inputs are in place; ``on_completion`` is called exactly once with ``final``, never from here.

        Raises: Unavailable: too many requests are in flight; the leases stay the caller's.
        """
        self._begin(Pending(record, leases, on_completion, self._loop.time()))

    def submit_formed(
        self, form: Form[Submit], record: FormSubmit, on_completion: OnCompletion, on_formed: OnFormed
    ) -> None:
        """The same of a request of a form; an answer of a form comes to ``on_formed`` instead. Raises as ``submit``."""
        self._begin(Pending(record, (), on_completion, self._loop.time(), form, on_formed))

    def _begin(self, pending: Pending) -> None:
        if len(self._pending) >= self._options.requests.max_in_flight:
            raise Unavailable(
                f"{len(self._pending)} requests are in flight, at most {self._options.requests.max_in_flight} are allowed"
            )
        self._pending[pending.record.request_id] = pending
        if self._options.requests.timeout:
            self._sweep_later()
        self._dispatch(pending)

    def cancel(self, request_id: int) -> None:
        """Nobody waits for it any more: no callback will come. Its memory is given back when its worker is done with it."""
        pending = self._pending.get(request_id)
        if pending is None or pending.cancelled:
            return
        pending.cancelled = True
        if pending.worker is not None:
            pending.worker.lane.cancel(request_id)
            self._flush_later(pending.worker)
        else:
            self._finish(pending)

    def release(self, lane: SubmitterLane, key: LeaseKey) -> None:
        """The bytes of an answer have left."""
        lane.release(key)
        for worker in self._workers.values():
            if worker.lane is lane:
                self._flush_later(worker)
                return

    def in_flight(self) -> int:
        """Requests accepted and not yet answered."""
        return len(self._pending)

    def statistics(self) -> dict[str, int]:
        """Counts for operators."""
        return {"in_flight": len(self._pending), "waiting_for_worker": len(self._waiting), **self._arena.statistics()}

    # ------------------------------------------------------------------------------------------------ room

    def loan(self, byte_size: int) -> Lease | None:
        """Room for inputs, or None when there is none now or others wait already.

        Raises: InvalidArgument: it could never fit.  Unavailable: the host has no memory.
        """
        return None if self._room else self._arena.loan(byte_size)

    def wait_for_room(self, byte_size: int, on_lease: OnLease) -> None:
        """Calls back with a lease, or with Unavailable when there is no room for ``arenas.wait`` seconds."""
        self._room.append((self._loop.time() + self._options.arenas.wait, byte_size, on_lease))
        self._sweep_later()

    def give_back(self, lease: Lease) -> None:
        """Returns a lease that was not submitted, or whose request is done, and serves who waits for room."""
        lease.release()
        while self._room:
            _, byte_size, on_lease = self._room[0]
            granted = self._arena.loan(byte_size)
            if granted is None:
                return
            self._room.popleft()
            on_lease(granted)

    # -------------------------------------------------------------------------------------- workers and models

    def open_lane(self, opened: LaneOpened, fds: list[int]) -> None:
        """A worker can be reached. Takes both descriptors: the lane's socket and the status page."""
        sock, page = socket.socket(fileno=fds[0]), StatusPage.attach(fds[1])
        worker = Worker(opened.peer, opened.device, SubmitterLane(sock, self._arena), page)
        self._workers[opened.peer] = worker
        self._loop.add_reader(worker.lane.fileno(), self._readable, worker)
        self._retry_waiting()

    def model_changed(self, state: ModelState | ModelGone) -> None:
        """The table changed: who waits may have a worker now, or a reason to give up."""
        if isinstance(state, ModelState):
            # Where all workers are idle the first is chosen: another one by each front.
            turn = self._row % max(1, len(state.workers))
            self._table.update(
                msgspec.structs.replace(state, workers=state.workers[turn:] + state.workers[:turn]) if turn else state
            )
        else:
            self._table.remove(state)
        self._retry_waiting()

    def region_placed(self, place: RegionPlace) -> None:
        """Requests that name the region go to that device from now on."""
        self._places.update(place)

    def fence(self, fenced: WorkerFenced) -> None:
        """That process is certainly gone: run its requests elsewhere."""
        worker = self._workers.pop(fenced.worker, None)
        if worker is None:
            return
        if not worker.closed:
            # What it answered before it died is still in the socket, all of it: the process is gone.
            while self._readable(worker):
                pass
            if not worker.closed:
                self._close(worker)
        executing = {request for submitter, request in worker.page.executing() if submitter == self._incarnation}
        orphans, worker.in_flight = worker.in_flight, {}
        _log.warning(
            "worker %d is gone with %d requests, %d of them executing", worker.incarnation, len(orphans), len(executing)
        )
        for pending in orphans.values():
            pending.worker = None
            self._run_again(pending, pending.record.request_id in executing)
        worker.page.close()
        worker.lane.close()

    def close(self) -> None:
        """Closes lanes and arena; what is in flight gets no answer."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for worker in self._workers.values():
            if not worker.closed:
                self._close(worker)
            worker.page.close()
            worker.lane.close()
        self._workers.clear()
        held = sum(len(pending.leases) for pending in self._pending.values())
        forgotten = self._arena.statistics()["leases"] - held
        if forgotten:
            _log.warning("%d leases of the request arena belong to no request and were never given back", forgotten)
        self._arena.close()

    def _run_again(self, pending: Pending, was_executing: bool) -> None:
        if pending.cancelled:
            self._finish(pending)
            return
        if was_executing:
            record = pending.unform()
            strikes = record.strikes + 1
            if strikes >= _STRIKES:
                self._fail(
                    pending,
                    Internal(f"the request was given up: {strikes} worker processes died while they executed it"),
                )
                return
            if not self._stateless(record):
                self._fail(
                    pending, Internal("the worker process died while it executed the request; its sequence is lost")
                )
                return
            pending.record = msgspec.structs.replace(record, strikes=strikes)
        self._dispatch(pending)

    def _stateless(self, record: Submit) -> bool:
        try:
            return self._table.find(record.model, record.version).stateless
        except NotFound:
            return True

    # ----------------------------------------------------------------------------------------------- sending

    def _dispatch(self, pending: Pending) -> None:
        """Sends to the least loaded worker that has the model, or waits for one."""
        record, submit = pending.record, pending.submit
        try:
            state = self._table.find(submit.model, submit.version)
            device = self._places.device_of(submit) if self._places else ""
        except ServingError as error:
            self._loop.call_soon(self._fail, pending, error)
            return
        chosen: Worker | None = None
        for incarnation in state.workers:
            worker = self._workers.get(incarnation)
            if (
                worker is not None
                and not worker.closed
                and (not device or worker.device == device)
                and (chosen is None or len(worker.in_flight) < len(chosen.in_flight))
            ):
                chosen = worker
        if chosen is None:
            self._waiting.append((self._loop.time() + self._options.requests.worker_wait, pending))
            self._sweep_later()
            return
        pending.worker = chosen
        chosen.in_flight[record.request_id] = pending
        if pending.form is None:
            chosen.lane.submit(submit)
        else:
            chosen.lane.submit_formed(pending.form, record)  # type: ignore[arg-type]
        if len(chosen.in_flight) == 1 and not chosen.writing:
            # The worker has nothing to do: it begins while this front reads what else came.
            self._flush_worker(chosen)
        self._flush_later(chosen)

    def _flush_later(self, worker: Worker) -> None:
        """At the end of this turn: what came in it for a busy worker shares a datagram, a wake-up and most often a batch."""
        if not self._dirty:
            self._loop.call_soon(self._flush)
        self._dirty.add(worker)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, set()
        for worker in dirty:
            if not worker.closed:
                self._flush_worker(worker)
        if len(self._pending) == 1 and len(dirty) == 1:
            self._busy_poll.look(functools.partial(self._look, dirty.pop()))
        else:
            self._busy_poll.flushed()

    def _look(self, worker: Worker) -> bool:
        """Looks for the answer to the only request in flight. False: it cannot come, now."""
        if not worker.in_flight or worker.closed:
            return False
        self._readable(worker)
        return True

    def _flush_worker(self, worker: Worker) -> None:
        done = worker.lane.flush()
        if done and worker.writing:
            worker.writing = False
            self._loop.remove_writer(worker.lane.fileno())
        elif not done and not worker.writing:
            worker.writing = True
            self._loop.add_writer(worker.lane.fileno(), self._flush_worker, worker)

    # ---------------------------------------------------------------------------------------------- receiving

    def _readable(self, worker: Worker) -> bool:
        """Takes a datagram; whether there was one. Were there more, or an end of file, the loop would say so again."""
        try:
            completions = worker.lane.receive()
            if completions is None:
                return False
            for completion, own in completions:
                self._complete(worker, completion, own)
            return True
        except ChannelClosed:
            self._close(worker)
        except InvalidArgument as error:
            # A worker that sends garbage is not trusted with anything more; the supervisor sees it hang or exit.
            _log.error("closing the lane of worker %d: %s", worker.incarnation, error.message)
            self._close(worker)
            self._give_up(worker, Internal("the worker's answer could not be understood"))
        return False

    def _complete(self, worker: Worker, completion: Completion, own: FormCompletion | None) -> None:
        """``own``: of an answer of a form, whose ``completion`` is what those have in common."""
        if own is not None:
            pending = worker.in_flight.get(own.request_id)
            if pending is not None and pending.on_formed is not None:
                self._complete_formed(worker, pending, completion, own)
                return
            completion = whole_answer(completion, own)
        pending = worker.in_flight.get(completion.request_id)
        if pending is None:
            if completion.lease is not None:
                self.release(worker.lane, completion.lease)
            return
        if completion.final:
            del worker.in_flight[completion.request_id]
            self._busy_poll.answered()
        if pending.cancelled:
            if completion.lease is not None:
                self.release(worker.lane, completion.lease)
        else:
            _tell(pending, completion, worker.lane)
        if completion.final:
            self._finish(pending)

    def _complete_formed(
        self, worker: Worker, pending: Pending, template: Completion, completion: FormCompletion
    ) -> None:
        del worker.in_flight[completion.request_id]
        self._busy_poll.answered()
        if not pending.cancelled:
            assert pending.on_formed is not None
            try:
                pending.on_formed(template, completion)
            except Exception:
                _log.exception(_UNDELIVERED)
        self._finish(pending)

    def _give_up(self, worker: Worker, error: ServingError) -> None:
        """Answers what is in flight there. The process lives and may still read: memory comes back when it is fenced."""
        for pending in list(worker.in_flight.values()):
            if not pending.cancelled:
                pending.cancelled = True
                _tell(pending, Completion(pending.record.request_id, error.code, error.message), None)

    def _close(self, worker: Worker) -> None:
        worker.closed = True
        self._loop.remove_reader(worker.lane.fileno())
        if worker.writing:
            self._loop.remove_writer(worker.lane.fileno())
            worker.writing = False

    # --------------------------------------------------------------------------------------------- finishing

    def _fail(self, pending: Pending, error: ServingError) -> None:
        if not pending.cancelled and pending.record.request_id in self._pending:
            _tell(pending, Completion(pending.record.request_id, error.code, error.message), None)
        self._finish(pending)

    def _finish(self, pending: Pending) -> None:
        """The one place where a request ends."""
        if self._pending.pop(pending.record.request_id, None) is None:
            return
        for lease in pending.leases:
            self.give_back(lease)

    def _retry_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for deadline, pending in waiting:
            if pending.record.request_id not in self._pending:
                continue
            before = len(self._waiting)
            self._dispatch(pending)
            if len(self._waiting) > before:
                self._waiting[-1] = (deadline, pending)  # it waits since it came, not since we looked

    # ------------------------------------------------------------------------------------------------ bounds

    def _sweep_later(self) -> None:
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(_SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        """Ends what waited too long: for a worker, for room, for an answer."""
        self._sweeper = None
        now = self._loop.time()
        requests, arenas = self._options.requests, self._options.arenas
        while self._waiting and (
            self._waiting[0][0] <= now or self._waiting[0][1].record.request_id not in self._pending
        ):
            _, pending = self._waiting.popleft()
            if pending.record.request_id in self._pending:
                self._fail(pending, self._no_worker(pending.submit))
        while self._room and self._room[0][0] <= now:
            _, byte_size, on_lease = self._room.popleft()
            on_lease(
                Unavailable(f"{self._arena.describe_full(byte_size)}, and none came free within {arenas.wait:g} s")
            )
        if requests.timeout:
            self._sweep_timeouts(now - requests.timeout)
        if self._waiting or self._room or (requests.timeout and self._pending):
            self._sweep_later()

    def _no_worker(self, record: Submit) -> ServingError:
        device = ""
        with contextlib.suppress(InvalidArgument):
            device = self._places.device_of(record)
        where = f" on GPU {device.removeprefix('cuda:')}, where its regions are," if device else ""
        return Unavailable(
            f"no worker was ready for model '{record.model}'{where} within {self._options.requests.worker_wait:g} s"
        )

    def _sweep_timeouts(self, sent_before: float) -> None:
        # In order of arrival, and all have the same timeout: the first that may stay ends the walk.
        late: list[Pending] = []
        for pending in self._pending.values():
            if pending.sent_at > sent_before:
                break
            if not pending.cancelled:
                late.append(pending)
        for pending in late:
            error = Unavailable(f"no answer within {self._options.requests.timeout:g} s")
            _tell(pending, Completion(pending.record.request_id, error.code, error.message), None)
            self.cancel(pending.record.request_id)


def _tell(pending: Pending, completion: Completion, lane: SubmitterLane | None) -> None:
    """One owner's defect costs that owner its answer, not the others in the same datagram theirs."""
    try:
        pending.on_completion(completion, lane)
    except Exception:
        _log.exception(_UNDELIVERED)
