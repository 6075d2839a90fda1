"""Takes a request through the worker: validates, queues, runs and answers it. Runs in the worker's event loop.

Each model version has a planner (``tensord.workers.scheduling.planner``), which decides when queued requests run as a batch.
If a model version has instances with threads of their own, its batches run in these threads. All other batches run in the event
loop. If no program is compiled for a batch's shape, the batch waits until one is compiled, and its requests are queued again.

An iteration of the event loop asks a planner only if the planner's next batch is due, or if something has changed for the
planner's model, such as an arrived request or a finished run. If several models have due batches for the event loop, the models
take turns.

A request in ``SubmitterLink.in_flight`` gets exactly one final answer, unless the submitter's lane ends before.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
from collections.abc import Callable

from msgspec.structs import replace

from tensord.config import rate_limits
from tensord.config.options import Options
from tensord.shm.errors import Cancelled, Internal, InvalidArgument, ServingError, Unavailable
from tensord.shm.messages import TIMING, EndSequence, RequestRecord, Taken
from tensord.shm.refusals import Refusal
from tensord.shm.status_page import LOOP_SLOT, StatusPage
from tensord.workers.dispatch.cached_answers import CachedAnswers
from tensord.workers.dispatch.calls import Calls
from tensord.workers.dispatch.ensembles import EnsembleRuns
from tensord.workers.dispatch.instance_runs import InstanceRuns, in_order
from tensord.workers.dispatch.outbox import Outbox
from tensord.workers.dispatch.responses import Responses
from tensord.workers.dispatch.shape_compiler import COMPILER_SLOT, ShapeCompiler
from tensord.workers.dispatch.stepping import SteppingRuns
from tensord.workers.models.execution import Execution, run
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import AgendaPart, ModelVersion, by_version
from tensord.workers.models.rate_limiter import RateLimiter
from tensord.workers.models.statistics import Failure
from tensord.workers.programs.executable import Executable
from tensord.workers.programs.grouped_calls import GroupedCalls, GroupedProgram
from tensord.workers.programs.run_errors import CheckDevice, works
from tensord.workers.regions.region_table import RegionTable
from tensord.workers.requests.preparation import Preparation
from tensord.workers.requests.prepared import validate
from tensord.workers.requests.request import Request, named
from tensord.workers.requests.submitter_link import NEVER_LOOKED, SubmitterLink
from tensord.workers.scheduling.agenda import NEVER, Agenda
from tensord.workers.scheduling.planner import RUN, Refuse, WaitUntil
from tensord.workers.scheduling.queue import shapes_of
from tensord.workers.scheduling.sequence_batcher import SequenceBatcher
from tensord.workers.threads.work_thread import WorkThread

_log = logging.getLogger(__name__)
#: The first place on the status page that belongs to an instance, behind the loop's and the compiler's.
FIRST_INSTANCE_SLOT = COMPILER_SLOT + 1
#: Answers of several runs share a flush while so many requests wait: what fewer wait for leaves at once, so that the front is not
#: idle meanwhile.
_MANY = 4
#: And while what the runs have to do does not make up an iteration (``Executable.share``). So many calls of programs do as well.
_CALLS = 32


class Dispatcher:
    """Queues, runs and answers all requests to one worker, in the thread of its loop."""

    def __init__(
        self,
        options: Options,
        models: ModelTable,
        regions: RegionTable,
        page: StatusPage,
        compiler: WorkThread,
        clock: Callable[[], int],
        check: CheckDevice = works,
        gpu: int | None = None,
        post: Callable[[Callable[[], None]], None] = operator.call,
    ) -> None:
        """Makes a dispatcher without requests. It shares ``options``, ``models``, ``regions`` and ``page`` with the worker.

        Args:
          compiler: the thread that compiles programs for requests with new shapes.
          clock: returns the time of CLOCK_MONOTONIC in ns.
          check: raises an error if the worker's device has failed.
          gpu: the GPU's number. If it is None, the worker computes on the processor.
          post: takes a function, which the worker's loop calls later. Any thread may call ``post``.
        """
        self._models = models
        self._regions = regions
        self._page = page
        self._clock = clock
        self._check = check
        #: The models that the worker's loop asks for work, and the functions that it calls, each with the time at which.
        self.agenda: Agenda[AgendaPart] = Agenda()
        self._outbox = Outbox(options.arenas, self.agenda, self._ended)
        self.lane_answers = self._outbox.lane_answers
        self._cached = CachedAnswers(models, self._outbox, clock)
        self.responses = Responses(
            options.arenas, self._outbox, post, clock, options.expert.max_ahead, self.withdraw, self.agenda
        )
        self.took = self.responses.took
        self.limiter = RateLimiter(rate_limits.limits(options.rate_limit, gpu) or {})
        self.ensembles = EnsembleRuns(
            models, self._outbox, self.responses, page, clock, self.enter, self._finish, self.withdraw
        )
        self._compiler = ShapeCompiler(
            compiler, page, self._outbox, options.executables.max_unexpected_shapes, clock, check, self._restore, models
        )
        self._instances = InstanceRuns(
            self.limiter, self._compiler, self.responses, self._outbox.prepare, self._take, self._finish, self._changed
        )
        #: The work of the last program that ran in the loop, as a part of an iteration (``Executable.share``).
        self._share = 0.0
        self._stepping = SteppingRuns(self.responses, page, clock, check)
        #: When a sequence may have got no request for too long, or earlier: those that run in C do not put it off.
        self._silent_ns = NEVER
        self.calls = Calls(
            models,
            self.responses,
            self.ensembles,
            self.limiter,
            self.agenda,
            clock,
            post,
            self.enter,
            self.withdraw,
            options.requests.max_calls,
        )
        #: Executions whose answers have been written, with their failed requests and the time; see ``count``.
        self.uncounted: list[tuple[ModelVersion, Execution, dict[Request, Failure], int]] = []
        #: Versions in which requests wait, in the order of their turns.
        self._active: dict[ModelVersion, None] = {}
        #: Count of the requests on clients' own lanes that were handled in Python.
        self.lane_requests = 0
        #: True if no request waits to run, no answer for room, and nothing is to be done at once; as of the last iteration.
        self.idle = True
        #: The change count of the table of models when all versions were last marked.
        self._asked_of = 0

    # ---------------------------------------------------------------------------------------------------------- arrival

    def submit(self, submitter: SubmitterLink[Request], record: RequestRecord, now_ns: int) -> None:
        """Checks a received request, and queues the request or answers it with an error.

        Raises InvalidArgument, without an answer to the client, if a request with the same id is in flight or if the number of
        the prepared request is unknown.
        """
        if record.request_id in submitter.in_flight:
            raise InvalidArgument(f"request id {record.request_id} is in flight already")
        number = record.prepared
        preparation = submitter.preparations[number] if isinstance(number, int) else Preparation(number)
        prepared = preparation.prepared
        try:
            version = self._models.find(prepared.model, prepared.version)
            if version.sequences is not None:
                version = self._models.home(version, record.sequence_id, record.sequence_start)
            request = validate(record, preparation, submitter, version, submitter.segments or self._regions, now_ns)
            if version.joins:
                version.loaded.join(request)
            if submitter.owner is not None:
                submitter.keep(request)
        except ServingError as error:
            self._outbox.reject(submitter, record, error)
            return
        except Exception as error:  # a defect of ours must not cost the other requests
            _log.exception("%svalidating a request for model '%s' failed", named(record.client_id), prepared.model)
            self._outbox.reject(submitter, record, Internal(f"the request failed with {type(error).__name__}"))
            return
        submitter.in_flight[record.request_id] = request
        self._queue(version, request, now_ns)

    def submit_of_client(self, submitter: SubmitterLink[Request], record: RequestRecord, now_ns: int) -> None:
        """Submits a request that came on a client's lane. Clears the fields that only a front may set.

        Answers the request with Unavailable if too many requests are in flight on the lane. Also answers with Unavailable if
        the answers to all clients of the same Unix user take too much memory, and those on this lane at least its share.
        """
        assert submitter.segments is not None
        self.lane_requests += 1
        if record.received_ns or record.strikes or record.trace & ~TIMING:
            record = replace(record, received_ns=0, strikes=0, trace=record.trace & TIMING)
        if self.lane_answers.watched:
            record = self.lane_answers.arrived(submitter, record, now_ns)
        count, most = len(submitter.in_flight), submitter.segments.limits.in_flight
        if count >= most and record.request_id not in submitter.in_flight:
            error = Unavailable(f"{count} requests are in flight on this lane, at most {most} may be")
            self._outbox.reject(submitter, record, error)
            return
        if submitter.owner is not None:
            try:
                submitter.owner.check(submitter)
            except Unavailable as refused:
                self._outbox.reject(submitter, record, refused)
                return
        self.submit(submitter, record, now_ns)

    def enter(self, version: ModelVersion, request: Request, now_ns: int) -> None:
        """Queues a request made by this worker.

        Raises InvalidArgument, and releases the request's regions, if a property of the request is missing or invalid, or if
        the id of its sequence does not fit the model.
        """
        version.loaded.join(request)
        self._queue(version, request, now_ns)

    def _queue(self, version: ModelVersion, request: Request, now_ns: int) -> None:
        """Queues a request, or answers it at once: from the response cache or with an error."""
        if version.cache is not None and self._cached.answer(version, request, version.cache):
            return
        waiting = version.compiling.get(request.key) if version.sequences is None else None
        if now_ns >= self._silent_ns:
            self._end_silent(now_ns)
        try:
            replacement = version.planner.arrived(request) if waiting is None else waiting.add(request)
        except Unavailable as error:
            error = Unavailable(request.label + error.message)
            self._outbox.refuse(request, Refusal.QUEUE_FULL, error, now_ns)
            return
        except InvalidArgument as error:
            self._outbox.fail(request, error)
            return
        if replacement is not None:
            self._refuse(version, [(replacement.old, replacement.error)], now_ns)
        if waiting is not None:
            return
        self._active[version] = None
        self.agenda.wake(version)
        if version.sequences is not None:
            self._note_silent(version.sequences, now_ns)
            # Whoever asked last: with that client's lane the sequence ends.
            request.live.client = request.submitter.peer if request.submitter.segments is not None else 0
            request.submitter.sequences = True

    def _changed(self, version: ModelVersion) -> None:
        if version in self._active:
            self.agenda.wake(version)

    def ask_all(self) -> None:
        """Makes the worker's loop ask every model version that has waiting requests for a batch to run."""
        self._asked_of, self.limiter.moved = self._models.changes, False
        self.agenda.woken.update(self._active)  # type: ignore[arg-type]

    def cancel(self, submitter: SubmitterLink[Request], request_id: int) -> None:
        """Cancels a request. Does nothing if the submitter has no request with this id in flight.

        A queued request is answered with Cancelled at once. A running request is answered with an error when its run ends.
        """
        request = submitter.in_flight.get(request_id)
        if request is not None:
            self.withdraw(request)

    def withdraw(self, request: Request) -> None:
        """Cancels a request, the steps of the request if it asks an ensemble, and the calls that models make for it."""
        version, request.cancelled = request.version, True
        request.submitter.returned = NEVER_LOOKED
        answers = version.planner.cancelled(request)
        if not answers and version.runs_ahead and self._instances.take_back(version, request):
            sender = version.senders.get(request)
            if sender is None:
                answers = [(request, Cancelled())]
            else:
                sender.returned = True
        self._outbox.fail_all(answers, self._clock())
        self._changed(version)
        self.responses.cancelled(request)
        self.ensembles.cancel(request)
        self._ended(request)

    def taken(self, submitter: SubmitterLink[Request], record: Taken) -> None:
        """Handles the report that a client has taken bytes of a request's responses, so that the model may send more.

        Raises InvalidArgument if the report came on a client's own lane, and more bytes are taken in all than the worker sent.
        """
        request = submitter.in_flight.get(record.request_id)
        if request is not None:
            if submitter.segments is not None:
                self.responses.check_taken(request, record.byte_size)
            self.responses.taken(request, record.byte_size)

    def drop(self, submitter: SubmitterLink[Request]) -> None:
        """Cancels all requests of a submitter whose lane has ended. Running requests get no answer."""
        submitter.closed = True
        for request in list(submitter.in_flight.values()):
            self.withdraw(request)
        now_ns = self._clock()
        if submitter.segments is not None and submitter.sequences:
            for version in self._models:
                if version.sequences is not None:
                    version.sequences.close_client(submitter.peer)
        for request in submitter.held:
            request.version.executing -= 1
            self._outbox.fail_all(request.version.planner.dropped(request, now_ns), now_ns)
        self.ask_all()
        self._outbox.drop(submitter)

    def end_sequence(self, submitter: SubmitterLink[Request], record: EndSequence) -> None:
        """Ends the sequence that ``record`` names, once the waiting requests of the sequence have run.

        Does nothing if another submitter sent the sequence's last request. Raises InvalidArgument if ``submitter`` is a front.
        """
        if submitter.segments is None:
            raise InvalidArgument("only clients end sequences without a request")
        for version in self._models:
            if version.name == record.model and version.sequences is not None:
                version.sequences.close_client(submitter.peer, record.sequence_id)
                self._changed(version)

    def _note_silent(self, sequences: SequenceBatcher[Request], now_ns: int) -> None:
        silent_ns = sequences.table.silent_ns(now_ns)
        if silent_ns < self._silent_ns:
            self._silent_ns = silent_ns
            self.agenda.put(self._end_silent, silent_ns)

    def _end_silent(self, now_ns: int) -> None:
        """Ends all models' sequences whose idle time is over."""
        self._silent_ns = NEVER
        self.agenda.put(self._end_silent, NEVER)
        for version in self._models.everyone():
            if version.sequences is not None:
                self._refuse(version, version.planner.tick(now_ns), now_ns)
                self._note_silent(version.sequences, now_ns)
                if len(version.planner):
                    # Slots may have become free.
                    self.agenda.wake(version)

    def _refuse(self, version: ModelVersion, answers: list[tuple[Request, ServingError]], now_ns: int) -> None:
        for request, error in answers:
            if isinstance(error, Unavailable):
                version.statistics.failed(now_ns - request.arrived_ns)
                answer = functools.partial(self._outbox.refuse, request, Refusal.QUEUE_TIMEOUT, error, now_ns)
            else:
                answer = functools.partial(self._outbox.fail_all, [(request, error)], now_ns)
            if version.order is not None:
                version.order.taken(request)
            in_order(version, request, answer)

    # ---------------------------------------------------------------------------------------------------------- running

    def run_due(self, now_ns: int) -> int | None:
        """Does the work of one loop iteration. Returns the time (CLOCK_MONOTONIC, ns) at which to call this again.

        A time that is not after ``now_ns`` means at once. None: there is nothing to do before the next event.
        """
        agenda, blocked, kept = self.agenda, self._outbox.blocked, self.responses.kept
        if blocked or kept:
            self._retry(now_ns)
        if self._asked_of != self._models.changes or self.limiter.moved:
            self.ask_all()
        if agenda.woken or agenda.due_ns <= now_ns:
            self._ask(agenda.take(now_ns), now_ns)
        again = False
        if self._stepping.living:
            again = self._stepping.step(now_ns, wait=not agenda.woken and agenda.due_ns > now_ns)
        if blocked or kept:
            agenda.put(self._retry, min(self._outbox.next_give_up_ns, self.responses.next_give_up_ns))
        if again or agenda.woken or self.limiter.moved:
            self.idle = False
            return now_ns
        waits = self._active or blocked or kept
        self.idle = not (waits or (self._stepping.living and self._stepping.waits))
        return None if agenda.due_ns == NEVER else agenda.due_ns

    @property
    def runs_short_programs(self) -> bool:
        """True if the last program that the worker ran was short by XLA's estimate, and no model is running step by step."""
        return not self._stepping.living and self._share < 1

    def _retry(self, now_ns: int) -> None:
        """Sends answers that waited for memory of a response arena, if there is some now. Fails those that waited too long."""
        for version, requests in by_version(self._outbox.retry(now_ns)).items():
            version.executing -= len(requests)
            self._restore(version, requests)
        self.responses.retry(now_ns)

    def _ask(self, parts: list[AgendaPart], now_ns: int) -> None:
        due: list[ModelVersion] = []
        for part in parts:
            if not isinstance(part, ModelVersion):
                part(now_ns)
            elif self._decide(part, now_ns):
                due.append(part)
        if not due:
            return
        # Models take turns, whichever's requests are older: thousands of one model's let another model's only wait for a batch.
        first = due[0] if len(due) == 1 else next(version for version in self._active if version in due)
        for version in due:
            if version is not first:
                self.agenda.wake(version)
        alone = len(self._active) == 1 and not self._stepping.living
        self._active.pop(first, None)
        self._run(first, now_ns, alone)
        if len(first.planner):
            self._active[first] = None
            self.agenda.wake(first)

    def _decide(self, version: ModelVersion, now_ns: int) -> bool:
        planner, instances = version.planner, version.loaded.instances
        decision = planner.decide(now_ns)
        while isinstance(decision, Refuse):
            self._refuse(version, decision.answers, now_ns)
            decision = planner.decide(now_ns)
        if decision is RUN and not instances and version.steps is None:
            return True
        next_ns = decision.when_ns if isinstance(decision, WaitUntil) else NEVER
        if version.steps is not None:
            self._stepping.join(version)
            next_ns = planner.next_tick_ns or NEVER
        elif instances:
            next_ns = min(self._instances.fill(version, now_ns), planner.next_tick_ns or NEVER)
        waits = len(planner) > 0
        if not waits or version.steps is not None:
            self._active.pop(version, None)
        self.agenda.put(version, next_ns if waits else NEVER)
        return False

    def _run(self, version: ModelVersion, now_ns: int, alone: bool) -> None:
        done = self._run_batch(version, now_ns)
        # Many requests to short programs: the answers of all these batches leave with one system call.
        while alone and done < 1 and len(version.planner) >= _MANY:
            done += self._run_batch(version, self._clock()) + 1 / _CALLS

    def _run_batch(self, version: ModelVersion, now_ns: int) -> float:
        batch, model = self._take(version, now_ns), version.jitted
        if batch and version.loaded.ensemble is not None:
            self._share = 0.0
            return math.inf if self.ensembles.run(version, version.loaded.ensemble, batch, now_ns) else 0
        if not batch or model is None:
            return math.inf
        executable: Executable | GroupedProgram | None = None
        grouped = model.grouped
        if (
            grouped is not None
            and not self._outbox.blocked
            and not (model.executables.device.remote and batch[0].stays)
        ):
            executable = _extend(version, grouped, batch)
        if executable is None:
            executable = model.find(batch)
        if executable is None:
            self._compiler.park(version, batch, model.wanted_by(batch))
            return 0
        execution = Execution(batch, now_ns, executable)
        # What is kept as an answer for others must not lie where a client can write to it.
        sizes = model.sizes(executable, batch) if version.cache is None else None
        if sizes is not None:
            self._outbox.prepare(execution, sizes)
        # Written before and cleared after, so that a batch that kills this process is known by its requests.
        self._page.begin(
            LOOP_SLOT, [(request.submitter.peer, request.request_id) for request in batch], version.page_key, now_ns
        )
        run(model, execution, self._check)
        self._page.end(LOOP_SLOT, execution.computed_ns)
        self._finish(version, execution)
        self._share = executable.share
        return executable.share if len(version.planner) >= _MANY else math.inf

    def _take(self, version: ModelVersion, now_ns: int, instance: int = 0) -> list[Request]:
        batch = version.take(now_ns, instance)
        if not self._outbox.blocked:
            return batch
        kept = [request for request in batch if not self._outbox.hold(request)]
        version.executing += len(batch) - len(kept)
        return kept

    def _restore(self, version: ModelVersion, requests: list[Request]) -> None:
        """Puts requests that could not run back into the queue, ahead of later ones."""
        now_ns = self._clock()
        waiting = [request for request in requests if not self._gone(request, now_ns)]
        self._outbox.fail_all(version.planner.restore(waiting, now_ns), now_ns)
        self._active[version] = None
        self.agenda.wake(version)

    def _gone(self, request: Request, now_ns: int) -> bool:
        """Returns whether a request was cancelled or its lane has ended. If so, ends the request with Cancelled."""
        if not request.submitter.closed and not request.cancelled:
            return False
        others = request.version.planner.dropped(request, now_ns)
        self._outbox.fail_all([*others, (request, Cancelled())], now_ns)
        return True

    # ---------------------------------------------------------------------------------------------------------- answers

    def _finish(self, version: ModelVersion, execution: Execution) -> None:
        # The planner is asked again in the next iteration, when all that follows has happened.
        self._changed(version)
        if execution.by_senders:
            self.responses.returned(execution)
        if version.free_state is not None and version.sequences is not None:
            live = version.sequences.table.sequences
            execution.results = version.free_state.keep(execution.requests, execution.results, live)
        if version.cache is not None:
            self._cached.keep(version, execution, version.cache)
        failed = self._outbox.answer_all(execution, self._clock())
        self._ended(*execution.requests)
        now_ns = self._clock()
        if execution.lost:
            lost = version.lose(execution.requests[0].slot.instance, now_ns)
            self._outbox.fail_all(lost, now_ns, Failure.BACKEND)
        version.planner.done([*execution.requests, *execution.streamed], now_ns)
        if execution.again and version.loaded.sequences is not None:
            for request in execution.again:
                version.loaded.join_again(request)
            self._restore(version, execution.again)
        self.uncounted.append((version, execution, failed, now_ns))

    def _ended(self, *requests: Request) -> None:
        if self.calls.of:
            self.calls.ended(requests)

    def count(self) -> list[tuple[ModelVersion, Execution]]:
        """Adds the runs that were answered since the last call to the statistics of their model versions. Returns the runs."""
        uncounted, self.uncounted = self.uncounted, []
        for version, execution, failed, now_ns in uncounted:
            version.statistics.executed(execution, failed, now_ns)
        return [(version, execution) for version, execution, _, _ in uncounted]

    def __repr__(self) -> str:
        return f"<Dispatcher {len(self._active)} models with work>"


def _extend(version: ModelVersion, grouped: GroupedCalls, batch: list[Request]) -> GroupedProgram | None:
    key = batch[0].key
    waiting = version.queue.rows(key)
    program = grouped.find(shapes_of(key), waiting + 1)
    if program is not None and waiting and program.rows > 1:
        batch += version.queue.take(key, program.rows - 1)
    return program
