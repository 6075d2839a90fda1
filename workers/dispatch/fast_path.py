"""Requests of known forms, answered outside of Python: what the loop's C part (``workers/native/_fast_path.c``) may do by itself.

    answered in Python, twice ─▶ learn: where its tensors go, which programs run it, where its answer is cut from
                                  │     a large one: what runs it where its tensors lie (``workers/dispatch/lone_run.py``)
                                  ╰─ from then on ``wait`` receives, runs and answers such requests, and returns for anything else

It decides nothing. What it was told holds until a table changes: models, regions, series programs, the numbers of forms. All of
these change between two calls of ``wait`` and never during one, because what changes them comes as an event, with which ``wait``
returns. Everything that is not exactly as it was told goes to Python untouched.
"""

from __future__ import annotations

import functools
import select
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, cast

from shm.arrays import Array, address_of
from shm.errors import ServingError
from shm.messages import RegionSlice
from shm.regions import Region
from shm.status_page import StatusPage, WorkerState
from workers.dispatch.lone_run import LoneRun, plan_alone
from workers.dispatch.poller import Poller, Woken
from workers.models.execution import Execution
from workers.models.jax_model import JaxModel
from workers.models.model_version import ModelVersion
from workers.models.statistics import Turns
from workers.programs.executables import Executable
from workers.regions.region_table import RegionTable, check_intact
from workers.requests.known_form import AnswerPlan, KnownForm
from workers.requests.request import Request
from workers.requests.submitter import Submitter
from workers.tensors.buckets import Shapes

try:
    from workers.native import _fast_path
except ImportError:  # no compiler at installation
    available = False
else:
    available = True


#: No number of changes.
_NEVER = -1


class Program(Protocol):
    """What runs gathered requests: an ``Executable`` or a ``SeriesProgram``."""

    @property
    def rows(self) -> int:
        """How many rows it has."""

    @property
    def clears(self) -> bool:
        """Whether rows that no request fills must be zero."""

    @property
    def memory(self) -> list[tuple[str, int, int]]:
        """Where the first row of each input goes: name, address, and how far behind it the next row is."""

    def run(self) -> list[Array]:
        """Computes what was gathered there."""


