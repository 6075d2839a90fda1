"""Runs requests to ensembles (pipelines of models).

Each step of an ensemble becomes a request in the queue of another model of the worker, once the step's inputs are computed.
A compiled program may compute all steps for a batch of requests instead.
No thread waits for a step, so an ensemble may be a step of another ensemble. A request uses the same model versions from its
first step to its last. A request gets its last answer only when none of its steps runs any more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec

from tensord.shm.arrays import Array
from tensord.shm.errors import Cancelled, Internal, InvalidArgument, NotFound, ServingError, from_code
from tensord.shm.messages import Parameter, PreparedRequest
from tensord.shm.status_page import LOOP_SLOT, StatusPage
from tensord.workers.calls.asking import check_sequence
from tensord.workers.dispatch.outbox import Outbox
from tensord.workers.dispatch.responses import Responses
from tensord.workers.models.ensemble_pipeline import EnsemblePipeline, EnsemblePipelines, needs_steps
from tensord.workers.models.execution import Execution
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.models.statistics import Failure
from tensord.workers.programs.pipeline_program import PipelineProgram
from tensord.workers.requests.prepared import fitting, validate_inner
from tensord.workers.requests.request import InnerRequest, Moments, Request, controls_of
from tensord.workers.requests.response_sender import ResponseSender
from tensord.workers.requests.result import Response, Result
from tensord.workers.scheduling.ensemble_graph import EnsembleGraph
from tensord.workers.scheduling.ensemble_run import EnsembleRun, StepStart
from tensord.workers.scheduling.sequence import Controls
from tensord.workers.tensors.signature import TensorSpec

_log = logging.getLogger(__name__)
#: The parameters of an answer that are sequence controls.
_CONTROLS = {"sequence_id", "sequence_start", "sequence_end"}


class _Run:
    """The state of one request to an ensemble while its steps run."""

    def __init__(self, version: ModelVersion, graph: EnsembleGraph, request: Request, now_ns: int) -> None:
        self.version = version
        self.began_ns = now_ns
        self.graph = graph
        self.request = request
        needed = graph.needed(request.outputs)
        self.run: EnsembleRun[Array] = EnsembleRun(graph, needed)
        #: Number of each step that is needed -> the model version that it runs on.
        self.members: dict[int, ModelVersion] = {}
        #: Steps that are under way.
        self.waiting: dict[InnerRequest, None] = {}
        self.error: ServingError | None = None
        self.result: dict[str, Array] = {}
        #: Sums over all steps, in ns: queued, input, infer.
        self.durations = [0, 0, 0]
        #: Sends the responses of an ensemble that streams; None: the ensemble has one response.
        self.sender: ResponseSender | None = None
        #: A response that has not been sent, until it is known whether it is the last one.
        self.unsent: dict[str, Array] | None = None
        #: Responses of steps that stream which are not taken yet, because enough others are being worked on.
        self.untaken: deque[tuple[StepStart[Array], InnerRequest, Result]] = deque()


class EnsembleRuns:
    """Runs the requests to ensembles of one worker: step by step, or as pipelines of compiled programs."""

    def __init__(
        self,
        models: ModelTable,
        outbox: Outbox,
        responses: Responses,
        page: StatusPage,
        clock: Callable[[], int],
        enter: Callable[[ModelVersion, Request, int], None],
        finish: Callable[[ModelVersion, Execution], None],
        withdraw: Callable[[Request], None],
    ) -> None:
        """Stores the objects and functions of the worker that ensembles need.

        Args:
          clock: returns the time of CLOCK_MONOTONIC in ns.
          enter: queues the request of an ensemble's step. Its integer argument is the request's arrival time on this clock.
          finish: answers the requests of an execution.
          withdraw: cancels the request of a step.
        """
        self._models = models
        self._outbox = outbox
        self._responses = responses
        self._page = page
        self.pipelines = EnsemblePipelines(models)
        self._clock = clock
        self._enter = enter
        self._finish = finish
        self._withdraw = withdraw
        #: Request -> its run.
        self._runs: dict[Request, _Run] = {}
        #: Runs and starts of steps that are due: a step may answer while it is started, and its run is not entered twice.
        self._due: deque[tuple[_Run, StepStart[Array] | None]] = deque()
        self._working = False

    def run(self, version: ModelVersion, graph: EnsembleGraph, batch: list[Request], now_ns: int) -> bool:
        """Runs requests to an ensemble. If one program can compute all steps of some of these requests, runs the program.

        Starts the first steps of each request that was not computed by a program. Returns whether a program has run.
        """
        # A trace has each step; of what was being executed when a worker died each step is blamed for itself; and each step finds
        # the parameter set that its request names, and says which it was.
        steps = [
            request for request in batch if request.timeline is not None or request.own.strikes or needs_steps(request)
        ]
        together = [request for request in batch if request not in steps] if steps else batch
        found = self.pipelines.find(version, graph, together) if together else None
        ran = found is not None and self._run_pipeline(version, *found, together, now_ns)
        for request in steps if ran else batch:
            self.begin(version, graph, request)
        return ran

    def _run_pipeline(
        self,
        version: ModelVersion,
        pipeline: EnsemblePipeline,
        program: PipelineProgram,
        batch: list[Request],
        now_ns: int,
    ) -> bool:
        """Runs ``program`` for ``batch`` and answers the requests. Returns False, and answers none, if the program fails."""
        execution = Execution(batch, now_ns)
        self._page.begin(
            LOOP_SLOT, [(request.submitter.peer, request.request_id) for request in batch], version.page_key, now_ns
        )
        try:
            pipeline.run(execution, program)
        except Exception:
            return False
        finally:
            self._page.end(LOOP_SLOT, self._clock())
        self._finish(version, execution)
        pipeline.count(execution)
        return True

    def begin(self, version: ModelVersion, graph: EnsembleGraph, request: Request) -> None:
        """Starts the first steps of a request, or answers the request with an error if a model or parameter set is missing."""
        run = self._runs[request] = _Run(version, graph, request, self._clock())
        try:
            for number in graph.needed(request.outputs).numbers:
                step = graph.steps[number]
                member = self._models.find(step.model, step.version)
                if member.sequences is not None:
                    member = self._models.home(member, request.own.sequence_id, request.own.sequence_start)
                run.members[number] = member
            _check_set(request, run.members.values())
        except ServingError as error:
            self._fail(run, error)
        if version.loaded.streams:
            self._responses.open([request], self._clock())
            run.sender = version.senders[request]
        version.executing += 1
        for member in run.members.values():
            # So that it is there to the end, whatever is loaded or unloaded meanwhile.
            member.executing += 1
        if run.error is None:
            self._go_on(run, run.run.begun(request.arrays))
        self._work_on(run)

    def cancel(self, request: Request) -> None:
        """Cancels the unfinished steps of a cancelled request, and starts no further step of it."""
        run = self._runs.get(request)
        if run is None:
            return
        self._set_error(run, Cancelled())
        self._work_on(run)

    def steps(self, request: Request) -> list[InnerRequest] | None:
        """Returns the requests of the unfinished steps of an ensemble's ``request``; None: no ensemble works on ``request``."""
        run = self._runs.get(request)
        return None if run is None else list(run.waiting)

    def _go_on(self, run: _Run, instructions: list[StepStart[Array] | dict[str, Array]]) -> None:
        for instruction in instructions:
            if isinstance(instruction, StepStart):
                self._due.append((run, instruction))
                continue
            outputs = _fitted(instruction, run.version.signature.outputs, run.version.signature.batches)
            if run.sender is not None:
                self._send_unsent(run)
                run.unsent = outputs
            else:
                run.result = outputs

    def _work_on(self, run: _Run) -> None:
        self._due.append((run, None))
        if self._working:
            return
        self._working = True
        try:
            while self._due:
                run, start = self._due.popleft()
                if start is None:
                    self._end(run)
                elif run.error is not None:
                    run.run.ended(start)
                else:
                    self._start(run, start)
        finally:
            self._working = False

    # ---------------------------------------------------------------------------------------------------------- steps

    def _start(self, run: _Run, start: StepStart[Array]) -> None:
        request, member = run.request, run.members[start.step]
        step, own, now_ns = run.graph.steps[start.step], request.own, self._clock()
        controls = start.controls or controls_of(own)
        if start.controls is not None and member.sequences is not None:
            member = self._models.home(member, controls.correlation_id, controls.start)
        prepared = PreparedRequest(member.name, member.version, parameters=request.prepared.parameters)
        said = msgspec.structs.replace(
            own,
            prepared=prepared,
            contents=(),
            received_ns=now_ns,
            sequence_id=controls.correlation_id,
            sequence_start=controls.start,
            sequence_end=controls.end,
            trace=0 if request.timeline is None else request.timeline.level,
            replace_key="",
            # Where the model has no such set it is another step's.
            parameter_set=own.parameter_set if own.parameter_set and _has_set(member, own.parameter_set) else "",
        )
        arrays = _fitted(start.inputs, member.signature.inputs, member.signature.batches)

        def responded(inner: Request, result: Result | None, moments: Moments | None, final: bool) -> None:
            assert isinstance(inner, InnerRequest)
            self._responded(run, start, inner, result, moments, final)

        try:
            wanted = () if len(step.outputs) == len(member.signature.outputs) else step.outputs
            inner = validate_inner(
                prepared, said, arrays, wanted, request.submitter, member, now_ns, responded, request
            )
            run.waiting[inner] = None
            self._enter(member, inner, now_ns)
        except ServingError as error:
            run.run.ended(start)
            self._fail(run, error)
        except Exception as error:  # a defect of ours must not cost the other requests
            _log.exception("a step of ensemble '%s' could not be started", run.version.name)
            run.run.ended(start)
            self._fail(run, Internal(f"the request failed with {type(error).__name__}"))

    def _responded(
        self,
        run: _Run,
        start: StepStart[Array],
        inner: InnerRequest,
        result: Result | None,
        moments: Moments | None,
        final: bool,
    ) -> None:
        if moments is not None:
            began, gathered, computed = moments
            for i, ns in enumerate((began - inner.arrived_ns, gathered - began, computed - gathered)):
                run.durations[i] += max(0, ns)
        if result is not None and run.error is None and not run.graph.steps[start.step].streams:
            self._go_on_with(run, start, result)
        elif result is not None and run.error is None:
            # An error as well comes after what was answered before.
            run.untaken.append((start, inner, result))
        if inner.told and not isinstance(result, ServingError):
            member = inner.version
            run.request.told = told_by(run.request.told, member.name, member.loaded.ensemble is not None, inner.told)
        if final:
            timeline = run.request.timeline
            if timeline is not None and inner.timeline is not None:
                timeline.add(inner.version.name, inner.version.version, inner.timeline)
            run.waiting.pop(inner, None)
            run.run.ended(start)
        self._take(run)
        self._work_on(run)

    def _take(self, run: _Run) -> None:
        while run.untaken and run.error is None:
            start, inner, result = run.untaken[0]
            if run.run.running:
                # Enough are in use, or the client is too slow.
                if run.run.full(start.step) or self._must_wait(run):
                    return
                if isinstance(result, ServingError) and run.run.worked_on(start.step):
                    return
            run.untaken.popleft()
            if inner.ahead:
                self._responses.took(inner)
            self._go_on_with(run, start, result)

    def _go_on_with(self, run: _Run, start: StepStart[Array], result: Result) -> None:
        if isinstance(result, ServingError):
            self._fail(run, result)
            return
        controls = None
        if isinstance(result, Response):
            try:
                controls = controls_said(result.parameters, start.controls or controls_of(run.request.own))
            except InvalidArgument as error:
                self._fail(run, error)
                return
        self._go_on(run, run.run.responded(start, result, controls))

    def _must_wait(self, run: _Run) -> bool:
        def go_on() -> None:
            self._take(run)
            self._work_on(run)

        return run.sender is not None and run.sender.is_full and run.sender.when_room(go_on)

    def _fail(self, run: _Run, error: ServingError) -> None:
        """Fails a run with ``error``, and cancels the run's steps. Ignores ``error`` if the run has failed already."""
        if run.error is None:
            self._set_error(run, from_code(error.code, f"in ensemble '{run.version.name}', {error.message}"))
        self._due.append((run, None))

    def _set_error(self, run: _Run, error: ServingError) -> None:
        run.error = run.error or error
        run.untaken.clear()
        for inner in list(run.waiting):
            self._withdraw(inner)

    def _end(self, run: _Run) -> None:
        """Sends the final answer to ``run.request`` if no step of ``run`` is running.

        If a step is running, sends the response ``run.unsent``, or sends nothing if ``run.unsent`` is None.
        """
        request, version = run.request, run.version
        if run.run.running or run.untaken or self._runs.get(request) is not run:
            self._send_unsent(run)
            return
        del self._runs[request]
        version.executing -= 1
        for member in run.members.values():
            member.executing -= 1
        now_ns = self._clock()
        if run.error is None and run.run.stuck:
            run.error = InvalidArgument(
                f"in ensemble '{version.name}', {request.label}unexpected deadlock, at least one output is not set while no more "
                "ensemble steps can be made"
            )
        if run.sender is not None:
            self._end_stream(run, run.sender)
            return
        if run.error is not None:
            why = Failure.CANCELED if isinstance(run.error, Cancelled) else Failure.OTHER
            version.statistics.failed(now_ns - request.arrived_ns, why)
            self._outbox.fail(request, run.error)
            return
        queued, took_input, took_infer = run.durations
        began = min(now_ns, run.began_ns + queued)
        execution = Execution([request], began)
        execution.gathered_ns = min(now_ns, began + took_input)
        execution.computed_ns = min(now_ns, execution.gathered_ns + took_infer)
        execution.results = [run.result]
        self._finish(version, execution)

    @staticmethod
    def _send_unsent(run: _Run) -> None:
        # It was held back until it was known that another one follows.
        outputs, run.unsent = run.unsent, None
        if outputs is not None and run.sender is not None:
            run.sender.send(outputs, wait=False)

    def _end_stream(self, run: _Run, sender: ResponseSender) -> None:
        error, sender.returned = run.error, True
        if sender.ended:  # a response could not be sent; from now on no step reads the inputs
            sender.request.release()
        if error is None:
            outputs, run.unsent = run.unsent, None
            sender.send(outputs, final=True, wait=False)
            return
        self._send_unsent(run)
        if sender.is_cancelled:
            self._responses.cancelled(sender.request)
        else:
            sender.fail(error)

    def __repr__(self) -> str:
        return f"<EnsembleRuns {len(self._runs)} under way>"


