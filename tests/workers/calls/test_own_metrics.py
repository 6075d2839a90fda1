"""Metrics that a model's code holds."""

from __future__ import annotations

from tensord.workers.calls.caller import Caller, ModelPort, calling
from tensord.workers.calls.metric_registry import MetricKind
from tensord.workers.calls.own_metrics import HeldFamily


def test_a_metric_that_is_made_with_every_request_is_held_once() -> None:
    port = ModelPort("m", 1, None)
    with calling(Caller(port)):
        one, other = (HeldFamily("rows", "", MetricKind.COUNTER) for _ in range(2))
    values = {one.metric({"kind": "a"}, None) for _ in range(100)} | {other.metric({"kind": "a"}, None)}
    (value,) = values
    assert (value.holders, len(one._labels)) == (2, 1)
    one.close()
    (family,) = port.metrics.figures()
    assert len(family.metrics) == 1
    other.close()
    assert port.metrics.figures() == ()
