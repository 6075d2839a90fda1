"""Tests what models count themselves over workers that come and go."""

from __future__ import annotations

from tensord.daemon.metrics.own_metrics import OwnMetricsLedger
from tensord.shm.figures import MetricFigures, OwnMetrics


def family(kind: str, value: float, name: str = "m", counts: tuple[int, ...] = ()) -> OwnMetrics:
    buckets = (1.0,) if counts else ()
    return OwnMetrics(name, "text", kind, (("model", 1),), (MetricFigures((("a", "b"),), value, buckets, counts),))


def shown(ledger: OwnMetricsLedger, apart: bool = True) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    return {
        each.name: {labels: metric.value for labels, metric in each.metrics.items()} for each in ledger.families(apart)
    }


def test_counters_are_added_up_and_stay_while_their_model_is_served() -> None:
    ledger = OwnMetricsLedger()
    ledger.update(1, "worker-0", [family("counter", 3)])
    ledger.update(2, "worker-1", [family("counter", 4)])
    key = (("a", "b"),)
    assert shown(ledger) == {"m": {key: 7}}
    ledger.keep({2}, {("model", 1)})
    assert shown(ledger) == {"m": {key: 7}}, "what a worker had counted that is gone"
    ledger.update(3, "worker-0", [family("counter", 1)])
    ledger.keep({2, 3}, {("model", 1)})
    assert shown(ledger) == {"m": {key: 8}}
    ledger.keep({2, 3}, set())
    assert shown(ledger) == {"m": {key: 5}}, "the model was unloaded meanwhile"


def test_gauges_are_each_workers_own_and_go_with_it() -> None:
    ledger = OwnMetricsLedger()
    ledger.update(1, "worker-0", [family("gauge", 3)])
    ledger.update(2, "worker-1", [family("gauge", 4)])
    first, second = (("a", "b"), ("worker", "worker-0")), (("a", "b"), ("worker", "worker-1"))
    assert shown(ledger) == {"m": {first: 3, second: 4}}
    ledger.keep({2}, {("model", 1)})
    assert shown(ledger) == {"m": {second: 4}}
    assert shown(ledger, apart=False) == {"m": {(("a", "b"),): 4}}


def test_histograms_are_added_up_bucket_by_bucket_and_another_kind_is_left_out() -> None:
    ledger = OwnMetricsLedger()
    ledger.update(1, "worker-0", [family("histogram", 3, counts=(1, 2))])
    ledger.update(2, "worker-1", [family("histogram", 4, counts=(10, 20)), family("counter", 1, "n")])
    ledger.update(3, "worker-2", [family("gauge", 9), family("gauge", 9, "n")])
    found = {each.name: each for each in ledger.families(apart=True)}
    (metric,) = found["m"].metrics.values()
    assert (metric.value, metric.counts) == (7, (11, 22))
    assert found["n"].kind == "counter"
