"""Counters, gauges and histograms that a model's code makes, and that the daemon shows at /metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from tensord.shm.errors import InvalidArgument
from tensord.workers.calls.caller import ModelPort, caller
from tensord.workers.calls.metric_registry import Labels, MetricKind, MetricRegistry, Value


class HeldFamily:
    """A metric family that a model's code has made. The family and its metrics exist at least until ``close`` is called."""

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        """Creates the metric family ``name``, or uses the existing one. The family exists at least until ``close`` is called.

        Raises InvalidArgument if an argument is malformed, if the existing family is of another kind, or if the caller is not
        the code of a model. Raises Unavailable if there are too many families.
        """
        found = caller()
        if found is None:
            raise InvalidArgument("it is no model that makes it")
        port = found.port
        port.metrics.hold(name, description, kind, port.key)
        self._port: ModelPort | None = port
        self.name = name
        self.kind = kind
        self._labels: set[Labels] = set()
        port.held[self] = None

    @property
    def registry(self) -> MetricRegistry:
        """Returns the worker's registry of metrics. Raises InvalidArgument if ``close`` was called."""
        if self._port is None:
            # Triton's wording.
            raise InvalidArgument(
                "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The 'MetricFamily' object "
                "should be deleted AFTER its corresponding 'Metric' objects have been deleted."
            )
        return self._port.metrics

    def metric(self, labels: Mapping[str, str], buckets: Sequence[float] | None) -> Value:
        """Returns the value of the metric that has these labels. Makes the metric if there is none.

        ``buckets``: upper bounds of a histogram's buckets; None: the metric is no histogram.
        Raises InvalidArgument: labels or buckets are malformed, or the metric has other buckets. Raises Unavailable: there are
        too many metrics.
        """
        return self.registry.metric(self.name, labels, buckets, self._labels)

    def close(self) -> None:
        """Stops holding the family and its metrics. They disappear unless another ``HeldFamily`` holds them. Idempotent."""
        port, self._port = self._port, None
        if port is not None:
            port.held.pop(self, None)
            port.metrics.release(self.name, port.key, self._labels)


class OwnMetric:
    """Base of the metrics that a model's code makes. Each object stands for one metric."""

    _kind: MetricKind

    def __init__(
        self, name: str, description: str, labels: Mapping[str, str] | None, buckets: Sequence[float] | None = None
    ) -> None:
        """Stands for the worker's metric that has this name and these labels. Makes the metric if there is none.

        ``labels``: None for no labels. ``buckets``: upper bounds of a histogram's buckets, or None for a counter or gauge.
        Raises InvalidArgument if an argument is malformed, if the name is in use for another kind of metric, if the metric has
        other buckets, or if the caller is not the code of a model. Raises Unavailable if the worker has too many metrics.
        """
        self._held = HeldFamily(name, description, self._kind)
        self._value = self._held.metric(labels or {}, buckets)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self._held.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._held.name!r}>"


class Counter(OwnMetric):
    """A counter that a model's code makes: a metric that only grows."""

    _kind = MetricKind.COUNTER

    def increment(self, by: float = 1) -> None:
        """Adds ``by``. Raises InvalidArgument: it is a counter, and ``by`` is less than 0."""
        self._held.registry.increment(self._kind, self._value, float(by))

    @property
    def value(self) -> float:
        """The value of the metric on this worker. A new metric begins with 0."""
        return self._held.registry.value(self._kind, self._value)


class Gauge(Counter):
    """A metric of a model's own code, which the code can raise, lower and set. Each worker reports its own value."""

    _kind = MetricKind.GAUGE

    def set(self, to: float) -> None:
        self._held.registry.set(self._kind, self._value, float(to))


class Histogram(OwnMetric):
    """A histogram that a model's code makes: a metric that counts observed values by size."""

    _kind = MetricKind.HISTOGRAM

    def observe(self, value: float) -> None:
        """Adds a value to the histogram. Raises InvalidArgument: the value is NaN."""
        self._held.registry.observe(self._kind, self._value, float(value))
