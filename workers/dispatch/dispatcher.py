"""The way of a request through the worker: validate, queue, run, answer. Belongs to the worker's loop.

    submit ─▶ queue of its version ─▶ batch ─▶ right here (one instance)  ─▶ answer in place ─▶ completion on the lane
                                            └▶ an instance's thread       ─▶
                                            └▶ parked while its shape is compiled, then queued again

Batches of a jitted model with one instance run right here: the model whose head has waited longest goes first. Every request in
``Submitter.in_flight`` gets exactly one final completion.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from config import rate_limits
from config.options import Options
from shm.errors import Cancelled, Internal, InvalidArgument, ServingError, Unavailable
from shm.messages import FormSubmit, Submit
from shm.refusals import Refusal
from shm.status_page import StatusPage, WorkerState
from workers.dispatch.answers import failure
from workers.dispatch.cached_answers import CachedAnswers
from workers.dispatch.outbox import Outbox
from workers.dispatch.shape_compiler import COMPILER_DESK, ShapeCompiler
from workers.dispatch.validation import validate, validate_formed
from workers.models.execution import Execution, run
from workers.models.instance import Instance
from workers.models.model_table import ModelTable
from workers.models.model_version import ModelVersion
from workers.models.rate_limiter import RateLimiter
from workers.models.statistics import Failure
from workers.programs.executables import Executable
from workers.programs.run_errors import CheckDevice, works
from workers.programs.series import Series
from workers.programs.series_program import SeriesProgram
from workers.regions.region_table import RegionTable
from workers.requests.request import Request, controls_of, named
from workers.requests.submitter import Submitter
from workers.threads.work_thread import WorkThread

_log = logging.getLogger(__name__)
#: How long batches are run in one turn of the loop before anything else is looked at, and how many requests must wait for that:
#: what few wait for leaves at once, so that the front is not idle meanwhile.
_RUN_ON_NS = 250_000
_MANY = 4
#: Places on the status page: this thread's and the compiler's. Instances have the others.
LOOP_DESK, FIRST_INSTANCE_DESK = 0, COMPILER_DESK + 1


class Dispatcher:
    """One per worker."""

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
    ) -> None:
        """``check``: of the worker's device; ``gpu``: its number, None of the processor."""
        self._check = check
        self._models = models
        self._regions = regions
        self._page = page
        self._clock = clock
        self._outbox = Outbox(options.arenas)
        self._cached = CachedAnswers(self._outbox, clock)
        self.limiter = RateLimiter(rate_limits.limits(options.rate_limit, gpu) or {})
        self._compiler = ShapeCompiler(
            compiler, page, self._outbox, options.executables.max_unexpected_shapes, clock, check, self._restore
        )
        #: Executions whose answers are placed, and when they were; see ``count``.
        self._uncounted: list[tuple[ModelVersion, Execution, dict[Request, Failure], int]] = []
        #: What the status page says between executions.
        self.resting_state = WorkerState.IDLE
        #: Versions with queued requests.
        self._active: dict[ModelVersion, None] = {}

    # ---------------------------------------------------------------------------------------------------------- arrival

    def submit(self, submitter: Submitter[Request], record: Submit | FormSubmit, now_ns: int) -> None:
        """Queues a request, or answers it with what is wrong.

        Raises: InvalidArgument: its id is in flight already, or nothing was said of its form.
        """
        if record.request_id in submitter.in_flight:
            raise InvalidArgument(f"request id {record.request_id} is in flight already")
        form = submitter.forms.find(record.form) if type(record) is FormSubmit else None
        submit: Submit = record if form is None else form.submit  # type: ignore[assignment]
        try:
            version = self._models.find(submit.model, submit.version)
            if version.sequences is not None:
                controls = controls_of(record)
                version = self._models.home(version, controls.correlation_id, controls.start)
            if form is None:
                request = validate(submit, submitter, version, self._regions, now_ns)
            else:
                request = validate_formed(record, form, submitter, version, self._regions, now_ns)  # type: ignore[arg-type]
            if version.loaded.sequences is not None:
                version.loaded.sequences.join(request)
            if version.loaded.made_inputs:
                version.loaded.made_inputs.join(request)
        except ServingError as error:
            submitter.answer(failure(record.request_id, error))
            return
        except Exception as error:  # a defect of ours must not cost the other requests
            _log.exception("%svalidating a request for model '%s' failed", named(record.client_id), submit.model)
            submitter.answer(failure(record.request_id, Internal(f"the request failed with {type(error).__name__}")))
            return
        submitter.in_flight[record.request_id] = request
        if version.cache is None or not self._cached.answer(version, request, version.cache):
            self._queue(version, request, now_ns)

    def _queue(self, version: ModelVersion, request: Request, now_ns: int) -> None:
        """Puts a request where it waits; a full queue answers it."""
        waiting = version.compiling.get(request.key) if version.sequences is None else None
        if version.planner.lives:
            self._tick(version, now_ns)
        try:
            if waiting is None:
                version.planner.arrived(request)
            elif len(waiting) < version.loaded.queue_rules.max_size:
                waiting.append(request)
                return
            else:
                raise Unavailable("Exceeds maximum queue size")
        except Unavailable as error:
            error = Unavailable(request.label + error.message)
            self._outbox.refuse(request, Refusal.QUEUE_FULL, error, now_ns)
            return
        except InvalidArgument as error:
            self._outbox.fail(request, error)
            return
        self._active[version] = None

    def cancel(self, submitter: Submitter[Request], request_id: int) -> None:
        """Drops a request that waits; one that runs is answered when it is done. Ignores what is not in flight."""
        request = submitter.in_flight.get(request_id)
        if request is None:
            return
        request.cancelled = True
        self._outbox.fail_all(request.version.planner.cancelled(request))

    def drop(self, submitter: Submitter[Request]) -> None:
        """The submitter is gone: its waiting requests go, its running ones are forgotten when they end."""
        submitter.closed = True
        for request in list(submitter.in_flight.values()):
            self._outbox.fail_all(request.version.planner.cancelled(request))
        for request in submitter.held:
            request.version.executing -= 1
            self._outbox.fail_all(request.version.planner.dropped(request, self._clock()))
        self._outbox.drop(submitter)

    # ---------------------------------------------------------------------------------------------------------- running

    def run_due(self, now_ns: int) -> int | None:
        """Runs jitted batches of at most one model and fills every free instance.

        Returns: when to be called again at the latest (not after ``now_ns``: at once); None: only when something arrives.
        """
        next_ns: int | None = None
        if self._outbox.blocked:
            for version, requests in _by_version(self._outbox.retry(now_ns)).items():
                version.executing -= len(requests)
                self._restore(version, requests)
            next_ns = self._outbox.next_give_up_ns
        first: ModelVersion | None = None
        first_due_ns = 0
        for version in list(self._active):
            planner = version.planner
            self._tick(version, now_ns)
            if not len(planner) and not planner.lives:
                del self._active[version]
                if version.limited and self._withdraw(version, now_ns):
                    next_ns = now_ns
                continue
            if planner.next_tick_ns:
                next_ns = _earlier(next_ns, planner.next_tick_ns)
            if version.loaded.instances:
                due_ns = self._fill_instances(version, now_ns)
                if due_ns is not None:
                    next_ns = _earlier(next_ns, due_ns)
                continue
            due_ns = planner.due_ns()
            if due_ns is None:
                continue
            if due_ns > now_ns:
                next_ns = _earlier(next_ns, due_ns)
            elif first is None or due_ns < first_due_ns:
                if first is not None:
                    next_ns = now_ns
                first, first_due_ns = version, due_ns
            else:
                next_ns = now_ns
        if first is not None:
            self._run_jitted(first, now_ns)
            if len(self._active) == 1:
                self._run_on(first, now_ns + _RUN_ON_NS)
            if len(first.planner):
                next_ns = now_ns
        return next_ns

    def _run_on(self, version: ModelVersion, until_ns: int) -> None:
        """Further batches of the only model with much work, for a moment: their answers then share a flush and a wake-up."""
        while len(version.planner) >= _MANY and (now_ns := self._clock()) < until_ns:
            if not self._run_jitted(version, now_ns):
                return

    def _tick(self, version: ModelVersion, now_ns: int) -> None:
        if not version.planner.lives and not 0 < version.planner.next_tick_ns <= now_ns:
            return
        for request, error in version.planner.tick(now_ns):
            if isinstance(error, Unavailable):
                version.statistics.failed(now_ns - request.arrived_ns)
                answer = functools.partial(self._outbox.refuse, request, Refusal.QUEUE_TIMEOUT, error, now_ns)
            else:
                answer = functools.partial(self._outbox.fail, request, error)
            if version.order is not None:
                version.order.taken(request)
            self._in_turn(version, request, answer)

    def _take(self, version: ModelVersion, now_ns: int, instance: int = 0) -> list[Request]:
        """The next batch, without requests of submitters that do not take their answers."""
        batch = version.planner.take(now_ns, instance)
        if not self._outbox.blocked:
            return batch
        kept = [request for request in batch if not self._outbox.hold(request)]
        version.executing += len(batch) - len(kept)
        return kept

    def _fill_instances(self, version: ModelVersion, now_ns: int) -> int | None:
        """Gives batches to free instances. Returns when the next batch is due, None while an instance must become free first."""
        next_ns: int | None = None
        for number, instance in enumerate(version.loaded.instances):
            while not instance.busy:
                due_ns = version.planner.due_ns(number)
                if due_ns is None or due_ns > now_ns:
                    next_ns = next_ns if due_ns is None else _earlier(next_ns, due_ns)
                    break
                if instance.needs and not self.limiter.may_run(instance):
                    break
                self._fill(version, instance, self._take(version, now_ns, number), now_ns)
        return now_ns if version.limited and self._withdraw(version, now_ns) else next_ns

    def _withdraw(self, version: ModelVersion, now_ns: int) -> bool:
        """Of instances without work: they wait for no resources, and have none. True: others may run now."""
        for number, instance in enumerate(version.loaded.instances):
            due_ns = None if instance.busy else version.planner.due_ns(number)
            if instance.needs and not instance.busy and (due_ns is None or due_ns > now_ns):
                self.limiter.done(instance)
        return self.limiter.take_moved()

    def _fill(self, version: ModelVersion, instance: Instance, batch: list[Request], now_ns: int) -> None:
        executable: Executable | None = None
        if not batch:
            return
        if version.jitted is not None and (executable := version.jitted.find(batch)) is None:
            self._compiler.park(version, batch, version.jitted.wanted_by(batch))
            return
        instance.busy = True
        version.executing += 1
        execution = Execution(batch, now_ns, executable)
        if version.order is not None:
            version.order.taken(execution)
        instance.run(execution, self._done(version, instance))

    def _done(self, version: ModelVersion, instance: Instance) -> Callable[[Execution], None]:
        def done(execution: Execution) -> None:
            instance.busy = False
            version.executing -= 1
            if instance.needs:
                self.limiter.done(instance)
            self._in_turn(version, execution, functools.partial(self._finish, version, execution))

        return done

    @staticmethod
    def _in_turn(version: ModelVersion, taken: object, answer: Callable[[], None]) -> None:
        """Answers when those have left that were taken before, if the model wants that."""
        if version.order is None:
            answer()
        else:
            for _, leave in version.order.done(taken, answer):
                leave()

    def _run_jitted(self, version: ModelVersion, now_ns: int) -> bool:
        """Runs the next batch. False: none is due."""
        batch = self._take(version, now_ns)
        model = version.jitted
        if not batch or model is None:
            return False
        executable: Executable | SeriesProgram | None = None
        if model.series is not None and not self._outbox.blocked:
            executable = self._extend(version, model.series, batch)
        if executable is None:
            executable = model.find(batch)
        if executable is None:
            self._compiler.park(version, batch, model.wanted_by(batch))
            return True
        execution = Execution(batch, now_ns, executable)
        # What is kept as an answer for others must not lie where a client can write to it.
        sizes = model.sizes(executable, batch) if version.cache is None else None
        if sizes is not None:
            self._outbox.prepare(execution, sizes)
        # Written before and cleared after, so that a batch that kills this process is known by its requests.
        self._page.begin(LOOP_DESK, [(request.submitter.peer, request.request_id) for request in batch])
        self._page.set_state(WorkerState.EXECUTING, now_ns)
        run(model, execution, self._check)
        self._page.end(LOOP_DESK)
        self._page.set_state(self.resting_state, execution.computed_ns)
        self._finish(version, execution)
        return True

    def _extend(self, version: ModelVersion, series: Series, batch: list[Request]) -> SeriesProgram | None:
        """Adds requests that wait behind the first one and can share its call. Returns the program for them, if there is one."""
        key = batch[0].key
        waiting = version.queue.rows(key)
        program = series.find(key, waiting + 1)
        if program is not None and waiting and program.wanted.length > 1:
            batch += version.queue.take(key, program.wanted.length - 1)
        if series.wish is not None:
            self._compiler.compile_series(version, series)
        return program

    def _restore(self, version: ModelVersion, requests: list[Request]) -> None:
        """Queues requests again that were taken and could not run, ahead of those that came later."""
        now_ns = self._clock()
        waiting = [request for request in requests if not self._gone(request, now_ns)]
        self._outbox.fail_all(version.planner.restore(waiting, now_ns))
        self._active[version] = None

    def _gone(self, request: Request, now_ns: int) -> bool:
        """Ends a request that nobody waits for any more."""
        if not request.submitter.closed and not request.cancelled:
            return False
        self._outbox.fail_all(request.version.planner.dropped(request, now_ns))
        self._outbox.fail(request, Cancelled("the request was cancelled"))
        return True

    # ---------------------------------------------------------------------------------------------------------- answers

    def _finish(self, version: ModelVersion, execution: Execution) -> None:
        if version.cache is not None:
            self._cached.keep(version, execution, version.cache)
        failed = self._outbox.answer_all(execution, self._clock())
        now_ns = self._clock()
        if execution.lost and version.sequences is not None:
            self._outbox.fail_all(version.sequences.lose(execution.requests[0].slot.instance, now_ns))
        version.planner.done(execution.requests, now_ns)
        if execution.again and version.loaded.sequences is not None:
            for request in execution.again:
                version.loaded.sequences.join_again(request)
            self._restore(version, execution.again)
        self._uncounted.append((version, execution, failed, now_ns))

    def count(self) -> list[tuple[ModelVersion, Execution]]:
        """Counts what was executed; after its answers have left, because nobody waits for that. Returns what that was."""
        uncounted, self._uncounted = self._uncounted, []
        for version, execution, failed, now_ns in uncounted:
            version.statistics.executed(execution, failed, now_ns)
        return [(version, execution) for version, execution, _, _ in uncounted]

    def say_refusals(self, now_ns: int) -> None:
        """Writes to the log what was refused, where that is due."""
        self._outbox.refusals.settle(now_ns)

    @property
    def adopted(self) -> int:
        """How many programs came into use since the start."""
        return self._compiler.adopted

    @property
    def idle(self) -> bool:
        """Whether no request waits for its turn, and no answer for room."""
        return not self._outbox.blocked and not any(len(version.planner) for version in self._active)

    def __repr__(self) -> str:
        return f"<Dispatcher {len(self._active)} models with work>"


def _by_version(requests: list[Request]) -> dict[ModelVersion, list[Request]]:
    """In the order in which their submitters sent them."""
    found: dict[ModelVersion, list[Request]] = {}
    for request in sorted(requests, key=lambda request: request.sequence):
        version = request.version
        assert isinstance(version, ModelVersion)
        found.setdefault(version, []).append(request)
    return found


def _earlier(a: int | None, b: int) -> int:
    return b if a is None else min(a, b)
