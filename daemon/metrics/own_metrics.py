"""Adds up, over all workers, the metrics that models define. Does no I/O.

Counters and histograms are added up; what a worker had counted stays when it is replaced, as long as a model that defined the
metric is served. Gauges of two workers are not added: each gets the worker's name as a label.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from tensord.shm.figures import MetricFigures, OwnMetrics

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class OwnFamily:
    """A metric that models define (not tensord), summed over all workers."""

    name: str
    description: str
    #: One of "counter", "gauge", "histogram".
    kind: str
    metrics: Mapping[Labels, MetricFigures]


class OwnMetricsLedger:
    """Adds up, over all workers and for the life of the daemon, the metrics that models define.

    A worker is known by its incarnation, the number of its process.
    """

    def __init__(self) -> None:
        #: Incarnation -> name of its slot, and its last report.
        self._workers: dict[int, tuple[str, Sequence[OwnMetrics]]] = {}
        #: Name of a family -> the counters of workers that have ended.
        self._ended: dict[str, OwnMetrics] = {}

    def update(self, incarnation: int, worker: str, families: Sequence[OwnMetrics]) -> None:
        """Replaces the metrics of a worker's models by those that it reports now. ``worker``: the name of its slot."""
        self._workers[incarnation] = worker, families

    def keep(self, incarnations: Set[int], served: Set[tuple[str, int]]) -> None:
        """Moves the counters of ended workers to a separate sum, and removes metrics whose models are not served from that sum.

        ``incarnations``: the workers that still run. ``served``: name and number of each version that is served.
        """
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
        """Returns all metrics that models define.

        ``apart``: there are several workers, so each gauge gets its worker's name as a label.
        """
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
