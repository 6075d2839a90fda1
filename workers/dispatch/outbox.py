"""Sends answers. If the response arena has no room for an answer, the answer waits for room, up to a time limit.

At the end of the time limit, or at once if too many bytes of answers wait already, the request is answered with error 503,
which says how many bytes are needed and in use. A small answer does not wait for a large one, unless the model's answers must
be sent in the order of the requests.
While many bytes of answers to a submitter wait, the submitter's requests whose answers are likely to be large are not run.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import cast

import msgspec

from tensord.config.options import Arenas
from tensord.shm.arrays import Array
from tensord.shm.errors import Cancelled, Internal, Replaced, ServingError, Unavailable
from tensord.shm.messages import TIMING, AnswerRecord, PreparedAnswer, RequestRecord
from tensord.shm.prepared import Numbered
from tensord.shm.refusals import Refusal, RefusalLog
from tensord.workers.dispatch.answers import complete, complete_planned, failure, find_places, plan_answer
from tensord.workers.dispatch.lane_answers import LaneAnswers
from tensord.workers.models.execution import Execution
from tensord.workers.models.model_version import AgendaPart
from tensord.workers.models.statistics import Failure
from tensord.workers.programs.executable import Executable
from tensord.workers.regions.places import Places
from tensord.workers.requests.preparation import AnswerPlan
from tensord.workers.requests.request import Moments, Request, hand_over, named, traced
from tensord.workers.requests.result import Result
from tensord.workers.requests.submitter_link import NEVER_LOOKED, BlockedAnswer, SubmitterLink
from tensord.workers.scheduling.agenda import NEVER, Agenda
from tensord.workers.tensors.output_layout import BatchOutputs, OutputLayout

_log = logging.getLogger(__name__)
#: Blocked answers of one submitter, in first segments of an arena: more are refused at once.
_MAX_BLOCKED = 4


class Outbox:
    """Sends one worker's answers to fronts and clients. Answers wait here for room in the response arena."""

    def __init__(self, options: Arenas, agenda: Agenda[AgendaPart], ended: Callable[[Request], None]) -> None:
        """Makes an outbox. ``ended``: called with each request that has failed, or has got its last response of several."""
        self._options = options
        self._wait_ns = int(options.wait * 1e9)
        #: Submitters with answers that wait for room, because earlier answers were not taken.
        self.blocked: dict[SubmitterLink[Request], None] = {}
        self.lane_answers = LaneAnswers()
        self._refusals = RefusalLog()
        self._agenda = agenda
        self.ended = ended

    def fail(self, request: Request, error: ServingError) -> None:
        """Answers a request with an error and ends it. If the model answers in order, earlier answers are sent first."""
        if (sender := request.version.senders.pop(request, None)) is not None:
            sender.end()  # it was to go round again
        if request.sink is not None:
            hand_over(request, error)
        elif self._overtakes(request):
            request.submitter.blocked.append(BlockedAnswer(request, error, 0, sys.maxsize))
        else:
            self._fail(request, error)
        self.ended(request)

    @staticmethod
    def _overtakes(request: Request) -> bool:
        """Returns whether the answer to a request must wait for an earlier answer of the same model to the same submitter."""
        submitter, version = request.submitter, request.version
        if not submitter.blocked or not version.ordered or submitter.closed or request.cancelled:
            return False
        return any(waiting.request.version is version for waiting in submitter.blocked)

    def _fail(self, request: Request, error: ServingError) -> None:
        answer = failure(request.request_id, error, request.version.version)
        request.submitter.answer(answer if request.timeline is None else request.timeline.attach(answer))
        self.end(request, error)

    def fail_all(
        self, answers: list[tuple[Request, ServingError]], now_ns: int, why: Failure = Failure.CANCELED
    ) -> None:
        """Answers accepted requests that will not run, each with its error. Counts each as failed, with the reason ``why``.

        A request whose error is of type ``Replaced`` is counted with the reason ``Failure.REPLACED`` instead of ``why``.
        """
        for request, error in answers:
            if not request.is_open:
                request.release()
                continue  # a response to it could not be sent, which has ended it
            reason = Failure.REPLACED if isinstance(error, Replaced) else why
            request.version.statistics.failed(now_ns - request.arrived_ns, reason)
            self.fail(request, error)

    def refuse(self, request: Request, refusal: Refusal, error: Unavailable, now_ns: int) -> None:
        """Answers a request with ``error``. Counts it as refused because of ``refusal``, such as a full queue, and logs this."""
        self._note(request, refusal, now_ns)
        self.fail(request, error)

    def _note(self, request: Request, refusal: Refusal, now_ns: int) -> None:
        request.version.statistics.refused[refusal] += 1
        self._refusals.note(request.version.name, refusal.value, now_ns)
        self._agenda.put(self._log_refusals, self._refusals.due_ns or NEVER)

    def _log_refusals(self, now_ns: int) -> None:
        self._refusals.settle(now_ns)
        self._agenda.put(self._log_refusals, self._refusals.due_ns or NEVER)

    def reject(self, submitter: SubmitterLink[Request], record: RequestRecord, error: ServingError) -> None:
        """Answers a submitter's invalid record with an error."""
        submitter.answer(failure(record.request_id, error))
        self.lane_answers.rejected(submitter, record, error)

    def end(self, request: Request, error: ServingError | None = None, runs: bool = False) -> None:
        """Releases an answered request's regions and frees its id. ``error``: the error that the client got, or None.

        ``runs``: whether the model may still read the inputs. The regions then stay leased until ``Request.release``.
        """
        if request.regions and not runs:
            request.release()
        submitter = request.submitter
        submitter.in_flight.pop(request.request_id, None)
        if submitter.segments is not None:
            submitter.forget(request.request_id)
            self.lane_answers.ended(request, error)

    def prepare(self, execution: Execution, sizes: Mapping[str, int]) -> None:
        """Reserves memory for large outputs of ``execution``, a run of one request, so that the program writes them there.

        ``sizes``: output name -> bytes. If there is no room, nothing is reserved: the outputs are copied after the run.
        """
        (request,) = execution.requests
        if request.sink is not None:
            return
        executable, submitter, outputs = execution.executable, request.submitter, request.outputs
        if not isinstance(executable, Executable) or submitter.blocked or submitter.closed or request.cancelled:
            return
        if outputs:
            if any(wanted.classification for wanted in outputs.values()):
                return
            sizes = {name: size for name, size in sizes.items() if name in outputs}
        # The answer looks for places again after the run, and reports the error.
        with contextlib.suppress(ServingError):
            execution.places = find_places(request, sizes, self._options.inline_byte_size)
        if execution.places is not None:
            executable.offer(execution.places)

    def answer_all(self, execution: Execution, now_ns: int) -> dict[Request, Failure]:
        """Answers the requests of a run. Returns the requests that got an error, each with the kind of its failure."""
        failed: dict[Request, Failure] = {}
        row = 0
        for i, request in enumerate(execution.requests):
            if request.own.trace & TIMING:
                execution.time(request)
            if execution.outputs is None or not self._place_small(request, execution.outputs, row):
                reason = self._answer_long(execution, i, now_ns)
                if reason is not None:
                    failed[request] = reason
            row += request.rows
        if execution.places is not None:
            # What lies in its place already is given up: others own that memory from now on.
            execution.results = []
            execution.places.release()
            if isinstance(execution.executable, Executable):
                execution.executable.settle(execution.places)
        return failed

    def _answer_long(self, execution: Execution, i: int, now_ns: int) -> Failure | None:
        request, result = execution.requests[i], execution.results[i]
        if request.timeline is not None:
            request.timeline.executed(execution.moments, request.arrays, result)
            if (ran := execution.parameters_of(request)) is not None and ran.number:
                request.timeline.parameters = ran.name, ran.number
        given = self.answer(request, result, now_ns, execution.places, execution.moments)
        return _reason(request, given, result) if isinstance(given, ServingError) else None

    def _place_small(self, request: Request, outputs: BatchOutputs, row: int) -> bool:
        submitter = request.submitter
        if submitter.closed or request.cancelled or request.timeline is not None or request.sink is not None:
            return False
        if submitter.blocked and self._overtakes(request):
            return False
        version, preparation = request.version, request.preparation
        plan = None if preparation is None else preparation.plans.get(outputs.layout)
        if plan is not None and request.tells and plan.told != request.told:
            plan = None
        plan = plan or self._plan(request, outputs.layout)
        if plan is None:
            return False
        try:
            answer = complete_planned(plan, request, outputs, row)
        except ServingError:
            # What is wrong with a region is found again, and said, by the long way.
            return False
        if answer is None:
            return False
        if request.own.trace:
            answer = request.timed(answer)
        submitter.lane.complete(answer, plan.numbered)
        submitter.flush_soon()
        version.statistics.copied_byte_size += request.copied_byte_size
        self.end(request)
        return True

    def _plan(self, request: Request, layout: OutputLayout) -> AnswerPlan | None:
        """Makes a plan for putting outputs of this layout into answers to such requests. Returns None if no plan is possible.

        Also stores the plan for later requests that have the same ``preparation``, unless the model was loaded again.
        """
        plan, preparation = plan_answer(request, layout, self._options.inline_byte_size), request.preparation
        if plan is not None and preparation is not None and preparation.load is request.version.checked:
            plan = plan.number(request.submitter.lane.number(cast(PreparedAnswer, plan.said)))
            preparation.plan(layout, plan)
        return plan

    def answer(
        self,
        request: Request,
        result: Result,
        now_ns: int,
        places: Places | None = None,
        moments: Moments | None = None,
    ) -> Result:
        """Answers a request with ``result``. If the response arena has no room, the answer waits for room, up to a time limit.

        Returns ``result`` if it was sent or waits. Returns an error if the client gets this error instead of ``result``, for
        example because too many bytes wait already. ``places``: the memory that was reserved for the request's outputs before
        the run. None: no memory was reserved. ``moments``: the times of the run, which a request of this worker gets; None: it
        has not run.
        """
        if request.sink is not None:
            given = Cancelled() if request.cancelled else result
            hand_over(request, given, moments)
            return given
        if isinstance(result, ServingError):
            self.fail(request, result)
            return result
        submitter, byte_size = request.submitter, sum(array.nbytes for array in result.values())
        placed: ServingError | bool = False
        small = byte_size <= submitter.lane.arena.small_byte_size
        if not submitter.blocked or submitter.closed or (small and not self._overtakes(request)):
            placed = self._place(request, result, places)
        if placed is False:
            placed = self._block(BlockedAnswer(request, result, byte_size, now_ns + self._wait_ns), now_ns)
        if isinstance(placed, ServingError):
            self.fail(request, placed)
            return placed
        return result

    def _place(self, request: Request, result: dict[str, Array], places: Places | None = None) -> ServingError | bool:
        if request.submitter.closed:
            self.end(request)
            return True
        if request.cancelled:
            return Cancelled()
        version = request.version
        try:
            answer = complete(request, result, self._options.inline_byte_size, places)
        except ServingError as error:
            # Its frames would be a cycle with the result they become, and keep a client's mapping until the collector comes by.
            return error.with_traceback(None)
        except Exception as error:  # an array no one expected: this request's answer, nobody else's
            name = named(request.client_id)
            _log.exception("%splacing the outputs of model '%s' failed", name, version.name, extra=traced([request]))
            return Internal(f"the outputs of model '{version.name}' could not be placed: {type(error).__name__}")
        if answer is None:
            return False
        if request.own.trace:
            answer = request.timed(answer)
        try:
            if request.timeline is not None:
                request.submitter.answer(request.timeline.attach(answer))
            else:
                request.submitter.answer(*_numbered(request, answer))
        except Exception as error:  # it cannot be written as a record: nothing of it is on the lane
            if answer.lease is not None:
                request.submitter.lane.arena.release(answer.lease)
            _log.exception("an answer of model '%s' could not be sent", version.name)
            return Internal(f"the answer of model '{version.name}' could not be sent: {type(error).__name__}")
        version.statistics.copied_byte_size += request.copied_byte_size
        self.end(request)
        return True

    # ---------------------------------------------------------------------------------------------------------- waiting

    def _block(self, answer: BlockedAnswer[Request], now_ns: int) -> ServingError | bool:
        submitter, request = answer.request.submitter, answer.request
        if submitter.blocked and submitter.blocked_byte_size + answer.byte_size > _MAX_BLOCKED * self._bound(submitter):
            return self.no_room(request, answer.byte_size, now_ns)
        submitter.blocked.append(answer)
        submitter.blocked_byte_size += answer.byte_size
        submitter.count_waiting()
        if answer.byte_size > submitter.lane.arena.small_byte_size:
            submitter.bulky.add((request.version, request.key))
        self.blocked[submitter] = None
        submitter.returned = NEVER_LOOKED
        return True

    def _bound(self, submitter: SubmitterLink[Request]) -> int:
        """Returns how many bytes of answers to ``submitter`` may wait before some of its requests are not run."""
        if submitter.segments is None:
            return self._options.byte_size
        return min(self._options.byte_size, submitter.segments.limits.response_byte_size // _MAX_BLOCKED)

    def no_room(self, request: Request, byte_size: int, now_ns: int) -> Unavailable:
        """Returns the error for an answer of ``byte_size`` bytes for which the arena has no room. Counts and logs the refusal."""
        self._note(request, Refusal.ANSWER_ROOM, now_ns)
        return Unavailable(_describe_full(request.submitter, byte_size))

    def hold(self, request: Request) -> bool:
        """Makes a request wait if too many bytes of answers to its submitter are unsent. Returns whether the request waits.

        Once the request may run, ``retry`` returns the request. A request whose answer is likely to be small does not wait.
        """
        submitter, version = request.submitter, request.version
        if request.sink is not None or submitter.blocked_byte_size <= self._bound(submitter):
            return False
        # A large answer of the same model and shapes waits or, if answers leave in order, any large one of the model.
        held = (version, request.key) in submitter.bulky
        if held or (version.ordered and any(bulky is version for bulky, _ in submitter.bulky)):
            submitter.held.append(request)
            return True
        return False

    def retry(self, now_ns: int) -> list[Request]:
        """Sends waiting answers for which the response arena has room now. Fails answers that have waited too long.

        Returns requests that may run now: they were held back because too many bytes of answers to their submitter waited.
        """
        freed: list[Request] = []
        for submitter in list(self.blocked):
            returned = submitter.returns
            if returned == submitter.returned and now_ns < submitter.blocked[0].give_up_ns:
                continue  # there is as little room as before
            submitter.returned = returned
            self._retry(submitter, now_ns)
            submitter.count_waiting()
            if submitter.blocked_byte_size <= self._bound(submitter):
                freed += submitter.held
                submitter.held = []
            if not submitter.blocked:
                submitter.bulky.clear()
                del self.blocked[submitter]
        return freed

    def _retry(self, submitter: SubmitterLink[Request], now_ns: int) -> None:
        small_byte_size = submitter.lane.arena.small_byte_size
        #: True if there is no room for small answers, and for large ones: none is placed before those that wait longer.
        full = [False, False]
        #: Versions whose answers leave in order and of which one is blocked still: no later answer of them may leave.
        waits: set[object] = set()
        waiting, submitter.blocked = submitter.blocked, deque()
        for answer in waiting:
            version, large = answer.request.version, answer.byte_size > small_byte_size
            placed: ServingError | bool = False
            if version not in waits or answer.request.cancelled:
                if isinstance(answer.result, ServingError):
                    placed = answer.result
                elif not full[large] or answer.request.cancelled:
                    placed = self._place(answer.request, answer.result)
                    full[large] = full[large] or placed is False
            if placed is False:
                if now_ns < answer.give_up_ns:
                    submitter.blocked.append(answer)
                    if version.ordered:
                        waits.add(version)
                    continue
                placed = self.no_room(answer.request, answer.byte_size, now_ns)
            submitter.blocked_byte_size -= answer.byte_size
            if isinstance(placed, ServingError):
                self._fail(answer.request, placed)

    @property
    def next_give_up_ns(self) -> int:
        """The time (CLOCK_MONOTONIC, ns) at which the time limit of the oldest waiting answer ends. ``NEVER`` if none waits."""
        return min([submitter.blocked[0].give_up_ns for submitter in self.blocked], default=NEVER)

    def drop(self, submitter: SubmitterLink[Request]) -> None:
        """Ends all requests of a lost submitter that ``hold`` made wait, or whose answers wait for room. Sends no answers."""
        for waiting in submitter.blocked:
            self.end(waiting.request)
        for request in submitter.held:
            self.end(request)
        submitter.blocked.clear()
        submitter.held.clear()
        submitter.bulky.clear()
        submitter.blocked_byte_size = 0
        submitter.count_waiting()
        self.blocked.pop(submitter, None)

    def __repr__(self) -> str:
        return f"<Outbox {len(self.blocked)} submitters blocked>"


def _numbered(request: Request, answer: AnswerRecord) -> tuple[AnswerRecord, Numbered[PreparedAnswer] | None]:
    preparation, prepared = request.preparation, cast(PreparedAnswer, answer.prepared)
    # Parameters are each answer's own, but for what it says of the parameter set.
    if preparation is None or len(prepared.parameters) > len(request.told):
        return answer, None
    if answer.lease is None and not any(tensor.region is not None for tensor in prepared.outputs):
        return answer, None
    if preparation.load is not request.version.checked:
        return answer, None
    numbered = preparation.large = request.submitter.lane.number(prepared)
    return msgspec.structs.replace(answer, prepared=numbered.number), numbered


def _reason(request: Request, error: ServingError, result: Result) -> Failure:
    # Whatever a model makes of it that nobody waits for it any more.
    if error is result and not request.cancelled:
        return Failure.BACKEND
    return Failure.CANCELED if request.cancelled or isinstance(error, Cancelled) else Failure.OTHER


def _describe_full(submitter: SubmitterLink[Request], byte_size: int) -> str:
    if submitter.owner is not None and submitter.lane.arena.over_budget:
        return submitter.owner.describe_full(byte_size)
    found = submitter.lane.arena.statistics()
    return (
        f"no room for an answer of {byte_size} bytes in the response arena: "
        f"{found['leased_byte_size']} of {found['max_byte_size']} are in use"
    )
