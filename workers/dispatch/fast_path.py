"""Lets C code (``workers/native/_fast_path.c``) answer requests that differ from earlier requests only in their tensor data.

After Python has answered a prepared request, ``FastPath.learn`` tells the C code where the request's tensors are, which program
runs, and how the answer is made, if the C code can answer such requests. From then on, ``FastPath.wait`` receives, runs and
answers requests that differ from that request only in their tensor data. ``FastPath.wait`` returns all other requests that it
receives, and Python answers them. A request that waits for a fuller batch when ``wait`` returns is answered by Python, too.

For a model with sequences, Python code chooses before each run which requests take part
(``workers/dispatch/sequence_runs.py``). The C code forgets everything when a model or a region changes.
"""

from __future__ import annotations

import functools
import select
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

from tensord.shm.arrays import address_of
from tensord.shm.errors import ServingError
from tensord.shm.figures import SlowReason
from tensord.shm.messages import PreparedAnswer, RegionSlice
from tensord.shm.prepared import Numbered
from tensord.shm.regions import Region
from tensord.shm.status_page import StatusPage, WorkerState
from tensord.workers.dispatch.poller import Poller, Woken
from tensord.workers.dispatch.sequence_runs import SequenceRuns
from tensord.workers.models.ensemble_pipeline import EnsemblePipeline, EnsemblePipelines
from tensord.workers.models.execution import Execution
from tensord.workers.models.jax_model import JaxModel
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import ModelVersion, VersionState
from tensord.workers.models.sequence_register import SequenceRegister
from tensord.workers.models.statistics import NativeRuns
from tensord.workers.native.extensions import available
from tensord.workers.parameters.parameter_set import ParameterSet
from tensord.workers.processor.processor import HostExecutable
from tensord.workers.processor.single_run import SingleOutput, SingleRun
from tensord.workers.programs.executable import Content, Executable
from tensord.workers.programs.grouped_calls import GroupedProgram
from tensord.workers.programs.pipeline_program import PipelineProgram
from tensord.workers.regions.lane_segments import LaneSegments
from tensord.workers.regions.region_table import RegionTable, check_intact
from tensord.workers.requests.preparation import Checked, Preparation
from tensord.workers.requests.request import Request
from tensord.workers.requests.submitter_link import SubmitterLink
from tensord.workers.requests.timeline import timeline_end
from tensord.workers.scheduling.queue import shapes_of
from tensord.workers.tensors.buckets import Shapes
from tensord.workers.tensors.output_layout import OutputLayout

if available:
    from tensord.workers.native import _native

#: Bytes of inputs in regions from which on a request is run by itself, where they lie.
_LARGE = 1 << 16
AnyProgram = Executable | GroupedProgram | PipelineProgram
#: Regions by name.
Regions = dict[str, Region]


