"""Metrics that a model keeps itself: shown as long as it holds them, and no longer than its version is served.

counter, gauge, histogram ─▶ a family that is held ─▶ MetricRegistry ─▶ figures ─▶ /metrics
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from tensord.shm.errors import InvalidArgument
from tensord.workers.calls.caller import ModelPort, caller
from tensord.workers.calls.metric_registry import Labels, MetricKind, MetricRegistry, Value


class HeldFamily:
    """One holder's share of a metric family: the metrics that it has made there."""

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        """Makes or shares a family. Raises InvalidArgument: it is malformed, exists as another kind, or no model makes it."""
        found = caller()
        if found is None:
            raise InvalidArgument("it is no model that makes it")
        port = found.port
        port.metrics.hold(name, description, kind, port.key)
        self._port: ModelPort | None = port
        self.name = name
        self.kind = kind
        self._labels: list[Labels] = []
        port.held.add(self)

    @property
    def registry(self) -> MetricRegistry:
        """The registry. Raises InvalidArgument, in Triton's words: the family is held no longer."""
        if self._port is None:
            raise InvalidArgument(
                "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The 'MetricFamily' object "
                "should be deleted AFTER its corresponding 'Metric' objects have been deleted."
            )
        return self._port.metrics

    def metric(self, labels: Mapping[str, str], buckets: Sequence[float] | None) -> Value:
        """Returns the metric with these labels. Raises InvalidArgument, Unavailable."""
        key, value = self.registry.metric(self.name, labels, buckets)
        self._labels.append(key)
        return value

    def close(self) -> None:
        """Releases the family and its metrics. Idempotent."""
        port, self._port = self._port, None
        if port is not None:
            port.held.discard(self)
            port.metrics.release(self.name, port.key, self._labels)


class OwnMetric:
    """A metric that a model keeps itself."""

    _kind: MetricKind

    def __init__(
        self, name: str, description: str, labels: Mapping[str, str] | None, buckets: Sequence[float] | None = None
    ) -> None:
        """Makes a metric. Raises InvalidArgument: it is malformed, or exists as another kind. Unavailable: there are too many."""
        self._held = HeldFamily(name, description, self._kind)
        self._value = self._held.metric(labels or {}, buckets)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self._held.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._held.name!r}>"


class Counter(OwnMetric):
    """A metric that only grows."""

    _kind = MetricKind.COUNTER

    def increment(self, by: float = 1) -> None:
        """Adds to the counter. Raises InvalidArgument: ``by`` is less than 0."""
        self._held.registry.increment(self._kind, self._value, float(by))

    @property
    def value(self) -> float:
        """The count of this worker since the family exists in it."""
        return self._held.registry.value(self._kind, self._value)


class Gauge(Counter):
    """A metric that goes up and down; with several workers each shows its own."""

    _kind = MetricKind.GAUGE

    def increment(self, by: float = 1) -> None:
        """Adds to the gauge; ``by`` may be less than 0."""
        super().increment(by)

    def set(self, to: float) -> None:
        self._held.registry.set(self._kind, self._value, float(to))


class Histogram(OwnMetric):
    """A metric that counts values by size."""

    _kind = MetricKind.HISTOGRAM

    def observe(self, value: float) -> None:
        """Adds a value. Raises InvalidArgument: it is no number."""
        self._held.registry.observe(self._kind, self._value, float(value))
