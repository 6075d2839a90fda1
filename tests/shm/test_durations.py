"""Histograms of durations: each falls into its bucket, bounds included, and sums are exact."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tensord.shm.durations import KINDS, PROTOCOLS, Durations, total

#: Of three buckets: their counts, the count beyond, the sum.
ROW = 5


def test_bounds_are_included() -> None:
    durations = Durations((0.001, 0.01, 1.0))
    for ns in (0, 1_000_000, 1_000_001, 10_000_000, 10_000_001, 1_000_000_000, 1_000_000_001):
        durations.add(1, 3, ns)
    ((protocol, counts),) = durations.counted().items()
    assert protocol == "grpc"
    assert counts[: 3 * ROW] == (0,) * 3 * ROW
    assert counts[3 * ROW :] == (2, 2, 2, 1, 2_022_000_003)


def test_protocols_without_requests_are_left_out() -> None:
    durations = Durations((1.0,))
    assert durations.counted() == {}
    durations.ran(2, 5, 2, 3)
    assert durations.counted() == {"lane": (1, 0, 5, 1, 0, 2, 1, 0, 3, 0, 0, 0)}


@given(
    st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=32, unique=True).map(sorted),
    st.lists(st.tuples(st.integers(0, 2), *[st.integers(0, 1 << 40)] * 3), max_size=20),
)
def test_all_at_once_is_one_by_one(buckets: list[float], requests: list[tuple[int, int, int, int]]) -> None:
    at_once, single, row = Durations(buckets), Durations(buckets), len(buckets) + 2
    for protocol, *durations in requests:
        at_once.ran(protocol, *durations)
        for kind, ns in enumerate(durations):
            single.add(protocol, kind, ns)
    assert at_once.counted() == single.counted()
    for protocol, counts in at_once.counted().items():
        own = [request for request in requests if PROTOCOLS[request[0]] == protocol]
        assert len(counts) == row * len(KINDS)
        for kind in range(3):
            *counted, sum_ns = counts[kind * row : (kind + 1) * row]
            bounds = [round(bound * 1e9) for bound in buckets]
            within = [sum(request[kind + 1] <= bound for request in own) for bound in bounds]
            assert list(itertools.accumulate(counted)) == [*within, len(own)]
            assert sum_ns == sum(request[kind + 1] for request in own)


def test_totals() -> None:
    one, other = {"http": (1, 2, 3)}, {"http": (10, 20, 30), "lane": (4, 5, 6)}
    assert total(one, other) == {"http": (11, 22, 33), "lane": (4, 5, 6)}
    assert total(one, {}) == one
    assert one == {"http": (1, 2, 3)}