class _Batch:
    """Requests to one model version that C code may run in one batch: each has one row, and all have the same input shapes."""

    def __init__(
        self, version: ModelVersion, model: JaxModel | EnsemblePipeline, key: Shapes, runs: SequenceRuns | None = None
    ) -> None:
        self.version = version
        self.model = model
        self._key = key
        self._runs = runs
        #: How its requests wait for others to share their run.
        self._company = version.batcher.company(key) if version.planner is version.batcher else None
        sizes = version.planner.at_once(key) if self._company is None else [range(1, self._company.most + 1)]
        most = max((some[-1] for some in sizes), default=0)
        #: The program to run when one row waits, when two rows wait, and so on; None: Python takes so many, or fewer of them.
        self.programs: Sequence[AnyProgram | None] = model.programs(self._key, most) if most <= _native.MAX_ROWS else []
        if len(sizes) > 1:
            self.programs = [
                program if any(rows in some for some in sizes) else None
                for rows, program in enumerate(self.programs, 1)
            ]
        #: Runs of other sizes have computed something for nobody.
        self._full = None if isinstance(model, EnsemblePipeline) else model.full_sizes

    @property
    def inputs(self) -> list[tuple[str, int, int]]:
        return next((program.memory for program in self.programs if program is not None), [])

    def native(self) -> _native.Batch:
        made: list[AnyProgram] = []
        by_rows: list[int] = []
        for program in self.programs:
            if program is not None and program not in made:
                made.append(program)
            by_rows.append(-1 if program is None else made.index(program))
        sequences = None if self._runs is None else (self._runs.choose, self._runs.fail)
        waits = (0, 0) if self._company is None else (self._company.delay_ns, self._company.full)
        share = max([program.share / program.rows for program in made], default=0.0)
        programs, grouped = tuple([self._callable(program) for program in made]), self.model.grouped is not None
        return _native_batch(self, self.version, share, tuple(by_rows), programs, waits, grouped, sequences)

    def _callable(self, program: AnyProgram) -> _native.Program:
        memory = tuple([(address, step) for _, address, step in program.memory])
        run: Callable[..., list[Content]] = program.run
        if self._runs is not None and isinstance(program, Executable):
            run = self._runs.program(program)
        return run, program.rows, program.clears, memory

    def count(self, done: NativeRuns) -> None:
        """Adds ``done`` to the model version's statistics. ``done`` counts requests that C code has answered."""
        self.version.statistics.add(done)
        if isinstance(self.model, EnsemblePipeline):
            self.model.credit(done)
            return
        if self._full is not None and not self._full.issuperset([size for size, *_ in done.batches]):
            self.version.statistics.padded(*self.model.padding(self._key, done))


class _Alone:
    def __init__(self, version: ModelVersion, model: JaxModel, executable: Executable) -> None:
        self._version = version
        self._model = model
        self.executable = executable

    def native(self) -> _native.Batch:
        sizes = self._version.batcher.at_once(self.executable.wanted.shapes)
        most = min(max((some[-1] for some in sizes), default=0), _native.MAX_ROWS)
        # Without programs, because no two requests share a run.
        return _native_batch(self, self._version, self.executable.share / self.executable.rows, (-1,) * max(1, most))

    def count(self, done: NativeRuns) -> None:
        self._version.statistics.add(done)
        # Marks the executable as used, so that it is not dropped as the one that was not used for longest.
        self._model.executables.find(self.executable.wanted)


def _native_batch(
    owner: _Batch | _Alone,
    version: ModelVersion,
    share: float,
    by_rows: tuple[int, ...],
    programs: tuple[_native.Program, ...] = (),
    waits: tuple[int, int] = (0, 0),
    grouped: bool = False,
    sequences: _native.Sequences | None = None,
) -> _native.Batch:
    # ``by_rows``: for each number of waiting rows the index in ``programs``; -1: none. ``waits``: for how many ns a request
    # waits for others, and how many rows do not wait.
    most_waiting, sets = version.loaded.queue_rules.max_size, version.sets
    told = owner, version.page_key, most_waiting, share, *waits, grouped, sets is not None and sets.stack is not None
    return *told, programs, by_rows, sequences, version.statistics.histograms


