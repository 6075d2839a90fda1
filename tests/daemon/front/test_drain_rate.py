"""Tests that a client that reads enough in each period has all the time it needs, and others have not."""

from __future__ import annotations

from tensord.daemon.front.drain_rate import DrainRate

SECONDS, RATE = 30.0, 1000


def test_nothing_waits() -> None:
    assert not DrainRate().is_slow(0.0, 0, 1e6, SECONDS, RATE)


def test_nothing_is_taken() -> None:
    pace = DrainRate()
    assert not pace.is_slow(100.0, 5000, 100.5, SECONDS, RATE)
    assert not pace.is_slow(100.0, 5000, 130.0, SECONDS, RATE)
    assert pace.is_slow(100.0, 5000, 130.1, SECONDS, RATE)


def test_a_byte_now_and_then() -> None:
    pace = DrainRate()
    assert not any(pace.is_slow(100.0, 1 << 20, 100.0 + at, SECONDS, RATE) for at in range(30))
    assert pace.is_slow(100.0, (1 << 20) - 30_000, 131.0, SECONDS, RATE)


def test_enough_is_taken() -> None:
    pace, left = DrainRate(), 1 << 20
    for at in range(300):
        left -= 1100
        assert not pace.is_slow(100.0, left, 100.0 + at, SECONDS, RATE)
    # From then on nothing is.
    assert pace.is_slow(100.0, left, 465.0, SECONDS, RATE)


def test_a_new_wait_begins_anew() -> None:
    pace = DrainRate()
    assert not pace.is_slow(100.0, 5000, 129.0, SECONDS, RATE)
    assert not pace.is_slow(131.0, 5000, 150.0, SECONDS, RATE)
    assert pace.is_slow(131.0, 5000, 161.1, SECONDS, RATE)


def test_any_rate() -> None:
    pace = DrainRate()
    assert not pace.is_slow(100.0, 5000, 101.0, SECONDS, 0)
    assert not pace.is_slow(100.0, 4999, 131.0, SECONDS, 0)
    assert pace.is_slow(100.0, 4999, 162.0, SECONDS, 0)
