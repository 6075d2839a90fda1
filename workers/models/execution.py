"""Runs a model on a batch of requests, so that a bad request fails alone and not the batch.

If the model raises a ServingError, the client gets it. Any other exception is a defect of the model: the client gets one
sentence, and the worker's log the traceback. A failed batch is run again request by request, unless the model keeps state
between requests or may have answered some of them: then all of its requests fail.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tensord.shm.cuda_regions import CudaError
from tensord.shm.errors import Internal, ServingError, Unavailable
from tensord.shm.seldom import LineRate
from tensord.workers.calls.caller import Caller, ModelPort
from tensord.workers.parameters.parameter_set import ParameterSet, ParameterSets
from tensord.workers.parameters.set_stack import BatchSets
from tensord.workers.programs.carry import StateLost
from tensord.workers.programs.executable import Executable
from tensord.workers.programs.grouped_calls import GroupedProgram
from tensord.workers.programs.run_errors import CheckDevice, is_out_of_memory, out_of_memory, works
from tensord.workers.regions.places import Places
from tensord.workers.requests.request import Request, named, traced
from tensord.workers.requests.response_sender import ResponseReceiver, ResponseSender
from tensord.workers.requests.result import Result
from tensord.workers.scheduling.sequence import state_lost
from tensord.workers.tensors.output_layout import BatchOutputs

_log = logging.getLogger(__name__)
#: Failures of models that this process logs, with stack traces, in a second: a client that makes one fail shall not fill the log.
_FAILURES = LineRate(10)


@dataclass(slots=True, eq=False, repr=False)
class Execution:
    """One run of a model on a batch: the requests, their results, and the times for statistics."""

    requests: Sequence[Request]
    began_ns: int
    #: The program of a jitted model, if it is known already.
    executable: Executable | GroupedProgram | None = None
    #: The batch that this run is a part of, if that is run again request by request; None: it is part of no other.
    whole: Execution | None = None
    #: True if the run has failed, and with it the state of all sequences of its instance is lost.
    lost: bool = False
    #: True if no sequence has gone on by the run, if it fails without ``lost``.
    intact: bool = False
    #: Rows of the batch, as the model saw it, that belong to none of ``requests``.
    rows_of_nobody: int = 0
    #: Requests of the batch that have no answer yet: they are to be run once more.
    again: list[Request] = field(default_factory=list)
    #: Returns who takes what the model sends to a request; None: the batch is a warmup sample, and nobody does.
    responder: Callable[[Request], ResponseSender] | None = None
    #: True if requests may be answered by senders, and by which.
    by_senders: bool = False
    senders: list[ResponseSender] = field(default_factory=list)
    #: The requests of ``requests`` that senders answer, once the model has returned.
    streamed: Sequence[Request] = ()
    #: Has the thread that runs this call something later.
    resume: Callable[[Callable[[], None]], None] | None = None
    #: How often the model was applied: once to a batch, or to each request of a grouped call.
    runs: int = 1
    #: The parameter set that the batch is computed with, or that of each request; None: the run has not begun, or the model
    #: has no sets.
    parameters: ParameterSet | BatchSets | None = None
    _results: list[Result] = field(default_factory=list)
    #: Makes ``results`` when they are first asked for; None: they are there.
    cut: Callable[[], list[Result]] | None = None
    #: The outputs as bytes, from which answers are cut without ``results``; None: that is not possible.
    outputs: BatchOutputs | None = None
    #: Where the outputs of a single request go, if that was found before the run, so that the program may write them there.
    places: Places | None = None
    #: When the inputs were where the model wants them.
    gathered_ns: int = 0
    #: When the model was done and its outputs were readable.
    computed_ns: int = 0
    #: Input bytes that were copied because of batching, padding or alignment.
    copied_byte_size: int = 0
    #: Rows, and elements of inputs, that the program computed for no request, because of its bucket; None: none.
    padding: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.gathered_ns = self.computed_ns = self.began_ns

    @property
    def moments(self) -> tuple[int, int, int]:
        """The times in ns at which the run began, had gathered its inputs, and had computed its outputs."""
        return self.began_ns, self.gathered_ns, self.computed_ns

    def parameters_of(self, request: Request) -> ParameterSet | None:
        """Returns the parameter set that a request is computed with; None: the run has not begun, or the model has no sets."""
        return self.parameters.of(request) if isinstance(self.parameters, BatchSets) else self.parameters

    def choose(self, sets: ParameterSets) -> ParameterSet | BatchSets:
        """Returns the parameter set with which the whole batch runs. Raises NotFound: a request names a set that is not there.

        If one batch may use several parameter sets, returns a ``BatchSets``, which has a set for each request.
        """
        if self.parameters is None:
            if sets.stack is None:
                self.parameters = chosen_by(sets, self.requests)
            else:
                self.parameters = BatchSets({request: chosen_by(sets, [request]) for request in self.requests})
        return self.parameters

    def time(self, request: Request) -> None:
        """Stores in ``request`` when this run began and ended, and about how many input bytes were copied for the request."""
        gathered = 0
        if self.copied_byte_size:
            gathered = self.copied_byte_size * request.rows // sum([each.rows for each in self.requests])
        request.ran_in(self.began_ns, self.computed_ns, gathered)

    @property
    def results(self) -> list[Result]:
        """One result for each request, in the order of ``self.requests``: the request's outputs, or an error if it failed.

        The result of a request that a ``ResponseSender`` answers is ``STREAMED``.
        """
        if self.cut is not None:
            self.results = self.cut()
        return self._results

    @results.setter
    def results(self, results: list[Result]) -> None:
        self._results = results
        self.cut = None

    def sender(self, request: Request) -> ResponseSender:
        """Returns the sender of a request's responses. The model must then set the request's result to ``STREAMED``."""
        self.by_senders = True
        if self.responder is None:
            return ResponseSender(request, ResponseReceiver(), self.began_ns)
        sender = self.responder(request)
        sender.begin(self.began_ns)
        self.senders.append(sender)
        return sender

    def caller(self, port: ModelPort) -> Caller:
        """Returns the ``Caller`` with which the model's code calls other models for the requests of this batch."""
        if self.responder is None:
            return Caller(port)
        return Caller(port, self.requests, self.whole or self)

    def finish(self, results: list[Result | None]) -> None:
        """Stores a result for each request, in order. A request whose result is None leaves this batch and is run again."""
        pairs = list(zip(self.requests, results, strict=True))
        self.again = [request for request, result in pairs if result is None]
        if self.again:
            self.requests = [request for request, result in pairs if result is not None]
            self.rows_of_nobody += len(self.again)
        self.results = [result for result in results if result is not None]


