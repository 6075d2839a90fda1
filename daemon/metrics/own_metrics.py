"""Metrics that models keep themselves, over all workers. Pure.

Counters and histograms are added up, and what a worker had counted stays when it is replaced, as long as a model that made the
family is served. Two workers' gauges are two: each has the worker's name among its labels.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from tensord.shm.figures import MetricFigures, OwnMetrics

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class OwnFamily:
    """A family of metrics as it is shown."""

    name: str
    description: str
    #: One of "counter", "gauge", "histogram".
    kind: str
    metrics: Mapping[Labels, MetricFigures]


class OwnMetricsLedger:
    """Adds up the models' own metrics of all workers, for the life of the daemon. Workers are known by their incarnations."""

    def __init__(self) -> None:
        #: Incarnation -> name of its slot, and its last report.
        self._workers: dict[int, tuple[str, Sequence[OwnMetrics]]] = {}
        #: Name of a family -> the counters of workers that have ended.
        self._ended: dict[str, OwnMetrics] = {}

    def update(self, incarnation: int, worker: str, families: Sequence[OwnMetrics]) -> None:
        """Notes a worker's report."""
        self._workers[incarnation] = worker, families

    def keep(self, incarnations: Set[int], served: Set[tuple[str, int]]) -> None:
        """Keeps the counters of workers that have ended, and forgets families without a served model."""
        for incarnation in self._workers.keys() - incarnations:
            for family in self._workers.pop(incarnation)[1]:
                if family.kind != "gauge":
                    before = self._ended.get(family.name)
                    metrics = _summed([*(before.metrics if before else ()), *family.metrics])
                    self._ended[family.name] = OwnMetrics(
                        family.name, family.description, family.kind, family.owners, tuple(metrics.values())
                    )
        self._ended = {name: family for name, family in self._ended.items() if served & {*family.owners}}

    def families(self, apart: bool) -> list[OwnFamily]:
        """Returns all families. ``apart``: there are several workers, whose gauges get the worker's name as a label."""
        found: dict[str, tuple[OwnMetrics, list[MetricFigures]]] = {}
        for worker, families in [*self._workers.values(), ("", tuple(self._ended.values()))]:
            for family in families:
                # Only different workers can have families of one name and different kinds: the first one is shown.
                first, metrics = found.setdefault(family.name, (family, []))
                if first.kind == family.kind:
                    metrics += _labelled(family.metrics, worker) if apart and family.kind == "gauge" else family.metrics
        return [
            OwnFamily(name, first.description, first.kind, _summed(metrics)) for name, (first, metrics) in found.items()
        ]


def _labelled(metrics: Iterable[MetricFigures], worker: str) -> Iterable[MetricFigures]:
    for metric in metrics:
        labels = dict(metric.labels)
        labels.setdefault("worker", worker)
        yield MetricFigures(tuple(sorted(labels.items())), metric.value)


def _summed(metrics: Iterable[MetricFigures]) -> dict[Labels, MetricFigures]:
    summed: dict[Labels, MetricFigures] = {}
    for metric in metrics:
        before = summed.get(metric.labels)
        if before is None or before.buckets != metric.buckets:
            summed[metric.labels] = metric
        else:
            counts = tuple(map(operator.add, before.counts, metric.counts))
            summed[metric.labels] = MetricFigures(metric.labels, before.value + metric.value, metric.buckets, counts)
    return summed
