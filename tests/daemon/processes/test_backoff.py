"""Delays grow, are bounded, and forget after a healthy life."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.processes.backoff import HEALTHY_NS, SERVED_MAXIMUM, Backoff


def test_series() -> None:
    backoff = Backoff(0.1, 1.0, random.Random(1))
    delays = [backoff.died(0, False) for _ in range(6)]
    for delay, full in zip(delays, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0], strict=True):
        assert 0.9 * full <= delay <= full
    assert backoff.died(HEALTHY_NS, False) <= 0.1
    assert backoff.deaths == 1


@given(st.lists(st.integers(0, 2 * HEALTHY_NS), max_size=100), st.floats(0, 10), st.floats(10, 100))
def test_bounds(lives: list[int], first: float, maximum: float) -> None:
    backoff = Backoff(first, maximum, random.Random(0))
    for lived in lives:
        assert 0 <= backoff.died(lived, False) <= maximum


def test_who_had_come_up_is_replaced_soon_however_often_it_dies() -> None:
    backoff = Backoff(0.1, 10.0, random.Random(0))
    for _ in range(30):
        assert backoff.died(10**9, True) <= SERVED_MAXIMUM
    assert backoff.died(10**9, False) > 5
