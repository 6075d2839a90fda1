"""Registers the metrics that models' code on one worker makes: counters, gauges and histograms, by family and labels.

Several objects of models' code can use the same family or metric. The registry removes a family or metric when no object uses
the family or metric any more. Any thread may use the registry.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import math
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tensord.shm.errors import InvalidArgument, ServingError, Unavailable, Unsupported
from tensord.shm.figures import MetricFigures, OwnMetrics

#: Metrics of all families of a worker together.
MAX_METRICS = 4096
MAX_BUCKETS = 256
#: Bytes of a family's description, and of all names and values of a metric's labels.
_MAX_TEXT = 4096
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
#: Prefixes of the daemon's own metrics.
_TAKEN = ("nv_", "tensord_")

Labels = tuple[tuple[str, str], ...]


class MetricKind(enum.Enum):
    """The kinds of metrics. All metrics of a family are of the same kind."""

    #: It only grows.
    COUNTER = "counter"
    GAUGE = "gauge"
    #: It counts values by size.
    HISTOGRAM = "histogram"


class Value:
    """The value ``sum`` of a counter or gauge, or what a histogram has counted.

    For a histogram, ``sum`` is the sum of all observed numbers, and ``counts`` says how many of them fell into each bucket.
    """

    __slots__ = ("buckets", "counts", "holders", "sum")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0
        #: How many held families have made it.
        self.holders = 0


@dataclass(slots=True, eq=False)
class _Family:
    description: str
    kind: MetricKind
    #: Model versions of the holders, one entry for each holder.
    owners: list[tuple[str, int]] = field(default_factory=list)
    values: dict[Labels, Value] = field(default_factory=dict)


class MetricRegistry:
    """The metrics that models' code on one worker has made, by family and labels."""

    def __init__(self) -> None:
        #: Reentrant: the garbage collector may release a family while this thread holds the lock.
        self._lock = threading.RLock()
        self._families: dict[str, _Family] = {}
        self._count = 0

    def hold(self, name: str, description: str, kind: MetricKind, owner: tuple[str, int]) -> None:
        """Creates the metric family ``name`` if it does not exist. The caller must call ``release`` later.

        ``owner``: the name and version of the model that uses the family. Raises Unavailable: there are too many families.
        Raises InvalidArgument: the name or description is not allowed, or the existing family is of another kind.
        """
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"'{name[:100]}' cannot be the name of a metric")
        if name.startswith(_TAKEN):
            raise InvalidArgument(f"metric '{name}': names that begin with {' or '.join(_TAKEN)} are the server's own")
        if (size := len(description.encode())) > _MAX_TEXT:
            raise InvalidArgument(f"the description of metric '{name}' has {size} bytes, at most {_MAX_TEXT} are taken")
        with self._lock:
            family = self._families.get(name)
            if family is None:
                if len(self._families) >= MAX_METRICS:
                    raise Unavailable(f"there are {MAX_METRICS} metric families, and there may be no more")
                family = self._families[name] = _Family(description, kind)
            elif family.kind is not kind:
                raise InvalidArgument(
                    f"metric family '{name}' is there as a {family.kind.value}, not as a {kind.value}"
                )
            family.owners.append(owner)

    def release(self, name: str, owner: tuple[str, int], held: Iterable[Labels]) -> None:
        """Undoes one call of ``hold`` with this ``name`` and ``owner``. Removes the family once all calls for it are undone.

        ``held``: the labels of the caller's metrics in this family. Each of these metrics that no other caller uses is removed.
        """
        with self._lock:
            family = self._families[name]
            for labels in held:
                value = family.values[labels]
                value.holders -= 1
                if not value.holders:
                    del family.values[labels]
                    self._count -= 1
            family.owners.remove(owner)
            if not family.owners:
                del self._families[name]

    def metric(self, name: str, labels: Mapping[str, str], buckets: Sequence[float] | None, held: set[Labels]) -> Value:
        """Returns the value of the metric with these labels in the family ``name``. Creates the metric if it does not exist.

        Args:
          buckets: upper bounds of a histogram's buckets. It is None if the metric is no histogram.
          held: the labels of the metrics that the caller uses in this family. ``labels`` are added to the set. The caller
            later passes the set to ``release``.
        Raises InvalidArgument if labels or buckets are malformed, or if the metric exists with other buckets.
        Raises Unavailable if there are too many metrics.
        """
        key = _checked_labels(name, labels)
        with self._lock:
            family = self._families[name]
            bounds = _checked_buckets(name, family.kind, buckets)
            value = family.values.get(key)
            if value is None:
                if self._count >= MAX_METRICS:
                    raise Unavailable(f"there are {self._count} metrics, at most {MAX_METRICS} are kept")
                value = family.values[key] = Value(bounds)
                self._count += 1
            elif value.buckets != bounds:
                raise InvalidArgument(
                    f"metric '{name}' is there with other buckets: {[*value.buckets]}, not {[*bounds]}"
                )
            if key not in held:
                held.add(key)
                value.holders += 1
            return value

    def increment(self, kind: MetricKind, value: Value, by: float) -> None:
        """Adds ``by`` to ``value``.

        Raises InvalidArgument: a counter would shrink. Raises Unsupported: the metric is a histogram.
        """
        if kind is MetricKind.HISTOGRAM:
            raise _unsupported()
        if kind is MetricKind.COUNTER and not by >= 0:
            raise InvalidArgument(
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
            )
        with self._lock:
            value.sum += by

    def set(self, kind: MetricKind, value: Value, to: float) -> None:
        """Sets the gauge ``value`` to the number ``to``. Raises Unsupported if ``kind`` is no gauge."""
        if kind is not MetricKind.GAUGE:
            raise _unsupported()
        with self._lock:
            value.sum = to

    def observe(self, kind: MetricKind, value: Value, observed: float) -> None:
        """Adds the number ``observed`` to a histogram. ``value``: the histogram's sum and counts. ``kind``: the metric's kind.

        Raises InvalidArgument if ``observed`` is NaN. Raises Unsupported if the metric is not a histogram.
        """
        if kind is not MetricKind.HISTOGRAM:
            raise _unsupported()
        if math.isnan(observed):
            raise InvalidArgument("a histogram cannot observe what is no number")
        with self._lock:
            value.counts[bisect.bisect_left(value.buckets, observed)] += 1
            value.sum += observed

    def value(self, kind: MetricKind, value: Value) -> float:
        """Returns the value of a counter or a gauge. Raises Unsupported: the metric is a histogram."""
        if kind is MetricKind.HISTOGRAM:
            raise _unsupported()
        return value.sum

    def figures(self) -> tuple[OwnMetrics, ...]:
        """Returns the current values of all metrics, by family."""
        with self._lock:
            return tuple(
                OwnMetrics(
                    name,
                    family.description,
                    family.kind.value,
                    tuple(sorted(set(family.owners))),
                    tuple(
                        MetricFigures(labels, value.sum, value.buckets, tuple(value.counts) if histogram else ())
                        for labels, value in list(family.values.items())
                    ),
                )
                for name, family in list(self._families.items())
                for histogram in (family.kind is MetricKind.HISTOGRAM,)
            )

    def __repr__(self) -> str:
        return f"<MetricRegistry {len(self._families)} families, {self._count} metrics>"