class _Batch:
    """Requests that can share a run: those of one load and one shape."""

    def __init__(self, version: ModelVersion, model: JaxModel, key: Shapes) -> None:
        self.version = version
        self.model = model
        self._key = key
        most = version.batcher.at_once(key)
        #: By the number of rows that wait, one and more.
        self.programs = model.programs(key, most) if most <= _fast_path.MAX_ROWS else []
        self._pace = self._found_pace()

    def _found_pace(self) -> int:
        return 0 if self.model.series is None else self.model.series.pace(self._key)

    @property
    def inputs(self) -> list[tuple[str, int, int]]:
        """What one of them takes; they all take the same."""
        return next((program.memory for program in self.programs if program is not None), [])

    def native(self) -> _fast_path.Batch:
        """The batch as the C part wants it."""
        made: list[Program] = []
        by_rows: list[int] = []
        for program in self.programs:
            if program is not None and program not in made:
                made.append(program)
            by_rows.append(-1 if program is None else made.index(program))
        rules, series = self.version.loaded.queue_rules, self.model.series is not None
        return self, rules.max_size, series, tuple([self._callable(program) for program in made]), tuple(by_rows)

    def _callable(self, program: Program) -> _fast_path.Program:
        return (
            program.run,
            program.rows,
            program.clears,
            tuple([(address, step) for _, address, step in program.memory]),
        )

    @property
    def changed(self) -> bool:
        """Whether other programs are for them now, because they have become slower, or faster."""
        return self._found_pace() != self._pace

    def count(self, turns: Turns) -> None:
        """Counts what was done of them."""
        self.version.statistics.add(turns)
        if turns.single_runs and self.model.series is not None:
            self.model.series.note_again(self._key, turns.single_ns // turns.single_runs)


class _Alone:
    """Large requests of one load and one shape, each of which is run by itself."""

    changed = False

    def __init__(self, version: ModelVersion, model: JaxModel, executable: Executable) -> None:
        self._version = version
        self._model = model
        self.executable = executable

    def native(self) -> _fast_path.Batch:
        """The batch as the C part wants it: where several wait and fit into one run, no program of those is for them."""
        shapes, rules = self.executable.wanted.shapes, self._version.loaded.queue_rules
        most = min(self._version.batcher.at_once(shapes), _fast_path.MAX_ROWS)
        return self, rules.max_size, False, (), (-1,) * max(1, most)

    def count(self, turns: Turns) -> None:
        """Counts what was done of them."""
        self._version.statistics.add(turns)
        # So that it is not forgotten as one that was not used for long.
        self._model.executables.find(self.executable.wanted)


class FastPath(Poller):
    """One per worker; belongs to its loop. ``desk``: where the status page says what runs."""

    def __init__(
        self,
        epoll: select.epoll,
        look_ns: int,
        page: StatusPage,
        desk: int,
        regions: RegionTable,
        changes: Callable[[], int],
    ) -> None:
        """``changes``: another number whenever something changed that was learned from."""
        super().__init__(epoll, look_ns)
        self._native = _fast_path.FastPath(
            epoll.fileno(), look_ns, page.memory, page.word(desk), WorkerState.IDLE, WorkerState.EXECUTING
        )
        self._regions = regions
        self._changes = changes
        self._seen = changes()
        self._batches: dict[tuple[ModelVersion, Hashable], _Batch] = {}
        self._alone: dict[tuple[ModelVersion, Hashable], _Alone] = {}
        #: (descriptor of the lane, number) of what was learned.
        self._forms: set[tuple[int, int]] = set()

    def open(self, submitter: Submitter[Request]) -> None:
        lane = submitter.lane
        self._native.open(
            lane.fileno(), submitter.peer, submitter.in_flight, lambda datagram: lane.read(datagram, [], False)
        )

    def close_lane(self, submitter: Submitter[Request]) -> None:
        self._settle()
        self._native.close(submitter.lane.fileno())
        self._seen = _NEVER

    def wait(self, timeout_ns: int, idle: bool) -> Woken:
        if self._seen != self._changes():
            self._forget()
        woken = Woken(*self._native.wait(max(0, timeout_ns), idle))
        if self._forms:
            self._settle()
        return woken

    def forget(self, submitter: Submitter[Request], number: int) -> None:
        self._native.forget_form(submitter.lane.fileno(), number)
        self._forms.discard((submitter.lane.fileno(), number))

    def learn(self, version: ModelVersion, execution: Execution) -> None:
        model, made = version.jitted, execution.outputs
        loaded = version.loaded
        if model is None or loaded.instances or not loaded.queue_rules.plain or not loaded.repeatable:
            return
        if version.cache is not None or loaded.made_inputs:
            return
        if len(execution.requests) == 1 and (made is None or not execution.requests[0].small):
            self._learn_alone(version, model, execution)
        if made is None:
            return
        program = execution.executable
        for request in execution.requests:
            form, submitter = request.form, request.submitter
            plan = None if form is None else form.plans.get(made.layout)
            if form is None or plan is None or submitter.closed:
                continue
            known = (submitter.lane.fileno(), form.number) in self._forms
            if known or (form.names is not None and not request.small):
                continue  # or its tensors lie in an arena: such are never gathered here
            if self._seen == self._changes() and form.familiar is version.familiar:
                batch = self._batches.get((version, request.key))
                if batch is None:
                    batch = self._batches[version, request.key] = _Batch(version, model, cast(Shapes, request.key))
                # The plan says how that program's outputs lie; those of the others lie alike.
                if program in batch.programs:
                    self._learn(batch, request, form, plan)
                elif batch.changed:
                    self._seen = _NEVER

    def _learn(self, batch: _Batch, request: Request, form: KnownForm, plan: AnswerPlan) -> None:
        lane = request.submitter.lane
        if form.known is None or not lane.knows(plan.form):
            return
        places = [part.region for part in plan.parts]
        places += [tensor.place for tensor in form.submit.inputs if isinstance(tensor.place, RegionSlice)]
        regions = self._found([place for place in places if place is not None])
        arguments = {name: number for number, (name, _, _) in enumerate(batch.inputs)}
        if regions is None or len(arguments) != len(form.submit.inputs):
            return
        inputs: list[tuple[int, int, int]] = []
        for tensor, (_, byte_size) in zip(form.submit.inputs, form.known.tensors, strict=True):
            place = tensor.place if isinstance(tensor.place, RegionSlice) else None
            inputs.append((arguments[tensor.name], byte_size, _address(place, byte_size, regions)))
        outputs = [
            (part.content, part.start, part.step, size, _address(part.region, size, regions))
            for part in plan.parts
            for size in [part.byte_size * request.rows]
        ]
        intact = functools.partial(check_intact, tuple(regions.values())) if regions else None
        try:
            self._native.learn(
                lane.fileno(),
                form.number,
                batch.native(),
                request.rows,
                tuple(inputs),
                tuple(outputs),
                plan.form.number,
                intact,
            )
        except ValueError:
            # Too many tensors, too large an answer, a shape that is padded: such requests go on as they do.
            return
        self._forms.add((lane.fileno(), form.number))

    def _learn_alone(self, version: ModelVersion, model: JaxModel, execution: Execution) -> None:
        """Of a request that had a run to itself, with large tensors, none of them in a region."""
        (request,) = execution.requests
        form, lane, executable = request.form, request.submitter.lane, execution.executable
        if form is None or form.known is None or form.names is None or form.outputs is None:
            return
        if request.submitter.closed or not isinstance(executable, Executable):
            return
        key = (lane.fileno(), form.number)
        if key in self._forms or self._seen != self._changes() or form.familiar is not version.familiar:
            return
        answer = plan_alone(execution, form) if model.is_whole(execution) and not version.batcher.delays else None
        if answer is None or not lane.knows(answer.form):
            return
        batch = self._alone.get((version, request.key))
        if batch is None or batch.executable is not executable:
            batch = self._alone[version, request.key] = _Alone(version, model, executable)
        run = LoneRun(executable, lane, form.submit.inputs, form.sizes, answer)
        try:
            self._native.learn_alone(
                key[0],
                key[1],
                batch.native(),
                request.rows,
                tuple(form.sizes),
                answer.outputs,
                answer.form.number,
                run,
            )
        except ValueError:
            return
        self._forms.add(key)

    def _found(self, places: Sequence[RegionSlice]) -> dict[str, Region] | None:
        """The regions of those places. None: they are not all mapped here, or nothing is in one of them."""
        found: dict[str, Region] = {}
        for place in places:
            try:
                region = self._regions.find(place.region)
            except ServingError:
                return None
            if not isinstance(region, Region) or not place.byte_size:
                return None
            found[place.region] = region
        return found

    def _settle(self) -> None:
        """Counts what was done outside of Python."""
        for batch, *figures in self._native.figures():
            batch.count(Turns(*figures))
            if batch.changed:
                self._seen = _NEVER

    def _forget(self) -> None:
        self._settle()
        self._native.forget()
        self._batches.clear()
        self._alone.clear()
        self._forms.clear()
        self._seen = self._changes()

    def close(self) -> None:
        self._forget()
        self._native.release()

    def __repr__(self) -> str:
        return f"<FastPath {len(self._forms)} forms of {len(self._batches)} kinds>"


def _address(place: RegionSlice | None, byte_size: int, regions: dict[str, Region]) -> int:
    """0: in the record. Raises InvalidArgument: not wholly inside its region."""
    return 0 if place is None else address_of(regions[place.region].view(place.offset, byte_size))