def members_of(models: ModelTable, graph: EnsembleGraph, outputs: Collection[str] = ()) -> Iterator[ModelVersion]:
    """Yields one model version for each step of ``graph``: the version to which a request for the step would go now.

    After a version that is an ensemble, yields the versions for all steps of this ensemble. ``outputs``: names of outputs of
    ``graph``. Only the steps that are needed to compute these outputs count. If empty, all outputs are computed.
    Raises NotFound if a step's model does not exist. Raises InvalidArgument if a step's model takes no requests.
    """
    for number in graph.needed(outputs).numbers:
        step = graph.steps[number]
        member = models.find(step.model, step.version)
        yield member
        if member.loaded.ensemble is not None:
            yield from members_of(models, member.loaded.ensemble)


def told_by(
    before: Mapping[str, Parameter], name: str, ensemble: bool, added: Mapping[str, Parameter]
) -> dict[str, Parameter]:
    """Returns the response parameters of an ensemble (``before``) together with the response parameters of a step (``added``).

    These parameters say which parameter sets computed the answer. ``name``: the name of the step's model. ``ensemble``: whether
    this model is an ensemble. If False, "." and ``name`` are appended to each key of ``added`` first. If ``before`` has the
    resulting key already, the result has the smaller value if both are integers, otherwise the value of ``added``.
    """
    said = dict(before)
    for key, value in added.items():
        key = key if ensemble else f"{key}.{name}"
        known = said.get(key)
        said[key] = min(known, value) if type(known) is int and type(value) is int else value
    return said


