"""Small requests of known forms, answered outside of Python: what the loop's C part (``workers/_fast_path.c``) may do by itself.

    answered in Python, twice ─▶ learn: where its tensors go, which programs run it, where its answer is cut from
                                  ╰─ from then on ``wait`` receives, runs and answers such requests, and returns for anything else

It decides nothing. What it was told holds until a table changes: models, regions, series programs, the numbers of forms. All of
these change between two calls of ``wait`` and never during one, because what changes them comes as an event, with which ``wait``
returns. Everything that is not exactly as it was told goes to Python untouched.
"""

from __future__ import annotations

import functools
import select
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from shm.arrays import address_of
from shm.errors import ServingError
from shm.messages import RegionSlice
from shm.regions import Region
from shm.status_page import StatusPage, WorkerState
from workers.known_form import AnswerPlan, KnownForm
from workers.model_version import ModelVersion
from workers.models.execution import Execution
from workers.models.series import MOST, Series
from workers.models.series_program import SeriesProgram
from workers.region_table import RegionTable, check_intact
from workers.request import Request
from workers.statistics import Turns
from workers.submitter import Submitter

try:
    from workers import _fast_path
except ImportError:  # no compiler at installation
    available = False
else:
    available = True


#: A datagram of a lane that was received already: content, descriptors in it, whether some of it is missing.
Datagram = tuple[bytes, list[int], bool]


class Woken(NamedTuple):
    """What a wait ended with."""

    #: Descriptor and what epoll says of it.
    events: list[tuple[int, int]]
    #: What is Python's affair, with the lane's descriptor.
    datagrams: list[tuple[int, Datagram]]
    #: Answers that a lane would not take yet, as a datagram for each lane.
    unsent: list[tuple[int, bytes]]


#: No number of changes.
_NEVER = -1


class _Batch(NamedTuple):
    """Requests that can share a run: those of one load and one shape."""

    version: ModelVersion
    series: Series
    key: Hashable
    #: By the number of requests that wait, one and more.
    programs: list[SeriesProgram | None]


