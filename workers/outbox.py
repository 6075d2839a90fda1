"""Answers on their way out: placed at once where there is room, kept for a bounded time where the response arena is full.

    answer ─▶ placed ─▶ completion queued on the lane
          └─▶ blocked, oldest first ──room──▶ placed
                                    └─time──▶ 503 with both numbers

A submitter whose blocked answers hold more than a whole arena gets nothing more computed until it takes some: its requests are
held. Every way out of here ends a request exactly once.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Mapping

from config.options import Arenas
from shm.arrays import Array
from shm.errors import Cancelled, Internal, ServingError, Unavailable
from shm.forms import answer_template, own_contents
from shm.messages import Completion, FormCompletion
from workers.answers import complete, complete_planned, complete_small, failure, plan_answer
from workers.known_form import KnownForm
from workers.models.batch_outputs import BatchOutputs
from workers.models.executables import Executable
from workers.models.execution import Execution, Result
from workers.places import Places
from workers.request import Request
from workers.statistics import Failure
from workers.submitter import BlockedAnswer, Submitter

_log = logging.getLogger(__name__)


class _Placing(enum.Enum):
    """How placing an answer can end besides well and with an error."""

    #: The response arena has no room now.
    FULL = enum.auto()


class Outbox:
    """One per worker; belongs to its loop."""

    def __init__(self, options: Arenas) -> None:
        self._options = options
        self._wait_ns = int(options.wait * 1e9)
        #: Submitters with blocked answers.
        self._blocked: dict[Submitter, None] = {}

    def fail(self, request: Request, error: ServingError) -> None:
        """Answers with an error and ends the request."""
        answer = failure(request.request_id, error, request.version.version)
        request.submitter.answer(answer if request.timeline is None else request.timeline.attach(answer))
        self.end(request)

    def end(self, request: Request) -> None:
        """The request is over: its regions are free, its id may be forgotten."""
        if request.regions:
            request.release()
        request.submitter.in_flight.pop(request.request_id, None)

    def prepare(self, execution: Execution, sizes: Mapping[str, int]) -> None:
        """Finds places for the large outputs of a lone request, so that its program may write them there by itself.

        Where they cannot be found, or not now, the answer finds out again, and says so.
        """
        (request,) = execution.requests
        executable, submitter, outputs = execution.executable, request.submitter, request.outputs
        if not isinstance(executable, Executable) or submitter.blocked or submitter.closed or request.cancelled:
            return
        if outputs:
            if any(wanted.classification for wanted in outputs.values()):
                return
            sizes = {name: size for name, size in sizes.items() if name in outputs}
        with contextlib.suppress(ServingError):
            execution.places = Places.find(request, sizes, self._options.inline_byte_size)
        if execution.places is not None:
            execution.places.offer(request, executable)

    def answer_all(self, execution: Execution, now_ns: int) -> dict[Request, Failure]:
        """Answers every request of a batch. Returns those that got an error, and why."""
        failed: dict[Request, Failure] = {}
        row = 0
        for i, request in enumerate(execution.requests):
            if execution.outputs is None or not self._place_small(request, execution.outputs, row):
                reason = self._answer_long(execution, i, now_ns)
                if reason is not None:
                    failed[request] = reason
            row += request.rows
        if execution.places is not None:
            # What lies in its place already is given up: others own that memory from now on.
            execution.results = []
            if not execution.places.close() and isinstance(execution.executable, Executable):
                execution.executable.keep_outputs()
        return failed

    def _answer_long(self, execution: Execution, i: int, now_ns: int) -> Failure | None:
        """Answers one request of a batch with its result. Returns why it got an error."""
        request, result = execution.requests[i], execution.results[i]
        if request.timeline is not None:
            request.timeline.executed(execution, request.arrays, result)
        given = self.answer(request, result, now_ns, execution.places)
        return _reason(given, result) if isinstance(given, ServingError) else None

    def _place_small(self, request: Request, made: BatchOutputs, row: int) -> bool:
        """Answers a request of the most frequent kind. False: it is another kind, or it cannot be answered well."""
        submitter = request.submitter
        if submitter.blocked or submitter.closed or request.cancelled or request.timeline is not None:
            return False
        version, form = request.version, request.form
        plan = None if form is None else form.plans.get(made.layout)
        try:
            if plan is not None:
                formed = complete_planned(request, plan, made, row)
                if formed is None:
                    return False
                submitter.lane.complete_formed(plan.form, formed)
                submitter.unflushed = True
            else:
                completion = complete_small(request, made, row, version.version, self._options.inline_byte_size)
                if completion is None:
                    return False
                submitter.answer(completion)
                if form is not None and form.familiar is version.familiar:
                    kind = submitter.lane.answer_form(answer_template(completion))
                    form.plan(made.layout, plan_answer(kind, request, made.layout))
        except ServingError:
            # What is wrong with a region is found again, and said, by the long way.
            return False
        version.statistics.copied(request.copied_byte_size)
        self.end(request)
        return True

    def answer(self, request: Request, result: Result, now_ns: int, places: Places | None = None) -> Result:
        """Answers with a result. Returns what the client gets: the result, or the error it became.

        ``places``: those found before the run; the caller's to close.
        """
        if isinstance(result, ServingError):
            self.fail(request, result)
        elif request.submitter.blocked and not request.submitter.closed:
            self._block(request, result, now_ns)
        else:
            error = self._place(request, result, places)
            if error is None:
                return result
            if error is _Placing.FULL:
                self._block(request, result, now_ns)
            else:
                self.fail(request, error)
                return error
        return result

    def _place(
        self, request: Request, result: dict[str, Array], places: Places | None = None
    ) -> ServingError | _Placing | None:
        """None: placed and ended. ``FULL``: try again later. Anything else: answer that."""
        if request.submitter.closed:
            self.end(request)
            return None
        if request.cancelled:
            return Cancelled("the request was cancelled")
        version = request.version
        try:
            inline_byte_size = self._options.inline_byte_size
            completion = complete(request, result, version.signature, version.version, inline_byte_size, places)
        except ServingError as error:
            # Its frames would be a cycle with the result they become, and keep a client's mapping until the collector comes by.
            return error.with_traceback(None)
        except Exception as error:  # an array no one expected: this request's answer, nobody else's
            _log.exception("placing the outputs of model '%s' failed", version.name)
            return Internal(f"the outputs of model '{version.name}' could not be placed: {type(error).__name__}")
        if completion is None:
            return _Placing.FULL
        form = request.form
        # Parameters are each answer's own: it has no form.
        formed = form is not None and completion.lease is not None and not completion.parameters
        try:
            if form is not None and formed and form.familiar is version.familiar:
                _answer_formed(request.submitter, form, completion)
            else:
                request.submitter.answer(
                    completion if request.timeline is None else request.timeline.attach(completion)
                )
        except Exception as error:  # it cannot be written as a record: nothing of it is on the lane
            if completion.lease is not None:
                request.submitter.lane.arena.release(completion.lease)
            _log.exception("an answer of model '%s' could not be sent", version.name)
            return Internal(f"the answer of model '{version.name}' could not be sent: {type(error).__name__}")
        version.statistics.copied(request.copied_byte_size)
        self.end(request)
        return None

    # ---------------------------------------------------------------------------------------------------------- waiting

    def _block(self, request: Request, result: dict[str, Array], now_ns: int) -> None:
        submitter = request.submitter
        byte_size = sum(array.nbytes for array in result.values())
        submitter.blocked.append(BlockedAnswer(request, result, byte_size, now_ns + self._wait_ns))
        submitter.blocked_byte_size += byte_size
        self._blocked[submitter] = None

    @property
    def blocked(self) -> bool:
        """Whether any submitter does not take its answers."""
        return bool(self._blocked)

    def hold(self, request: Request) -> bool:
        """True: keeps a request from being run, because its submitter does not take the answers it has."""
        if not self._blocked or request.submitter.blocked_byte_size <= self._options.byte_size:
            return False
        request.submitter.held.append(request)
        return True

    def retry(self, now_ns: int) -> list[Request]:
        """Places what fits by now and gives up on what waited too long. Returns requests that may be run again."""
        freed: list[Request] = []
        for submitter in list(self._blocked):
            while submitter.blocked:
                waiting = submitter.blocked[0]
                error = self._place(waiting.request, waiting.result)
                if error is _Placing.FULL:
                    if now_ns < waiting.give_up_ns:
                        break
                    error = Unavailable(_describe_full(submitter, waiting.byte_size))
                submitter.blocked.popleft()
                submitter.blocked_byte_size -= waiting.byte_size
                if error is not None:
                    self.fail(waiting.request, error)
            if submitter.blocked_byte_size <= self._options.byte_size:
                freed += submitter.held
                submitter.held = []
            if not submitter.blocked:
                del self._blocked[submitter]
        return freed

    @property
    def next_give_up_ns(self) -> int | None:
        """When ``retry`` must be called although no room came."""
        return min((submitter.blocked[0].give_up_ns for submitter in self._blocked), default=None)

    def drop(self, submitter: Submitter) -> None:
        """Ends everything that waits for a submitter that is gone."""
        for waiting in submitter.blocked:
            self.end(waiting.request)
        for request in submitter.held:
            self.end(request)
        submitter.blocked.clear()
        submitter.held.clear()
        submitter.blocked_byte_size = 0
        self._blocked.pop(submitter, None)

    def __repr__(self) -> str:
        return f"<Outbox {len(self._blocked)} submitters blocked>"


def _answer_formed(submitter: Submitter, form: KnownForm, completion: Completion) -> None:
    """Queues a large answer as one of its form."""
    kind = form.large = submitter.lane.answer_form(answer_template(completion))
    contents = own_contents(completion.outputs)
    submitter.lane.complete_formed(kind, FormCompletion(completion.request_id, kind.number, contents, completion.lease))
    submitter.unflushed = True


def _reason(error: ServingError, result: Result) -> Failure:
    if error is result:
        return Failure.BACKEND
    return Failure.CANCELED if isinstance(error, Cancelled) else Failure.OTHER


def _describe_full(submitter: Submitter, byte_size: int) -> str:
    found = submitter.lane.arena.statistics()
    return (
        f"no room for an answer of {byte_size} bytes in the response arena: "
        f"{found['leased_byte_size']} of {found['max_byte_size']} are in use"
    )