class FastPath(Poller):
    """Answers prepared requests in C code while the worker's loop waits for events. Only the loop's thread may use it."""

    def __init__(
        self,
        epoll: select.epoll,
        look_ns: int,
        page: StatusPage,
        slot: int,
        regions: RegionTable,
        register: SequenceRegister,
        models: ModelTable,
        pipelines: EnsemblePipelines,
    ) -> None:
        super().__init__(epoll, look_ns)
        states = WorkerState.IDLE, WorkerState.EXECUTING
        self._native = _native.FastPath(
            epoll.fileno(), self._spin if look_ns else None, page.memory, page.word(slot), *states, register.left
        )
        self._submitters: dict[int, SubmitterLink[Request]] = {}
        self._register = register
        self._models = models
        self._pipelines = pipelines
        self._regions = regions
        #: The number of changes of the tables at the time when anything was last learned.
        self._seen = self._changes
        self._batches: dict[tuple[JaxModel | EnsemblePipeline, Hashable], _Batch] = {}
        self._alone: dict[tuple[ModelVersion, Hashable], _Alone] = {}
        #: The numbers that were learned, by the descriptor of their lane.
        self._numbers: dict[int, set[int]] = {}

    def open(self, submitter: SubmitterLink[Request]) -> None:
        fd, take_back = submitter.lane.fileno(), functools.partial(_take_back, submitter)
        self._submitters[fd] = submitter
        most = 0 if submitter.segments is None else submitter.segments.limits.in_flight
        self._native.open(fd, submitter.peer, submitter.in_flight, take_back, most, submitter.protocol)

    def close_lane(self, submitter: SubmitterLink[Request]) -> None:
        fd = submitter.lane.fileno()
        self._settle()
        self._submitters.pop(fd, None)
        self._native.close(fd)
        self._numbers.pop(fd, None)

    @property
    def _changes(self) -> int:
        return self._models.changes + self._regions.changes

    @property
    def lane_requests(self) -> int:
        return self._native.lane_requests()

    def let_pass(self, most: int, joins: bool) -> None:
        self._native.let_pass(most, joins)

    def wait(self, timeout_ns: int, idle: bool, sleeps: bool = False) -> Woken:
        if self._seen != self._models.changes + self._regions.changes:
            self.forget_gone()
        woken = Woken(*self._native.wait(max(0, timeout_ns), idle, sleeps))
        if idle:
            self.missed = 0
        elif self._numbers:
            self.missed += sum([fd in self._numbers for fd, _ in woken.events])
        if self._numbers and (figures := self._native.figures()):
            self._count(figures)
        return woken

    def forget(self, submitter: SubmitterLink[Request], number: int) -> None:
        fd = submitter.lane.fileno()
        if number in self._numbers.get(fd, ()):
            self._settle()
            self._native.forget_number(fd, number)
            self._numbers[fd].discard(number)

    def forget_all(self, submitter: SubmitterLink[Request]) -> None:
        for number in list(self._numbers.get(submitter.lane.fileno(), ())):
            self.forget(submitter, number)

    def learn(self, version: ModelVersion, execution: Execution) -> None:
        statistics = version.statistics
        if statistics.slow is None:
            for request in execution.requests:
                if (why := self._learn(version, execution, request)) is not None:
                    statistics.slow_requests[why] += 1

    def _learn(self, version: ModelVersion, execution: Execution, request: Request) -> SlowReason | None:
        preparation, submitter = request.preparation, request.submitter
        if preparation is None or submitter.closed:
            return SlowReason.NEW if request.sink is None else SlowReason.INSIDE
        fd = submitter.lane.fileno()
        if preparation.number in self._numbers.get(fd, ()):
            return None
        # What is learned has to hold for the next ones, which are another load's if this one drains. And a sequence may live in
        # the load before this one, while that has not ended.
        others = version.state is not VersionState.SERVING or (version.sequences is not None and self._models.draining)
        if others or self._seen != self._changes or preparation.load is not version.checked:
            return SlowReason.NEW
        prepared, checked, made = preparation.prepared, preparation.checked, execution.outputs
        if any(output.classification for output in prepared.outputs):
            return SlowReason.CLASSIFICATION
        if checked is None or not checked.plain:
            return SlowReason.LARGE
        if not _differ_in_tensors(request, execution):
            return SlowReason.PARAMETERS
        places = [*(tensor.region for tensor in prepared.inputs), *(output.region for output in prepared.outputs)]
        regions = self._found(places, submitter)
        # What a region has lost shows when the program has run, and a step is not run again.
        if regions is None or (regions and version.sequences is not None):
            return SlowReason.REGIONS
        if made is None and any(isinstance(result, ServingError) for result in execution.results):
            return None
        why: SlowReason | None = SlowReason.LARGE
        if made is None or _is_large(request, preparation, checked):
            why = self._learn_alone(execution, request, preparation, regions)
        if why is not None and made is not None:
            why = self._learn_together(execution, request, preparation, regions, made.layout)
        if why is None:
            self._numbers.setdefault(fd, set()).add(preparation.number)
        return why

    def _learn_together(
        self, execution: Execution, request: Request, preparation: Preparation, regions: Regions, layout: OutputLayout
    ) -> SlowReason | None:
        version, plan, prepared = request.version, preparation.plans.get(layout), preparation.prepared
        if plan is None:
            return SlowReason.TRACED if request.timeline is not None else SlowReason.LARGE
        # Another plan may be the last one, of an answer that names another set.
        if plan.numbered is None or not _holds(plan.numbered, request):
            return SlowReason.NEW
        if preparation.own and not request.small:
            return SlowReason.UNFIT  # its tensors lie in an arena: such are never gathered here
        model: JaxModel | EnsemblePipeline | None = version.jitted
        program: AnyProgram | None = execution.executable
        if (ensemble := version.loaded.ensemble) is not None:
            found = self._pipelines.find(version, ensemble, execution.requests)
            if found is None or not found[0].answers(request):
                return SlowReason.STEPS
            model, program = found
        assert model is not None
        assert preparation.checked is not None
        key = cast(Shapes, shapes_of(request.key))
        batch = self._batches.get((model, key))
        if batch is None:
            batch = self._batches[model, key] = self._batch(version, model, key)
        arguments = {name: number for number, (name, _, _) in enumerate(batch.inputs)}
        # The plan says how that program's outputs lie; those of the others lie alike.
        if program not in batch.programs or len(arguments) != len(prepared.inputs) + len(
            version.loaded.made_inputs.specs
        ):
            return SlowReason.UNFIT
        inputs = [
            (arguments[tensor.name], size, _address(tensor.region, size, regions))
            for tensor, size in zip(prepared.inputs, preparation.checked.sizes, strict=True)
        ]
        outputs = [
            (part.content, part.start, part.step, size, _address(part.region, size, regions))
            for part in plan.parts
            for size in [part.byte_size * request.rows]
        ]
        intact = functools.partial(check_intact, tuple(regions.values())) if regions else None
        return self._tell(request, preparation, batch, inputs, outputs, plan.numbered, intact)

    def _tell(
        self,
        request: Request,
        preparation: Preparation,
        batch: _Batch | _Alone,
        inputs: list[tuple[int, int, int]],
        outputs: list[tuple[int, int, int, int, int]],
        numbered: Numbered[PreparedAnswer],
        intact: Callable[[], None] | None = None,
        alone: SingleRun | None = None,
    ) -> SlowReason | None:
        fd, rows, version = request.submitter.lane.fileno(), request.rows, request.version
        rest: tuple[bytes | None, dict[str, ParameterSet] | None] = None, None
        if version.loaded.ensemble is None:
            rest = _timeline_end(version), _usable_sets(request)
        places = tuple(inputs), tuple(outputs)
        try:
            self._native.learn(
                fd, preparation.number, batch.native(), rows, *places, numbered.number, intact, *rest, alone
            )
        except ValueError:
            # Too many tensors, too large an answer, a shape that is padded: such requests go on as they do.
            return SlowReason.UNFIT
        return None

    def _batch(self, version: ModelVersion, model: JaxModel | EnsemblePipeline, key: Shapes) -> _Batch:
        runs: SequenceRuns | None = None
        if version.sequences is not None and isinstance(model, JaxModel):
            runs = SequenceRuns(version, model, version.sequences, self._submitters, self._register)
        return _Batch(version, model, key, runs)

    def _learn_alone(
        self, execution: Execution, request: Request, preparation: Preparation, regions: Regions
    ) -> SlowReason | None:
        version, executable = request.version, execution.executable
        model = version.jitted
        if model is None or version.sequences is not None or not isinstance(executable, Executable):
            return SlowReason.STEPS if version.loaded.ensemble is not None else SlowReason.LARGE
        if version.batcher.delays or not model.is_whole(execution):
            return SlowReason.UNFIT
        planned, checked = _plan_single(execution, preparation), preparation.checked
        if planned is None or checked is None or not isinstance(executable, HostExecutable):
            return SlowReason.LARGE
        inputs = zip(preparation.prepared.inputs, checked.sizes, strict=True)
        numbered, outputs = planned
        run = SingleRun(executable, request.submitter.lane, inputs, outputs, regions)
        if not run.is_aligned or not _holds(numbered, request):
            return SlowReason.NEW if run.is_aligned else SlowReason.LARGE
        key = shapes_of(request.key)
        batch = self._alone.get((version, key))
        if batch is None or batch.executable is not executable:
            batch = self._alone[version, key] = _Alone(version, model, executable)
        return self._tell(request, preparation, batch, run.inputs, run.outputs, numbered, alone=run)

    def _found(self, places: Sequence[RegionSlice | None], submitter: SubmitterLink[Request]) -> Regions | None:
        regions: RegionTable | LaneSegments = submitter.segments or self._regions
        found: Regions = {}
        for place in places:
            if place is None:
                continue
            try:
                region = regions.find(place.region)
            except ServingError:
                return None
            if not isinstance(region, Region) or not place.byte_size:
                return None
            found[place.region] = region
        return found

    def _settle(self) -> None:
        self._count(self._native.figures())

    @staticmethod
    def _count(figures: list[tuple[Any, ...]]) -> None:
        for batch, *counts in figures:
            batch.count(NativeRuns(*counts))

    def forget_gone(self) -> None:
        self._settle()
        self._native.forget()
        self._batches.clear()
        self._alone.clear()
        self._numbers.clear()
        self._seen = self._changes

    def close(self) -> None:
        self.forget_gone()
        self._native.release()

    def __repr__(self) -> str:
        return f"<FastPath {sum(map(len, self._numbers.values()))} numbers of {len(self._batches)} kinds>"