def _has_set(member: ModelVersion, name: str) -> bool:
    if member.loaded.ensemble is not None:
        return True  # its steps are checked themselves
    return member.sets is not None and member.sets.newest(name) is not None


def _check_set(request: Request, members: Iterable[ModelVersion]) -> None:
    name = request.own.parameter_set
    if name and not any(_has_set(member, name) for member in members):
        raise NotFound(f"{request.label}no model of the ensemble has a parameter set '{name}'")


def _fitted(arrays: dict[str, Array], specs: dict[str, TensorSpec], batches: bool) -> dict[str, Array]:
    return {
        name: fitting(array, specs[name].dims, batches) if name in specs else array for name, array in arrays.items()
    }


def controls_said(parameters: Mapping[str, Parameter], controls: Controls) -> Controls | None:
    """Returns the sequence controls (id, START, END) that a step's answer sets for later steps of its ensemble.

    Returns None if the answer sets none. A flag that the answer does not set is False. ``controls``: the controls of the
    step, whose id is used if the answer has no sequence id. Raises InvalidArgument, with Triton's message, if a parameter has
    the wrong type. Source: triton-inference-server/core, src/ensemble_scheduler/ensemble_scheduler.cc, ConsumeResponse.
    """
    if not _CONTROLS & parameters.keys():
        return None
    start, end = (_flag(name, parameters.get(name, False)) for name in ("sequence_start", "sequence_end"))
    named = parameters.get("sequence_id", controls.correlation_id)
    if isinstance(named, bool) or not isinstance(named, int | str):
        raise InvalidArgument(
            "expected parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or TRITONSERVER_PARAMETER_STRING"
        )
    check_sequence(named)
    return Controls(named, start, end)


def _flag(name: str, given: Parameter) -> bool:
    if isinstance(given, bool):
        return given
    raise InvalidArgument(f"expect parameter '{name}' to be TRITONSERVER_PARAMETER_BOOL")
