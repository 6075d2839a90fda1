"""One loaded model version, and the requests that wait for it. Used by the worker's loop only.

SERVING ──unload──▶ DRAINING: takes no request, finishes those it has ──▶ CLOSED: its instances have ended
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from tensord.config.options import Metrics
from tensord.shm.arrays import Array
from tensord.shm.common.derivatives import of_model
from tensord.shm.errors import ServingError
from tensord.shm.figures import SlowReason, VersionFigures
from tensord.shm.operations import MAIN_SET
from tensord.shm.response_order import ResponseOrder
from tensord.shm.status_page import model_key
from tensord.workers.models.instance import Instance
from tensord.workers.models.loaded_model import LoadedModel
from tensord.workers.models.sequence_register import RegisteredSequences, SequenceRegister
from tensord.workers.models.statistics import VersionStatistics
from tensord.workers.native.extensions import available
from tensord.workers.parameters.parameter_set import ParameterSet, Unused
from tensord.workers.requests.preparation import CheckedInputs
from tensord.workers.requests.request import Request
from tensord.workers.requests.response_cache import ResponseCache
from tensord.workers.requests.response_sender import ResponseSender
from tensord.workers.scheduling.dynamic_batcher import DynamicBatcher
from tensord.workers.scheduling.planner import Planner
from tensord.workers.scheduling.queue import ParkedRequests, RequestQueue
from tensord.workers.scheduling.sequence import LiveSequence
from tensord.workers.scheduling.sequence_batcher import SequenceBatcher
from tensord.workers.scheduling.step_batcher import StepBatcher
from tensord.workers.tensors.buckets import shapes_key

#: The most requests that an instance is given at a time, the one that runs among them, where it is given some ahead.
_AHEAD = 3
#: A part of the agenda of a worker's loop: a version with requests, or a function that is called with the time.
AgendaPart: TypeAlias = "ModelVersion | Callable[[int], object]"


class VersionState(enum.Enum):
    """The states of a loaded model version."""

    #: It takes requests.
    SERVING = enum.auto()
    #: It was unloaded or replaced, and finishes its requests.
    DRAINING = enum.auto()
    #: Its instances are ending, or have ended.
    CLOSED = enum.auto()


class ModelVersion:
    """A loaded model version: its queue, the planner of its batches, its statistics, and requests that wait for a compilation."""

    def __init__(
        self,
        loaded: LoadedModel,
        register: SequenceRegister | None = None,
        buckets: Sequence[float] = Metrics().buckets,
    ) -> None:
        """Begins to serve a loaded version.

        ``register``: registers the worker's sequences; None: the model has no sequences. ``buckets``: upper bounds of the
        buckets of duration histograms, in seconds.
        """
        self.loaded = loaded
        self.name = loaded.name
        self.version = loaded.version
        #: The name of the version on the status page.
        self.page_key = model_key(loaded.name, loaded.version)
        self.signature = loaded.signature
        self.repeatable = loaded.repeatable
        self.ordered = loaded.ordered
        self.jitted = loaded.jitted
        #: Its parameter sets, if it has parameters that are arrays.
        self.sets = loaded.sets
        #: True if a request is given something besides what its client has sent, or may be refused for its sequence.
        self.joins = loaded.sequences is not None or bool(loaded.made_inputs)
        self.state = VersionState.SERVING
        self.queue: RequestQueue[Request] = RequestQueue(loaded.queue_rules)
        self.batcher = DynamicBatcher(loaded.batch_rules, self.queue)
        #: The sequences of a model that has any; it has no use for the queue.
        self.sequences: SequenceBatcher[Request] | None = None
        #: The planner, which decides what runs.
        self.planner: Planner[Request] = self.batcher
        #: The state of a jitted model whose state varies in size; None: it has no such state.
        self.free_state = None if self.jitted is None else self.jitted.free_state
        self._registered: RegisteredSequences | None = None
        if loaded.sequences is not None:
            assert register is not None
            plan, free = loaded.sequences, self.free_state
            self._registered = register.of(loaded.name, loaded.version)
            self.sequences = SequenceBatcher(
                loaded.name,
                plan.rules,
                plan.strategy,
                max(1, len(loaded.instances)),
                self._registered,
                None if free is None else free.attach,
            )
            self.planner = self.sequences
        #: Decides about the steps of a stepped model.
        self.steps: StepBatcher[Request] | None = None
        if loaded.stepped is not None:
            self.planner = self.steps = StepBatcher(loaded.stepped.rules, self.queue)
        #: The senders of requests that are answered by them and are not at their end.
        self.senders: dict[Request, ResponseSender] = {}
        #: The next batch of an instance, and it is empty when none is due; of (now_ns, instance).
        self.take: Callable[[int, int], list[Request]] = self.planner.take
        if self.jitted is not None and self.jitted.ragged:
            self.take = self._take_fitting
        if self.sequences is not None and self.sets is not None:
            self.take = functools.partial(self._take_of_one_set, self.take)
        #: True if any request of a stepped model that has a slot may go on with other parameters than main's newest.
        self.steps_hold = False
        self.statistics = VersionStatistics(loaded.name, loaded.version, buckets)
        self.statistics.slow = _why_slow(loaded)
        #: The inputs of requests to it that were checked, and what stands for this load.
        self.checked = CheckedInputs()
        #: The worker's, where it is used for this model.
        self.cache: ResponseCache | None = None
        #: Batches given to instances and not done.
        self.executing = 0
        #: Shapes being compiled, with the requests that wait for them.
        self.compiling: dict[Hashable, ParkedRequests[Request]] = {}
        self._on_closed: list[Callable[[], object]] = []
        self._open_instances = 0
        #: All of it has ended, and what its model has started.
        self._gone = False
        #: The instances that it has ended: those that no other version uses.
        self.ended_instances: list[Instance] = []
        loaded.users[self] = None
        #: The versions of its derivatives.
        self.derivatives: Sequence[ModelVersion] = ()
        #: True if any instance needs something of the rate limiter.
        self.limited = any(instance.needs for instance in loaded.instances)
        #: Says whose answer may leave, for a model that wants the order kept and has several instances.
        self.order: ResponseOrder[object, Callable[[], None]] | None = None
        if loaded.ordered and len(loaded.instances) > 1:
            self.order = ResponseOrder()
        #: True if a request may be given to the thread before another one has run: no other thread could run it meanwhile, and
        #: nothing that comes would join it, or overtake it.
        self.runs_ahead = (
            len(loaded.instances) == 1
            and not self.limited
            and self.sequences is None
            and not loaded.batch_rules.joins
            and loaded.queue_rules.single_line
        )
        for instance in loaded.instances:
            instance.depth = _AHEAD if self.runs_ahead else 1

    def key(self, arrays: Mapping[str, Array]) -> Hashable:
        """Returns the batching key of a request with these inputs. Requests with equal keys may run in one batch."""
        compiled = self.jitted or self.loaded.stepped
        if compiled is not None:
            return compiled.key({**arrays, **self.loaded.made_inputs.nobody})
        return shapes_key(arrays, self.signature)

    def _take_fitting(self, now_ns: int, instance: int = 0) -> list[Request]:
        """Removes and returns an instance's next batch, [] if none is due. It fits the largest bucket of each ragged input."""
        batch = self.planner.take(now_ns, instance)
        if self.jitted is not None and (fitting := self.jitted.fitting(batch)) < len(batch):
            # They are older than what waits, so none of them is refused.
            self.planner.restore(batch[fitting:], now_ns)
            del batch[fitting:]
        return batch

    def _take_of_one_set(
        self,
        take: Callable[[int, int], list[Request]],
        now_ns: int,
        instance: int = 0,
    ) -> list[Request]:
        # A request of a sequence uses the parameters that its sequence began with.
        sequences, sets = self.sequences, self.sets
        assert sequences is not None
        assert sets is not None
        batch, table = take(now_ns, instance), sequences.table
        # What a thread is given may begin when others are in use.
        main = sets.main if self.loaded.instances else None
        if main is None and not table.holding and not any(request.chosen for request in batch):
            return batch
        for request in batch:
            live: LiveSequence[Request] = request.live
            if request.chosen is None and request.controls.start:
                table.hold(live, None)  # what the sequence before it, of its id, went on with
            if isinstance(request.chosen, str) and request.controls.start:
                # Where it has been dropped meanwhile, the run finds that out.
                if (named := sets.newest(request.chosen)) is None:
                    continue
                table.hold(live, named)
            request.chosen = live.parameters or main
        others = [request for request in batch if request.chosen is not batch[0].chosen]
        if others:
            sequences.restore(others, now_ns)
        return [request for request in batch if request.chosen is batch[0].chosen]

    def commit(self, parameters: ParameterSet, moves: bool) -> Unused:
        """Replaces the parameter set of the same name by ``parameters``. Returns objects whose memory the caller must free.

        ``moves``: if True, requests and sequences that have begun go on with the new parameter set, else with the replaced set.
        """
        assert self.sets is not None
        former = self.sets.newest(parameters.name)
        held = former is not parameters and self._hold(former, parameters, moves)
        return self.sets.commit(parameters, stays=held)

    def _hold(self, former: ParameterSet | None, new: ParameterSet, moves: bool) -> bool:
        # None is always the newest of main.
        now, held = None if new.name == MAIN_SET else new, False
        if self.sequences is not None:
            table = self.sequences.table
            for live in table.sequences():
                if live.begun and _concerned(live.parameters, former, new, moves):
                    table.hold(live, now if moves else former)
                    held = not moves
        for request in () if self.steps is None else self.steps.with_slots():
            if _concerned(request.chosen, former, new, moves):
                request.chosen = now if moves else former
                self.steps_hold |= not moves
                held = not moves
                if moves and request.tells:
                    request.told = new.said()
        return held

    def lose(self, instance: int, now_ns: int) -> list[tuple[Request, ServingError]]:
        """Ends the sequences that have begun on instance number ``instance``, because their state is lost.

        Returns the waiting requests of these sequences, each with its error.
        """
        if self.sequences is None:
            return []
        self.statistics.lost_sequences += len(self.sequences.table.begun(instance))
        return self.sequences.lose(instance, now_ns)

    def use(self, cache: ResponseCache) -> None:
        """Lets ``cache`` store answers of this version, and answer equal requests with them."""
        self.cache = cache
        self.statistics.slow = self.statistics.slow or SlowReason.CACHE
        self.when_closed(lambda: cache.forget(self))

    @property
    def pending(self) -> int:
        """The number of requests that wait: in the queue, at an instance, or for a program to be compiled."""
        return len(self.planner) + self.queue.ahead + sum(map(len, self.compiling.values()))

    def figures(self, now_ns: int) -> VersionFigures:
        """Returns this version's counts, queue length and histograms, for metrics."""
        statistics, table = self.statistics, None if self.sequences is None else self.sequences.table
        sequences = None if table is None else (table.with_slot(now_ns), table.backlog)
        cached = self.cache is not None
        counts, streams = statistics.counts(), self.loaded.streams
        # A derivative's are those of its model, and shown there.
        parameters = None if self.sets is None or of_model(self.name)[1] else self.sets.figures()
        if self.loaded.ensemble is not None:
            counts = msgspec.structs.replace(counts, busy_ns=0)
        return VersionFigures(
            self.name,
            self.version,
            statistics.began_ns,
            self.pending,
            counts,
            cached,
            streams,
            sequences,
            dict(statistics.all_durations()),
            parameters,
        )

    @property
    def family(self) -> list[ModelVersion]:
        """This version, and the versions of the models that compute its derivatives."""
        return [*self.derivatives, self]

    @property
    def busy(self) -> bool:
        """True while any request to this version waits or runs, or any of its sequences is live."""
        if self.sequences is not None and self.sequences.table.live:
            return True
        return bool(len(self.planner) or self.executing or self.senders or self.compiling or self.planner.lives)

    @property
    def _instances(self) -> list[Instance]:
        return [*self.loaded.instances, *self.loaded.passive]

    def join_programs(self) -> None:
        """Limits batches whose input shapes have no bucket to the rows of the largest compiled program for these shapes.

        Call this for a version that was loaded again and keeps the compiled programs of its earlier load.
        """
        if self.jitted is not None:
            executables = self.jitted.executables
            for shapes in executables.unexpected:
                self.planner.limit(shapes, executables.limit(shapes))

    def serve(self) -> None:
        """Begins to tell fronts how many more sequences this version can run. Does nothing if the model has no sequences."""
        if self._registered is not None and self.sequences is not None:
            self._registered.serve(self.sequences.table)

    def drain(self, on_closed: Callable[[], None]) -> None:
        """Stops this version: it finishes its requests and live sequences, then closes and calls ``on_closed``."""
        self.when_closed(on_closed)
        if self.state is VersionState.SERVING:
            self.state = VersionState.DRAINING
            self.planner.end_delays()
            if self._registered is not None:
                self._registered.retire()

    def end_sequences(self) -> None:
        """Ends all sequences of this model version. A sequence's waiting requests run before the sequence ends."""
        if self.sequences is not None:
            self.sequences.close_all()

    def when_closed(self, call: Callable[[], object]) -> None:
        """Registers a function that is called when this version has closed. Call this method before the version closes."""
        self._on_closed.append(call)

    def settle(self) -> bool:
        """Begins to close this version if it is draining and has no requests and no live sequences.

        Returns True once it has closed completely.
        """
        if self.state is VersionState.DRAINING and not self.busy:
            self.state = VersionState.CLOSED
            del self.loaded.users[self]
            used = [instance for user in self.loaded.users for instance in user._instances]
            # Some have ended already where it was made of a version that was unloaded meanwhile.
            self.ended_instances = [each for each in self._instances if each not in used and not each.closing]
            self._open_instances = len(self.ended_instances)
            for instance in self.ended_instances:
                instance.close(self._instance_closed)
        if self.state is VersionState.CLOSED and not self._open_instances and not self._gone and self._end_processes():
            self._gone = True
            self._closed()
        return self._gone

    def _instance_closed(self) -> None:
        self._open_instances -= 1

    def _end_processes(self) -> bool:
        # If another load uses the code, the processes stay.
        processes = None if self.loaded.users else self.loaded.imports.processes
        if processes is None:
            return True
        processes.close()
        return processes.ended

    def _closed(self) -> None:
        if not self.loaded.users:
            self.loaded.imports.forget()
            if self.sets is not None:
                self.sets.close()
        waiting, self._on_closed = self._on_closed, []
        for call in waiting:
            call()

    def __repr__(self) -> str:
        return f"<ModelVersion {self.name}:{self.version} {self.state.name} {self.planner!r}>"


