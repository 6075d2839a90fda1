"""Gathers a snapshot of the daemon for the metrics: what the supervisor knows, and the counters of each worker.

Runs on the supervisor's event loop, and waits at most two seconds for a worker. A worker that does not answer by then, because
it runs a long batch or hangs, is shown with its last report.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import operator
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from tensord.config.options import RegionsOptions
from tensord.daemon.clients.client_lanes import ClientLanes
from tensord.daemon.metrics.agent import WINDOW_NS, BusyPart
from tensord.daemon.metrics.ledger import Ledger, OwnMetricsLedger
from tensord.daemon.metrics.snapshot import Exemplar, FrontSlot, MetricsSnapshot, RegionTotals, WorkerSlot
from tensord.daemon.models.changes import Models
from tensord.daemon.operator.configuration import Configuration
from tensord.daemon.parameters.pushes import Parameters
from tensord.daemon.processes.child import FrontProcess, WorkerProcess
from tensord.daemon.processes.fronts import Fronts
from tensord.daemon.processes.gpu_watcher import GpuWatcher
from tensord.daemon.processes.process_slots import ProcessSlots
from tensord.daemon.processes.worker_pool import WorkerPool
from tensord.daemon.regions.region_registry import RegionRegistry
from tensord.daemon.tracing.span_exporter import SpanCounts
from tensord.daemon.tracing.trace_settings import TraceSettings
from tensord.shm.control_records import Footprint
from tensord.shm.errors import ServingError
from tensord.shm.figures import Compiles, Figures
from tensord.shm.operations import TraceExemplars, WorkerFigures

_log = logging.getLogger(__name__)
#: Seconds to wait for a worker; a scrape of Prometheus gives up after ten.
_PATIENCE = 2.0


class _WorkerTotals:
    """Adds up the counters of the worker processes that have run one after the other under the same name."""

    def __init__(self) -> None:
        #: The worker that reported last.
        self.incarnation = 0
        #: Bytes of clients' segments that are open there.
        self.byte_size = 0
        #: Requests on clients' lanes, and the fields of ``Compiles``.
        self._before = self._reported = (0, 0, 0, 0)
        #: Final answers on clients' lanes by code: of those before, and of the last.
        self._answers_before: Counter[str] = Counter()
        self._answers: Counter[str] = Counter()

    def update(self, incarnation: int, figures: Figures) -> None:
        """Stores ``figures``, the newest counters of a worker process. ``incarnation``: the unique number of this process."""
        if incarnation != self.incarnation:
            self._before = self._sum
            self._answers_before += self._answers
        self.incarnation, self.byte_size = incarnation, figures.lane_byte_size
        compiles = figures.compiles
        self._reported = figures.lane_requests, compiles.count, compiles.ns, compiles.cache_hits
        self._answers = Counter(figures.lane_answers)

    @property
    def _sum(self) -> tuple[int, int, int, int]:
        return tuple(map(operator.add, self._before, self._reported))

    @property
    def requests(self) -> int:
        return self._sum[0]

    @property
    def answers(self) -> Counter[str]:
        return self._answers_before + self._answers

    @property
    def compiles(self) -> Compiles:
        return Compiles(*self._sum[1:])


@dataclass(slots=True)
class Collection:
    """Gathers the values of the daemon's metrics from its parts. Keeps the counters of workers that have ended."""

    _workers: WorkerPool
    _fronts: Fronts
    _slots: ProcessSlots
    _regions: RegionRegistry
    _limits: RegionsOptions
    _models: Models
    _gpus: GpuWatcher
    _lanes: ClientLanes
    _configuration: Configuration
    _parameters: Parameters
    _traces: TraceSettings
    #: Counts of spans for a trace collector; None: there is no collector.
    _spans: SpanCounts | None
    _ledger: Ledger = field(default_factory=Ledger, init=False)
    _own: OwnMetricsLedger = field(default_factory=OwnMetricsLedger, init=False)
    #: Incarnation -> its last report of the leases on regions.
    _leases: dict[int, dict[str, int]] = field(default_factory=dict, init=False)
    #: Name of a slot -> what its workers have counted.
    _totals: dict[str, _WorkerTotals] = field(default_factory=dict, init=False)

    async def snapshot(self, exemplars: bool = False) -> MetricsSnapshot:
        """Returns the current values of all metrics. If a worker does not answer, its counters are those of its last answer.

        ``exemplars``: whether the result also contains OpenMetrics exemplars. It contains none if tracing is off.
        """
        asked = self._workers.ready()
        fronts = list(self._fronts) if exemplars and self._traces.on else []
        answers, told = await asyncio.gather(
            asyncio.gather(*(self._ask(worker) for worker in asked)),
            asyncio.gather(*(self._exemplars(front) for front in fronts)),
        )
        answered = {worker.incarnation for worker, answer in zip(asked, answers, strict=True) if answer}
        served = self._kept()
        return MetricsSnapshot(
            self._models.readiness.ready,
            {model.name: bool(model.served) for model in self._models.standings()},
            self._ledger.totals(served),
            self._worker_slots(answered),
            self._front_slots(),
            self._region_kinds(),
            self._limits.max_count if self._limits.enabled else 0,
            self._limits.max_total_byte_size if self._limits.enabled else 0,
            {"supervisor": os.getpid(), **{child.name: child.pid for child in (*self._workers, *self._fronts)}},
            self._footprints(served),
            self._gpus.gpus,
            dict(self._gpus.errors),
            self._own.families(apart=len(self._workers.devices) > 1),
            self._lanes.connections,
            self._lanes.refused,
            [
                (name, number, version.state.value)
                for name, model in self._models.lifecycle.models.items()
                for number, version in model.versions.items()
            ],
            self._slots.deaths_by_cause((*self._workers.slots, *self._fronts.slots())),
            self._configuration.reloaded,
            self._configuration.reloaded_at,
            self._configuration.options.metrics.buckets,
            self._parameters.sets.by_version(),
            self._parameters.sets.byte_size,
            dict(self._parameters.outcomes),
            sorted(itertools.chain(*told), key=lambda exemplar: exemplar[1][2]),
            {} if self._spans is None else self._spans.outcomes(),
        )

    async def look(self, busy: BusyPart) -> None:
        """Asks all workers for how long they have run models, and passes the total to ``busy``."""
        workers = self._workers.ready()
        await asyncio.gather(*(self._ask(worker) for worker in workers))
        self._kept()
        now_ns = time.monotonic_ns()
        oldest = [worker.page.oldest() for worker in workers if worker.page is not None]
        running = sum(run is not None and now_ns - run.since_ns > WINDOW_NS for run in oldest)
        busy.look(now_ns, self._ledger.busy_ns, len(workers), running)

    def _kept(self) -> list[tuple[str, int]]:
        """Forgets workers that have ended, but not what they counted for versions that are served. Returns these versions."""
        served, living = self._served(), self._workers.by_incarnation.keys()
        self._ledger.keep(living, set(served))
        self._own.keep(living, set(served))
        self._leases = {incarnation: held for incarnation, held in self._leases.items() if incarnation in living}
        return served

    def _served(self) -> list[tuple[str, int]]:
        """Returns name and version of each ready model, and of models derived from a ready one, such as ``M.pull_back``."""
        lifecycle, found = self._models.lifecycle, list[tuple[str, int]]()
        for name, number in [
            (name, number) for name, numbers in lifecycle.ready_models().items() for number in numbers
        ]:
            version = lifecycle.version(name, number)
            described = None if version is None else version.described
            found += [(name, number), *((each.name, number) for each in (described.derivatives if described else ()))]
        return found

    def _footprints(self, served: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Footprint]:
        models = self._models.lifecycle.models
        described = {
            (name, number): models[name].versions[number].described for name, number in served if name in models
        }
        return {key: loaded.footprint for key, loaded in described.items() if loaded is not None}

    async def _ask(self, worker: WorkerProcess) -> bool:
        """Asks a worker for its counters and stores them. Returns False if the worker does not answer in time."""
        try:
            figures = msgspec.json.decode(await worker.result_of(WorkerFigures(), seconds=_PATIENCE), type=Figures)
        except ServingError:
            return False
        except msgspec.MsgspecError as error:
            _log.error("%s (process %d) counts in a form that is not understood: %s", worker.name, worker.pid, error)
            return False
        # The ledger is updated before anything else is awaited: of two answers of a worker the later one holds.
        self._ledger.update(worker.incarnation, figures)
        self._own.update(worker.incarnation, worker.name, figures.own)
        self._leases[worker.incarnation] = figures.leases
        self._totals.setdefault(worker.name, _WorkerTotals()).update(worker.incarnation, figures)
        return True

    async def _exemplars(self, front: FrontProcess) -> list[Exemplar]:
        try:
            answer = await front.result_of(TraceExemplars(), seconds=_PATIENCE)
            told = msgspec.json.decode(answer, type=list[tuple[str, int, list[tuple[int, int, str, float, float]]]])
        except (ServingError, msgspec.MsgspecError):
            return []
        return [
            ((model, version, front.protocol, kind, bucket), (trace_id, seconds, at))
            for model, version, found in told
            for kind, bucket, trace_id, seconds, at in found
        ]

    def _worker_slots(self, answered: set[int]) -> list[WorkerSlot]:
        filled = {worker.name: worker for worker in self._workers}
        slots, lanes = self._workers.slots, self._lanes.open_by_worker()
        self._totals = {name: total for name, total in self._totals.items() if name in slots}
        found = []
        for name, device in slots.items():
            worker = filled.get(name)
            up = worker is not None and worker.ready
            answered_now = worker is not None and worker.incarnation in answered
            lost = self._workers.lost_sequences[name]
            loading = worker.loading if worker is not None else None
            total = self._totals.get(name, _WorkerTotals())
            byte_size = total.byte_size if worker is not None and worker.incarnation == total.incarnation else 0
            counts = lanes[name], total.requests, byte_size, total.compiles, total.answers
            found.append(WorkerSlot(name, device, up, answered_now, self._slots.restarts(name), lost, loading, *counts))
        return found

    def _front_slots(self) -> list[FrontSlot]:
        filled = {front.name: front for front in self._fronts}
        found = []
        for name, protocol in self._fronts.slots().items():
            front = filled.get(name)
            up = front is not None and front.ready
            counters, row = self._fronts.counters(name)
            found.append(FrontSlot(name, protocol, up, self._slots.restarts(name), counters.counts(row, protocol)))
        return found

    def _region_kinds(self) -> list[RegionTotals]:
        return [
            RegionTotals(kind, count, byte_size, sum(held.get(kind, 0) for held in self._leases.values()))
            for kind, (count, byte_size) in self._regions.by_kind().items()
        ]