def _unsupported() -> ServingError:
    return Unsupported("Unsupported TRITONSERVER_MetricKind")


def _checked_labels(name: str, labels: Mapping[str, str]) -> Labels:
    for key, text in labels.items():
        if not isinstance(key, str) or not _LABEL.fullmatch(key) or key.startswith("__") or key == "le":
            raise InvalidArgument(f"metric '{name}': {str(key)[:100]!r} cannot be the name of a label")
        if not isinstance(text, str):
            raise InvalidArgument(f"metric '{name}': label '{key}' is of type {type(text).__name__}, str is expected")
    size = sum(len(key) + len(text.encode()) for key, text in labels.items())
    if size > _MAX_TEXT:
        raise InvalidArgument(f"the labels of metric '{name}' have {size} bytes, at most {_MAX_TEXT} are taken")
    return tuple(sorted(labels.items()))


def _checked_buckets(name: str, kind: MetricKind, buckets: Sequence[float] | None) -> tuple[float, ...]:
    if kind is not MetricKind.HISTOGRAM:
        if buckets:
            raise InvalidArgument(f"metric '{name}' is a {kind.value}, which has no buckets")
        return ()
    if buckets is None:
        raise InvalidArgument(f"metric '{name}' is a histogram, which needs buckets")
    if len(buckets) > MAX_BUCKETS:
        raise InvalidArgument(f"metric '{name}' has {len(buckets)} buckets, at most {MAX_BUCKETS} are kept")
    bounds = tuple(map(float, buckets))
    if not all(map(math.isfinite, bounds)) or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise InvalidArgument(f"metric '{name}': buckets have to be finite and to grow: {[*bounds]}")
    return bounds