def _why_slow(loaded: LoadedModel) -> SlowReason | None:
    """Returns why all requests to a loaded version need Python; None: the C extension may answer some."""
    found = {
        SlowReason.NOT_COMPILED: not available,
        SlowReason.INSTANCES: bool(loaded.instances),
        SlowReason.STREAMS: loaded.streams,
        SlowReason.ORDERED: loaded.ordered,
        SlowReason.QUEUE: not loaded.queue_rules.single_line,
        SlowReason.PROPERTIES: loaded.made_inputs.asked is not None,
        SlowReason.DATATYPES: not all(spec.plain for spec in loaded.signature.inputs.values()),
        SlowReason.STEPS: not loaded.repeatable and loaded.sequences is None,
    }
    return next((why for why, holds in found.items() if holds), None)


def by_version(requests: list[Request]) -> dict[ModelVersion, list[Request]]:
    """Groups requests by their model version. Sorts each group by the requests' places in the version's queue."""
    found: dict[ModelVersion, list[Request]] = {}
    for request in sorted(requests, key=lambda request: request.sequence):
        version = request.version
        found.setdefault(version, []).append(request)
    return found


def _concerned(used: object | None, former: ParameterSet | None, new: ParameterSet, moves: bool) -> bool:
    # None stands for the newest of ``main``.
    if used is None:
        return new.name == MAIN_SET
    return used is former or (moves and isinstance(used, ParameterSet) and used.name == new.name)
