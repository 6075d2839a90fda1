"""Adds up what all workers have counted, so that the sums never decrease while a model version is served. Does no I/O.

A sum has two parts: what the running workers have counted, by their last reports; and the last reported counters of workers
that have ended, and of model versions that a worker has unloaded.

If a sum decreased, Prometheus would count all of it once more. What a worker counts after its last report is lost when it ends.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from tensord.shm.durations import Counted, total
from tensord.shm.figures import Counts, Figures, MetricFigures, OwnMetrics, VersionFigures

#: Name and number of a model version.
Key = tuple[str, int]
#: The values that are kept of workers that have ended: counters, histograms, and the counters of parameter sets.
_Ended = tuple[Counts, Counted, tuple[int, int]]
_NOTHING: _Ended = Counts(), {}, (0, 0)
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Total:
    """Holds the counters of one model version, summed over all workers."""

    name: str
    version: int
    counts: Counts
    #: Requests that wait now.
    pending: int
    #: True if the response cache is used for it; and if it answers with several responses.
    cached: bool = False
    streams: bool = False
    #: The number of a model's sequences that have a slot now, and of those that wait for one; None: it has no sequences.
    sequences: tuple[int, int] | None = None
    #: Histograms, as of ``VersionFigures``.
    durations: Counted = field(default_factory=dict)
    #: The number of parameter sets that left a device for others, and of runs whose set had to be brought there first.
    evictions: int = 0
    misses: int = 0
    #: Bytes of its sets on all devices now.
    set_byte_size: int = 0


class Ledger:
    """Adds up the counters of each model version over all workers, for the daemon's life.

    The counters of workers that were replaced stay in the sums.
    """

    def __init__(self) -> None:
        #: Incarnation -> its last report.
        self._workers: dict[int, dict[Key, VersionFigures]] = {}
        self._ended: dict[Key, _Ended] = {}
        #: How long workers have run models so far, versions that are served no more included, in ns.
        self.busy_ns = 0

    def update(self, incarnation: int, figures: Figures) -> None:
        """Replaces the counters of the worker process with the number ``incarnation`` by the newer ones in ``figures``.

        If the worker has unloaded a model version since the previous call, the version's former counters stay in the ledger.
        """
        before = self._workers.get(incarnation, {})
        now = {(version.name, version.version): version for version in figures.versions}
        self._workers[incarnation] = now
        gone = [last for key, last in before.items() if key not in now or now[key].began_ns != last.began_ns]
        self._end(gone)
        self.busy_ns += _busy_ns(now.values()) - (_busy_ns(before.values()) - _busy_ns(gone))

    def keep(self, incarnations: Set[int], served: Set[Key]) -> None:
        """Adds the counters of ended workers to the ledger's totals, and removes the totals of unserved model versions.

        ``incarnations``: the numbers of the worker processes that still run. ``served``: names and numbers of served versions.
        """
        for incarnation in self._workers.keys() - incarnations:
            self._end(self._workers.pop(incarnation).values())
        self._ended = {key: counts for key, counts in self._ended.items() if key in served}

    def _end(self, versions: Iterable[VersionFigures]) -> None:
        for version in versions:
            key = (version.name, version.version)
            counts, durations, moves = self._ended.get(key, _NOTHING)
            self._ended[key] = counts + version.counts, total(durations, version.durations), _moved(moves, version)

    def totals(self, served: Iterable[Key]) -> list[Total]:
        """Returns the counters of each version in ``served``, summed over all workers, including those that have ended."""
        found = []
        for key in served:
            counts, durations, moves = self._ended.get(key, _NOTHING)
            pending, cached, streams, set_byte_size = 0, False, False, 0
            sequences: tuple[int, int] | None = None
            for versions in self._workers.values():
                if (version := versions.get(key)) is not None:
                    counts = version.counts if counts is _NOTHING[0] else counts + version.counts
                    durations = total(durations, version.durations) if durations else version.durations
                    moves = _moved(moves, version)
                    sets = () if version.parameters is None else version.parameters.sets
                    set_byte_size += sum(each.byte_size for each in sets if each.on_device)
                    pending += version.pending
                    cached |= version.cached
                    streams |= version.streams
                    if version.sequences is not None:
                        seated, backlog = sequences or (0, 0)
                        sequences = seated + version.sequences[0], backlog + version.sequences[1]
            found.append(Total(*key, counts, pending, cached, streams, sequences, durations, *moves, set_byte_size))
        return found


def _busy_ns(versions: Iterable[VersionFigures]) -> int:
    return sum(version.counts.busy_ns for version in versions)


def _moved(before: tuple[int, int], version: VersionFigures) -> tuple[int, int]:
    found = version.parameters
    return before if found is None else (before[0] + found.evictions, before[1] + found.misses)


class OwnMetricsLedger:
    """Adds up the metrics that models' own code defines, over all workers and for the life of the daemon.

    Gauges are not added up: every worker has its own.
    """

    def __init__(self) -> None:
        #: Incarnation -> name of its slot, and its last report.
        self._workers: dict[int, tuple[str, Sequence[OwnMetrics]]] = {}
        #: Name of a family -> the counters of workers that have ended.
        self._ended: dict[str, OwnMetrics] = {}

    def update(self, incarnation: int, worker: str, families: Sequence[OwnMetrics]) -> None:
        """Stores ``families``, the metrics that the models of a worker report now, in place of the worker's earlier metrics.

        ``incarnation``: the number of the worker process. ``worker``: the name of the worker.
        """
        self._workers[incarnation] = worker, families

    def keep(self, incarnations: Set[int], served: Set[tuple[str, int]]) -> None:
        """Adds the counters and histograms of ended workers to the ledger's totals, and removes the totals of unserved models.

        ``incarnations``: the numbers of the worker processes that still run. ``served``: name and version of each served model.
        """
        for incarnation in self._workers.keys() - incarnations:
            for family in self._workers.pop(incarnation)[1]:
                if family.kind != "gauge":
                    before = self._ended.get(family.name)
                    metrics = _summed([*(before.metrics if before else ()), *family.metrics])
                    self._ended[family.name] = OwnMetrics(
                        family.name, family.description, family.kind, family.owners, metrics
                    )
        self._ended = {name: family for name, family in self._ended.items() if served & {*family.owners}}

    def families(self, apart: bool) -> list[OwnMetrics]:
        """Returns all metrics that models' own code defines, without their owners. Counters and histograms are summed.

        ``apart``: whether gauges get a label with their worker's name.
        """
        found: dict[str, tuple[OwnMetrics, list[MetricFigures]]] = {}
        for worker, families in [*self._workers.values(), ("", tuple(self._ended.values()))]:
            for family in families:
                # Only different workers can have families of one name and different kinds: the first one is shown.
                first, metrics = found.setdefault(family.name, (family, []))
                if first.kind == family.kind:
                    metrics += _labelled(family.metrics, worker) if apart and family.kind == "gauge" else family.metrics
        return [
            OwnMetrics(name, first.description, first.kind, (), _summed(metrics))
            for name, (first, metrics) in found.items()
        ]


def _labelled(metrics: Iterable[MetricFigures], worker: str) -> Iterable[MetricFigures]:
    for metric in metrics:
        labels = dict(metric.labels)
        labels.setdefault("worker", worker)
        yield MetricFigures(tuple(sorted(labels.items())), metric.value)


def _summed(metrics: Iterable[MetricFigures]) -> tuple[MetricFigures, ...]:
    summed: dict[Labels, MetricFigures] = {}
    for metric in metrics:
        before = summed.get(metric.labels)
        if before is None or before.buckets != metric.buckets:
            summed[metric.labels] = metric
        else:
            counts = tuple(map(operator.add, before.counts, metric.counts))
            summed[metric.labels] = MetricFigures(metric.labels, before.value + metric.value, metric.buckets, counts)
    return tuple(summed.values())