class FastPath:
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
        self._native = _fast_path.FastPath(
            epoll.fileno(), look_ns, page.memory, page.word(desk), WorkerState.IDLE, WorkerState.EXECUTING
        )
        self._regions = regions
        self._changes = changes
        self._seen = changes()
        self._batches: dict[tuple[ModelVersion, Hashable], _Batch] = {}
        #: (descriptor of the lane, number) of what was learned.
        self._forms: set[tuple[int, int]] = set()

    def open(self, submitter: Submitter) -> None:
        """A lane whose descriptor is in the epoll."""
        self._native.open(submitter.lane.fileno(), submitter.peer, submitter.in_flight)

    def close_lane(self, submitter: Submitter) -> None:
        """That lane is gone."""
        self._settle()
        self._native.close(submitter.lane.fileno())
        self._seen = _NEVER

    def wait(self, timeout_ns: int, idle: bool) -> Woken:
        """As ``Poller.wait``; ``idle``: nothing waits in the worker, so that it may serve meanwhile."""
        if self._seen != self._changes():
            self._forget()
        woken = Woken(*self._native.wait(max(0, timeout_ns), idle))
        if self._forms:
            self._settle()
        return woken

    def forget(self, submitter: Submitter, number: int) -> None:
        """That number stands for another form from now on."""
        self._native.forget_form(submitter.lane.fileno(), number)
        self._forms.discard((submitter.lane.fileno(), number))

    def learn(self, version: ModelVersion, execution: Execution) -> None:
        """Looks whether requests like those that were just answered can be answered here the next time."""
        model, made = version.jitted, execution.outputs
        if made is None or model is None or model.series is None or not version.loaded.queue_rules.plain:
            return
        for request in execution.requests:
            form = request.form
            plan = None if form is None else form.plans.get(made.layout)
            if form is None or plan is None or (request.submitter.lane.fileno(), form.number) in self._forms:
                continue
            if self._seen == self._changes() and form.familiar is version.familiar and not request.submitter.closed:
                self._learn(version, model.series, request, form, plan)

    def _learn(
        self, version: ModelVersion, series: Series, request: Request, form: KnownForm, plan: AnswerPlan
    ) -> None:
        lane = request.submitter.lane
        batch = self._batches.get((version, request.key))
        if batch is None:
            programs = [series.ready(request.key, waiting) for waiting in range(1, MOST + 1)]
            batch = _Batch(version, series, request.key, programs)
        program = next((program for program in batch.programs if program is not None), None)
        if program is None or form.known is None or version.jitted is None or not lane.knows(plan.form):
            return
        places = [part.region for part in plan.parts]
        places += [tensor.place for tensor in form.submit.inputs if isinstance(tensor.place, RegionSlice)]
        regions = self._found(place.region for place in places if place is not None)
        arguments = {name: number for number, (name, _, _) in enumerate(program.memory)}
        if (
            regions is None
            or any(place is not None and not place.byte_size for place in places)
            or len(arguments) != len(form.submit.inputs)
            or max(len(arguments), len(plan.parts)) > _fast_path.MAX_TENSORS
        ):
            return
        inputs = []
        for tensor, (_, byte_size) in zip(form.submit.inputs, form.known.tensors, strict=True):
            place = tensor.place if isinstance(tensor.place, RegionSlice) else None
            inputs.append((arguments[tensor.name], byte_size, _address(place, byte_size, regions)))
        outputs = [
            (part.content, part.start, part.step, part.byte_size, _address(part.region, part.byte_size, regions))
            for part in plan.parts
        ]
        parameters = version.jitted.executables.parameters
        self._native.learn(
            lane.fileno(),
            form.number,
            batch,
            version.loaded.queue_rules.max_size,
            tuple([_callable(program, parameters) for program in batch.programs]),
            tuple(inputs),
            tuple(outputs),
            plan.form.number,
            functools.partial(check_intact, tuple(regions.values())) if regions else None,
        )
        self._batches[version, request.key] = batch
        self._forms.add((lane.fileno(), form.number))

    def _found(self, names: Iterable[str]) -> dict[str, Region] | None:
        """The regions of those names. None: they are not all mapped here."""
        found: dict[str, Region] = {}
        for name in names:
            try:
                region = self._regions.find(name)
            except ServingError:
                return None
            if not isinstance(region, Region):
                return None
            found[name] = region
        return found

    def _settle(self) -> None:
        """Counts what was done outside of Python."""
        for batch, *figures in self._native.figures():
            turns = Turns(*figures)
            batch.version.statistics.add(turns)
            if turns.single_runs:
                batch.series.note_again(batch.key, turns.single_ns // turns.single_runs)
            if [batch.series.ready(batch.key, waiting) for waiting in range(1, MOST + 1)] != batch.programs:
                self._seen = _NEVER  # it has become slower, or faster

    def _forget(self) -> None:
        self._settle()
        self._native.forget()
        self._batches.clear()
        self._forms.clear()
        self._seen = self._changes()

    def close(self) -> None:
        """Lets go of the status page and of everything that was learned."""
        self._forget()
        self._native.release()

    def __repr__(self) -> str:
        return f"<FastPath {len(self._forms)} forms of {len(self._batches)} kinds>"


def _callable(program: SeriesProgram | None, parameters: object) -> tuple[object, ...] | None:
    if program is None:
        return None
    arguments = tuple([(address, step) for _, address, step in program.memory])
    return functools.partial(program.run, parameters), program.wanted.length, arguments


def _address(place: RegionSlice | None, byte_size: int, regions: dict[str, Region]) -> int:
    """0: in the record. Raises InvalidArgument: not wholly inside its region."""
    return 0 if place is None else address_of(regions[place.region].view(place.offset, byte_size))
