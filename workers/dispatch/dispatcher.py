"""The way of a request through the worker: validate, queue, run, answer. Belongs to the worker's loop.

    submit ─▶ queue of its version ─▶ batch ─▶ right here (one instance)  ─▶ answer in place ─▶ completion on the lane
                                            └▶ an instance's thread       ─▶
                                            └▶ parked while its shape is compiled, then queued again

Batches of a jitted model with one instance run right here: the model whose head has waited longest goes first. Every request in
``Submitter.in_flight`` gets exactly one final completion.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tensord.config import rate_limits
from tensord.config.options import Options
from tensord.shm.errors import Cancelled, Internal, InvalidArgument, ServingError, Unavailable
from tensord.shm.messages import FormSubmit, Submit, Taken
from tensord.shm.refusals import Refusal
from tensord.shm.status_page import StatusPage
from tensord.workers.dispatch.answers import failure
from tensord.workers.dispatch.cached_answers import CachedAnswers
from tensord.workers.dispatch.calls import Calls
from tensord.workers.dispatch.ensembles import EnsembleRuns
from tensord.workers.dispatch.expiry import Expiry
from tensord.workers.dispatch.instance_turns import InstanceTurns
from tensord.workers.dispatch.jitted_turns import JittedTurns
from tensord.workers.dispatch.outbox import Outbox
from tensord.workers.dispatch.responses import Responses
from tensord.workers.dispatch.shape_compiler import COMPILER_DESK, ShapeCompiler
from tensord.workers.dispatch.stepping import SteppingTurns
from tensord.workers.dispatch.validation import validate, validate_formed
from tensord.workers.models.execution import Execution
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import ModelVersion, by_version
from tensord.workers.models.rate_limiter import RateLimiter
from tensord.workers.models.statistics import Failure
from tensord.workers.programs.run_errors import CheckDevice, works
from tensord.workers.regions.region_table import RegionTable
from tensord.workers.requests.request import Request, controls_of, named
from tensord.workers.requests.submitter import Submitter
from tensord.workers.scheduling.planner import earlier
from tensord.workers.threads.work_thread import WorkThread

_log = logging.getLogger(__name__)
#: Of the places on the status page those behind the loop's and the compiler's.
FIRST_INSTANCE_DESK = COMPILER_DESK + 1


def _at_once(call: Callable[[], None]) -> None:
    """Where no other thread calls."""
    call()


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
        post: Callable[[Callable[[], None]], None] = _at_once,
    ) -> None:
        """
        Args:
          check: of the worker's device.
          gpu: its number, None of the processor.
          post: has the loop call something, from any thread.
        """
        self._models = models
        self._regions = regions
        self._page = page
        self._clock = clock
        self._outbox = Outbox(options.arenas)
        self._cached = CachedAnswers(self._outbox, clock)
        self._responses = Responses(options.arenas, self._outbox, post, clock, options.responses.max_ahead)
        self.took = self._responses.took
        self.limiter = RateLimiter(rate_limits.limits(options.rate_limit, gpu) or {})
        self.ensembles = EnsembleRuns(
            models, self._outbox, self._responses, page, clock, self.enter, self._finish, self.withdraw
        )
        self._compiler = ShapeCompiler(
            compiler, page, self._outbox, options.executables.max_unexpected_shapes, clock, check, self._restore
        )
        self._instances = InstanceTurns(
            self.limiter, self._compiler, self._responses, self._outbox.prepare, self._take, self._finish
        )
        self.jitted = JittedTurns(
            self._outbox, self._compiler, self.ensembles, page, clock, check, self._take, self._finish
        )
        self._stepping = SteppingTurns(self._responses, page, clock, check)
        self._expiry = Expiry(models, self._outbox)
        self.calls = Calls(
            models,
            self._responses,
            self.ensembles,
            self.limiter,
            clock,
            post,
            self.enter,
            self.withdraw,
            options.requests.max_calls,
        )
        #: Executions whose answers are placed, and when they were; see ``count``.
        self._uncounted: list[tuple[ModelVersion, Execution, dict[Request, Failure], int]] = []
        #: Versions with requests that wait, or are stepped.
        self._active: dict[ModelVersion, None] = {}
        #: Whether requests were queued that were made inside the worker.
        self._entered = False

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
            version.loaded.join(request)
        except ServingError as error:
            submitter.answer(failure(record.request_id, error))
            return
        except Exception as error:  # a defect of ours must not cost the other requests
            _log.exception("%svalidating a request for model '%s' failed", named(record.client_id), submit.model)
            submitter.answer(failure(record.request_id, Internal(f"the request failed with {type(error).__name__}")))
            return
        submitter.in_flight[record.request_id] = request
        self._admit(version, request, now_ns)

    def _admit(self, version: ModelVersion, request: Request, now_ns: int) -> None:
        """Answers a request from the cache, starts it if it is to an ensemble, or queues it."""
        if version.cache is not None and self._cached.answer(version, request, version.cache):
            return
        self._queue(version, request, now_ns)

    def enter(self, version: ModelVersion, request: Request, now_ns: int) -> None:
        """Takes a request that was made inside the worker. Raises ServingError: it is not one for that model."""
        version.loaded.join(request)
        self._entered = True
        self._admit(version, request, now_ns)

    def _queue(self, version: ModelVersion, request: Request, now_ns: int) -> None:
        """Puts a request where it waits; a full queue answers it."""
        waiting = version.compiling.get(request.key) if version.sequences is None else None
        if now_ns >= self._expiry.next_ns:
            self._expiry.end(now_ns)
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
        self._expiry.note(version, now_ns)

    def cancel(self, submitter: Submitter[Request], request_id: int) -> None:
        """Drops a request that waits; one that runs is answered when it is done. Ignores what is not in flight."""
        request = submitter.in_flight.get(request_id)
        if request is not None:
            self.withdraw(request)

    def withdraw(self, request: Request) -> None:
        """As ``cancel``, of one that is in flight or was made inside the worker."""
        request.cancelled = True
        self._outbox.fail_all(request.version.planner.cancelled(request), self._clock())
        self._responses.cancelled(request)
        self.ensembles.cancel(request)
        self.calls.cancelled(request)

    def taken(self, submitter: Submitter[Request], record: Taken) -> None:
        """Responses of a request have reached its client. Ignores what is not in flight."""
        request = submitter.in_flight.get(record.request_id)
        if request is not None:
            self._responses.taken(request, record.byte_size)

    def drop(self, submitter: Submitter[Request]) -> None:
        """The submitter is gone: its waiting requests go, its running ones are forgotten when they end."""
        submitter.closed = True
        for request in list(submitter.in_flight.values()):
            self.withdraw(request)
        now_ns = self._clock()
        for request in submitter.held:
            request.version.executing -= 1
            self._outbox.fail_all(request.version.planner.dropped(request, now_ns), now_ns)
        self._outbox.drop(submitter)

    # ---------------------------------------------------------------------------------------------------------- running

    def run_due(self, now_ns: int) -> int | None:
        """Runs jitted batches of at most one model and fills every free instance.

        Returns: when to be called again at the latest (not after ``now_ns``: at once); None: only when something arrives.
        """
        next_ns: int | None = None
        self._entered = False
        if self._outbox.blocked:
            for version, requests in by_version(self._outbox.retry(now_ns)).items():
                version.executing -= len(requests)
                self._restore(version, requests)
            next_ns = self._outbox.next_give_up_ns
        if self._responses.gathering and (look_ns := self._responses.gather(now_ns)) is not None:
            next_ns = earlier(next_ns, look_ns)
        if self._responses.blocked and (again_ns := self._responses.retry(now_ns)) is not None:
            next_ns = earlier(next_ns, again_ns)
        if now_ns >= self._expiry.next_ns:
            self._expiry.end(now_ns)
        first: ModelVersion | None = None
        first_due_ns = 0
        for version in list(self._active):
            planner = version.planner
            if 0 < planner.next_tick_ns <= now_ns:
                self._expiry.tick(version, now_ns)
            if not len(planner) and not planner.lives:
                del self._active[version]
                if version.limited and self._instances.withdraw(version, now_ns):
                    next_ns = now_ns
                continue
            if planner.next_tick_ns:
                next_ns = earlier(next_ns, planner.next_tick_ns)
            if version.steps is not None:
                self._stepping.dispatch(version, now_ns)
                continue
            if version.loaded.instances:
                due_ns = self._instances.fill(version, now_ns)
                if due_ns is not None:
                    next_ns = earlier(next_ns, due_ns)
                continue
            due_ns = planner.due_ns()
            if due_ns is None:
                continue
            if due_ns > now_ns:
                next_ns = earlier(next_ns, due_ns)
            elif first is None or due_ns < first_due_ns:
                if first is not None:
                    next_ns = now_ns
                first, first_due_ns = version, due_ns
            else:
                next_ns = now_ns
        if first is not None:
            self.jitted.run(first, now_ns, alone=len(self._active) == 1)
            if len(first.planner):
                next_ns = now_ns
        if self._stepping.versions and self._stepping.pending:
            self._stepping.read(wait=not self._entered and (next_ns is None or next_ns > now_ns))
            self._page.set_state(self.jitted.resting_state, self._clock())
            next_ns = now_ns
        if self.calls.any and (again_ns := self.calls.settle(now_ns)) is not None:
            next_ns = earlier(next_ns, again_ns)
        return now_ns if self._entered else next_ns

    def _take(self, version: ModelVersion, now_ns: int, instance: int = 0) -> list[Request]:
        """The next batch, without requests of submitters that do not take their answers."""
        batch = version.take(now_ns, instance)
        if not self._outbox.blocked:
            return batch
        kept = [request for request in batch if not self._outbox.hold(request)]
        version.executing += len(batch) - len(kept)
        return kept

    def _restore(self, version: ModelVersion, requests: list[Request]) -> None:
        """Queues requests again that were taken and could not run, ahead of those that came later."""
        now_ns = self._clock()
        waiting = [request for request in requests if not self._gone(request, now_ns)]
        self._outbox.fail_all(version.planner.restore(waiting, now_ns), now_ns)
        self._active[version] = None

    def _gone(self, request: Request, now_ns: int) -> bool:
        """Ends a request that nobody waits for any more."""
        if not request.submitter.closed and not request.cancelled:
            return False
        others = request.version.planner.dropped(request, now_ns)
        self._outbox.fail_all([*others, (request, Cancelled("the request was cancelled"))], now_ns)
        return True

    # ---------------------------------------------------------------------------------------------------------- answers

    def _finish(self, version: ModelVersion, execution: Execution) -> None:
        if execution.by_senders:
            self._responses.returned(execution)
        if version.free_state is not None and version.sequences is not None:
            version.free_state.keep(execution, version.sequences.table.sequences)
        if version.cache is not None:
            self._cached.keep(version, execution, version.cache)
        failed = self._outbox.answer_all(execution, self._clock())
        now_ns = self._clock()
        if execution.lost:
            lost = version.lose(execution.requests[0].slot.instance, now_ns)
            self._outbox.fail_all(lost, now_ns, Failure.BACKEND)
        version.planner.done(execution.requests, now_ns)
        version.planner.done(execution.streamed, now_ns)
        if execution.again and version.loaded.sequences is not None:
            for request in execution.again:
                version.loaded.sequences.join_again(request)
            self._restore(version, execution.again)
        self._uncounted.append((version, execution, failed, now_ns))

    def count(self) -> list[tuple[ModelVersion, Execution]]:
        """Counts what was executed; after its answers have left, because nobody waits for that. Returns what that was."""
        if not self._uncounted:
            return []
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
    def gathering(self) -> bool:
        """Whether responses of a model are looked for in a moment."""
        return self._responses.gathering

    @property
    def idle(self) -> bool:
        """Whether no request waits for its turn, and no answer for room."""
        blocked = self._outbox.blocked or self._responses.blocked
        return not (blocked or (self._active and any(len(version.planner) for version in self._active)))

    def __repr__(self) -> str:
        return f"<Dispatcher {len(self._active)} models with work>"