def _plan_single(
    execution: Execution, preparation: Preparation
) -> tuple[Numbered[PreparedAnswer], list[SingleOutput]] | None:
    (request,), made, places = execution.requests, execution.outputs, execution.places
    plan = None if made is None else preparation.plans.get(made.layout)
    if made is not None and plan is not None and plan.numbered is not None:
        names = {content: name for name, _, content, *_ in made.layout.outputs}
        inside = [SingleOutput(names[part.content], part.byte_size * request.rows) for part in plan.parts]
        return (plan.numbered, inside) if plan.inside else None
    if preparation.large is None or places is None or not places.written:
        return None
    outputs: list[SingleOutput] = []
    for name, size in places.sizes.items():
        at, (region, _) = places.offsets.get(name), places.in_regions.get(name, (None, None))
        if (region is not None or at is not None) and name not in places.written:
            return None
        outputs.append(SingleOutput(name, size, at, region))
    return preparation.large, outputs


def _differ_in_tensors(request: Request, execution: Execution) -> bool:
    if isinstance(request.chosen, ParameterSet):
        return False  # its sequence has its own, which the planner knows; others of that kind have main's
    if not request.tells:
        return True
    ran = execution.parameters_of(request)
    return request.chosen is None and ran is not None and ran.is_newest


def _timeline_end(version: ModelVersion) -> bytes | None:
    main = None if version.sets is None else version.sets.main
    return timeline_end((main.name, main.number) if main is not None and main.number else None)


def _usable_sets(request: Request) -> dict[str, ParameterSet] | None:
    version = request.version
    # The planner of sequences knows their sets, and answers that name their set are prepared for main alone.
    # The version's own dict, which changes with each push.
    return None if version.sets is None or version.sequences is not None or request.tells else version.sets.named


def _is_large(request: Request, preparation: Preparation, checked: Checked) -> bool:
    return not request.small if preparation.own else sum(checked.sizes) >= _LARGE


def _holds(numbered: Numbered[PreparedAnswer], request: Request) -> bool:
    known = numbered in request.submitter.lane.published
    return known and (not request.tells or numbered.prepared.parameters == request.told)


def _take_back(submitter: SubmitterLink[Request], datagram: bytes) -> bool:
    submitter.lane.read(datagram, [], False)
    if submitter.lane.unsaid:
        submitter.flush_soon()
    return submitter.unflushed


def _address(place: RegionSlice | None, byte_size: int, regions: Regions) -> int:
    """Returns the address of a tensor in a region, or 0 if ``place`` is None, because the tensor is in no region."""
    return 0 if place is None else address_of(regions[place.region].view(place.offset, byte_size))
