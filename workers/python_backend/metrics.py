"""Metrics that a model keeps itself: part of ``triton_python_backend_utils`` (see ``interface``).

Source: triton-inference-server/python_backend, README "Custom Metrics"; src/metric.cc, whose words the errors are in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

from tensord.workers.calls.metric_registry import MetricKind as MetricKind
from tensord.workers.calls.metric_registry import Value
from tensord.workers.calls.own_metrics import HeldFamily
from tensord.workers.python_backend.errors import Saying, TritonModelException

COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


class MetricFamily:
    """Metrics of one name. They are shown as long as it is held by the model, and no longer than that is served."""

    COUNTER: ClassVar = MetricKind.COUNTER
    GAUGE: ClassVar = MetricKind.GAUGE
    HISTOGRAM: ClassVar = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        """Raises TritonModelException: it cannot be; it is there as of another kind; or no model makes it."""
        if not isinstance(kind, MetricKind):
            raise TritonModelException("Error when creating MetricFamily: Unknown metric kind")
        with Saying("Error when creating MetricFamily"):
            self._held = HeldFamily(name, description, kind)

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """The metric with these labels; ``buckets`` are a histogram's. Raises TritonModelException."""
        if not isinstance(labels, Mapping | None):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        if not isinstance(buckets, list | tuple | None):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        with Saying("Error when creating Metric"):
            return Metric(self._held, self._held.metric(labels or {}, buckets))

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self._held.close()


class Metric:
    """One of a family, and of no use without it."""

    def __init__(self, held: HeldFamily, value: Value) -> None:
        self._held = held
        self._value = value

    def increment(self, value: float) -> None:
        """Raises TritonModelException: by less than 0, of a counter; it is a histogram."""
        with Saying("Failed to increment metric value"):
            self._held.registry.increment(self._held.kind, self._value, float(value))

    def set(self, value: float) -> None:
        """Raises TritonModelException: it is no gauge."""
        with Saying("Failed to set metric value"):
            self._held.registry.set(self._held.kind, self._value, float(value))

    def observe(self, value: float) -> None:
        """Raises TritonModelException: it is no histogram."""
        with Saying("Failed to observe metric value"):
            self._held.registry.observe(self._held.kind, self._value, float(value))

    def value(self) -> float:
        """Raises TritonModelException: it is a histogram."""
        with Saying("Failed to get metric value"):
            return self._held.registry.value(self._held.kind, self._value)
