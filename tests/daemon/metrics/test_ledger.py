"""Totals over workers never go back while a version is served, whatever dies, reloads or stays silent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.metrics.ledger import Key, Ledger, OwnMetricsLedger, Total
from tensord.shm.figures import Counts, Figures, MetricFigures, OwnMetrics, ParameterFigures, SetFigures, VersionFigures

M = ("m", 1)
N = ("n", 2)


def figures(*versions: VersionFigures) -> Figures:
    return Figures(versions, {})


def of(key: Key, success: int, began_ns: int = 1, pending: int = 0) -> VersionFigures:
    return VersionFigures(*key, began_ns, pending, Counts(success=success, copied_byte_size=8 * success))


def success(ledger: Ledger, key: Key = M) -> int:
    (total,) = ledger.totals([key])
    assert total.counts.copied_byte_size == 8 * total.counts.success
    return total.counts.success


def test_the_sum_over_workers() -> None:
    ledger = Ledger()
    ledger.update(1, figures(of(M, 5, pending=2), of(N, 1)))
    ledger.update(2, figures(of(M, 7, pending=1)))
    assert ledger.totals([M, N]) == [
        Total("m", 1, Counts(success=12, copied_byte_size=96), 3),
        Total("n", 2, Counts(success=1, copied_byte_size=8), 0),
    ]
    # Later figures replace earlier ones.
    ledger.update(1, figures(of(M, 6), of(N, 1)))
    assert success(ledger) == 13


def test_sequences_are_those_of_the_workers_that_live() -> None:
    ledger = Ledger()
    for worker, sequences in ((1, (5, 0)), (2, (2, 3))):
        ledger.update(worker, figures(VersionFigures(*M, 1, 0, Counts(), sequences=sequences), of(N, 1)))
    assert [total.sequences for total in ledger.totals([M, N])] == [(7, 3), None]
    ledger.keep({2}, {M, N})
    assert [total.sequences for total in ledger.totals([M])] == [(2, 3)]


def test_what_moved_is_kept_and_what_lies_on_devices_is_of_the_living() -> None:
    ledger = Ledger()
    for worker in (1, 2):
        sets = (SetFigures("main", 3, 100, True), SetFigures("a", 1, 50, False), SetFigures("b", 1, 7 * worker, True))
        moved = ParameterFigures(sets, 9, worker, 10 * worker)
        ledger.update(worker, figures(VersionFigures(*M, 1, 0, Counts(), parameters=moved), of(N, 1)))
    first, second = ledger.totals([M, N])
    assert (first.evictions, first.misses, first.set_byte_size) == (30, 3, 221)
    assert (second.evictions, second.misses, second.set_byte_size) == (0, 0, 0)
    ledger.keep({2}, {M, N})
    first, _ = ledger.totals([M, N])
    assert (first.evictions, first.misses, first.set_byte_size) == (30, 3, 114)


def test_the_busy_time_only_grows() -> None:
    """Versions that are unloaded or loaded again, and workers that end, take nothing of it away."""
    ledger, seen = Ledger(), list[int]()

    def busy(key: Key, busy_ns: int, began_ns: int = 1) -> VersionFigures:
        return VersionFigures(*key, began_ns, 0, Counts(busy_ns=busy_ns))

    for worker, versions in (
        (1, (busy(M, 5), busy(N, 7))),
        (1, (busy(M, 6),)),  # N is unloaded
        (1, (busy(M, 2, began_ns=2), busy(N, 1, began_ns=2))),  # both are loaded anew
        (2, (busy(M, 10),)),
    ):
        ledger.update(worker, figures(*versions))
        ledger.keep({worker}, {M})
        seen.append(ledger.busy_ns)
    assert seen == [12, 13, 16, 26]


def test_a_version_without_figures_stands_at_zero() -> None:
    assert Ledger().totals([M]) == [Total("m", 1, Counts(), 0)]


def test_a_dead_worker_leaves_what_was_known_of_it() -> None:
    ledger = Ledger()
    ledger.update(1, figures(of(M, 5, pending=4)))
    ledger.update(2, figures(of(M, 7)))
    ledger.keep({2}, {M})
    assert ledger.totals([M])[0] == Total("m", 1, Counts(success=12, copied_byte_size=96), 0)
    ledger.update(3, figures(of(M, 2)))
    ledger.keep({2, 3}, {M})
    assert success(ledger) == 14
    ledger.keep(set(), {M})
    ledger.keep(set(), {M})
    assert success(ledger) == 14


def test_a_version_that_was_unloaded_and_loaded_between_two_answers() -> None:
    """Although its new counters are already past the old ones."""
    ledger = Ledger()
    ledger.update(1, figures(of(M, 5)))
    ledger.update(1, figures(of(M, 9, began_ns=2)))
    assert success(ledger) == 14


def test_a_version_that_is_not_served_is_forgotten() -> None:
    ledger = Ledger()
    ledger.update(1, figures(of(M, 5), of(N, 1)))
    ledger.update(1, figures(of(N, 1)))
    ledger.keep({1}, {N})
    ledger.update(1, figures(of(M, 2, began_ns=2), of(N, 1)))
    ledger.keep({1}, {M, N})
    assert (success(ledger, M), success(ledger, N)) == (2, 1)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("count"), st.integers(0, 1), st.integers(0, 9)),
            st.tuples(st.just("die"), st.integers(0, 1), st.just(0)),
            st.tuples(st.just("reload"), st.integers(0, 1), st.just(0)),
            st.tuples(st.just("scrape"), st.integers(0, 3), st.just(0)),
        ),
        max_size=40,
    )
)
def test_totals_never_go_back_and_lose_only_what_nobody_was_told(events: list[tuple[str, int, int]]) -> None:
    """Two slots; ``scrape`` asks those whose bit is set, the others do not answer."""
    ledger, last = Ledger(), 0
    incarnations, began, counts, told = [0, 1], [1, 1], [0, 0], [0, 0]
    kept = 0
    for event, at, number in events:
        match event:
            case "count":
                counts[at] += number
            case "die":
                kept += told[at]
                incarnations[at], began[at], counts[at], told[at] = max(incarnations) + 1, 1, 0, 0
            case "reload":
                kept += told[at]
                began[at], counts[at], told[at] = began[at] + 1, 0, 0
            case "scrape":
                for slot in (0, 1):
                    if at & 1 << slot:
                        told[slot] = counts[slot]
                        ledger.update(incarnations[slot], figures(of(M, counts[slot], began[slot])))
                ledger.keep(set(incarnations), {M})
                now = success(ledger)
                assert now == kept + sum(told)
                assert now >= last
                last = now


# ---------------------------------------------------------------------------------- what models count themselves


def family(kind: str, value: float, name: str = "m", counts: tuple[int, ...] = ()) -> OwnMetrics:
    buckets = (1.0,) if counts else ()
    return OwnMetrics(name, "text", kind, (("model", 1),), (MetricFigures((("a", "b"),), value, buckets, counts),))


def shown(ledger: OwnMetricsLedger, apart: bool = True) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    return {each.name: {metric.labels: metric.value for metric in each.metrics} for each in ledger.families(apart)}


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
    (metric,) = found["m"].metrics
    assert (metric.value, metric.counts) == (7, (11, 22))
    assert found["n"].kind == "counter"