def chosen_by(sets: ParameterSets, requests: Sequence[Request]) -> ParameterSet:
    """Returns the parameter set that all ``requests`` name, or ``main`` if they name none. Raises NotFound: no such set."""
    chosen = requests[0].chosen
    found = sets.main if chosen is None else chosen if isinstance(chosen, ParameterSet) else sets.find(chosen)
    if sets.told:
        for request in requests:
            if request.tells:
                request.told = found.said()
    return found


class Describing(Protocol):
    """A model that can describe its failures to clients."""

    def describe(self, error: BaseException) -> str:
        """Returns the sentence for clients after a failure of the model. It has no path and no traceback."""


class RunnableModel(Describing, Protocol):
    """A model that runs batches."""

    def execute(self, execution: Execution) -> None:
        """Runs a batch. Stores the results of its requests and the times of the run in ``execution``.

        If the run fails, raises the model's error and stores no result. Raises StateLost if all sequences lost their state.
        """


def run(model: RunnableModel, execution: Execution, check: CheckDevice = works) -> None:
    """Runs a batch, so that each request has a result or an error. ``check``: raises an error if the device has failed."""
    try:
        model.execute(execution)
    except BaseException as error:  # also sys.exit() in a model: it must cost its request an answer, not the thread
        requests = execution.requests
        if isinstance(error, StateLost):
            execution.lost = True
            execution.results = _lost(model, error, execution, check)
        elif len(requests) == 1 or execution.by_senders or not (execution.intact or requests[0].version.repeatable):
            failed = own_failure(model, error, execution, check)
            execution.results = [failed] * len(requests)
            # At once: what the model holds of them goes with the error, and would say something else.
            for sender in execution.senders:
                sender.fail(failed)
        else:
            execution.results = []
            for request in requests:
                single = Execution([request], execution.began_ns)
                single.responder, single.whole = execution.responder, execution.whole or execution
                single.parameters = execution.parameters_of(request)
                run(model, single, check)
                execution.by_senders |= single.by_senders
                execution.results += single.results
        now_ns = time.monotonic_ns()
        execution.gathered_ns = min(max(execution.gathered_ns, execution.began_ns), now_ns)
        execution.computed_ns = now_ns


def _lost(model: RunnableModel, error: StateLost, execution: Execution, check: CheckDevice) -> list[Result]:
    requests = execution.requests
    cause = error.__cause__ or error
    _log_failure(f"{model.describe(cause)}, and with it the state of all sequences", cause, requests)
    try:
        check()
    except ServingError as lost:
        return [lost.with_traceback(None)] * len(requests)
    return [state_lost(request.controls.correlation_id, request.prepared.model) for request in requests]


def own_failure(
    model: Describing, error: BaseException, execution: Execution, check: CheckDevice = works
) -> ServingError:
    """Returns the error for clients after a model failed on a batch. Logs the failure, unless ``error`` is a ServingError.

    ``check``: raises a ServingError if the device has failed. ``own_failure`` catches that error and returns it.
    """
    if isinstance(error, ServingError):
        # Without the frames: they hold the requests, and the result they become holds them.
        return error.with_traceback(None)
    if is_out_of_memory(error):
        program = execution.executable
        failed = out_of_memory(error, execution.requests, None if program is None else program.memory_needed)
        _log_failure(f"{named(execution.requests[0].client_id)}{failed.message}", None, execution.requests)
        return failed
    _log_failure(f"{named(execution.requests[0].client_id)}{model.describe(error)}", error, execution.requests)
    try:
        check()
    except ServingError as lost:
        return lost.with_traceback(None)
    if isinstance(error, CudaError):
        # It passes, and is none of the model's.
        model_name = execution.requests[0].prepared.model
        return Unavailable(f"model '{model_name}': the GPU's driver refused a call for this request ({error.name})")
    return Internal(model.describe(error))


def _log_failure(sentence: str, error: BaseException | None, requests: Sequence[Request]) -> None:
    if _FAILURES.admits():
        _log.error("%s%s", sentence, _FAILURES.say_left_out(), exc_info=error, extra=traced(requests))
