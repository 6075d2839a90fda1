"""Tests what takes too long, without a clock."""

from __future__ import annotations

import pytest

from tensord.config.options import Http
from tensord.daemon.front.drain_rate import GRACE_SECONDS
from tensord.daemon.http.deadlines import ClientDeadlines, Late

HTTP = Http(head_timeout=10, body_timeout=60, write_timeout=30, keep_alive_timeout=75)


def started(**since: float) -> ClientDeadlines:
    """Returns deadlines that wait for the named things since the given times, and for nothing else."""
    made = ClientDeadlines(0.0)
    for name, value in since.items():
        setattr(made, f"{name}_since", value)
    return made


@pytest.mark.parametrize(
    ("waits", "limit", "late"),
    [("head", 10, Late.HEAD), ("body", 60, Late.BODY), ("stalled", 30, Late.ANSWER), ("idle", 75, Late.IDLE)],
)
def test_each_has_its_own_limit(waits: str, limit: float, late: Late) -> None:
    times = started(**{waits: 100.0})
    assert times.late(HTTP, 100 + limit, 0, -1, False) is None
    assert times.late(HTTP, 100 + limit + 0.1, 0, -1, False) is late


def test_nothing_is_waited_for() -> None:
    assert started().late(HTTP, 1e9, 0, -1, False) is None


@pytest.mark.parametrize("waits", ["head", "body", "idle"])
def test_nothing_is_expected_of_who_was_refused(waits: str) -> None:
    assert started(**{waits: 1.0}).late(HTTP, 1e6, 0, -1, True) is None


def test_who_takes_enough_of_its_answer_is_not_late() -> None:
    times, unsent = started(stalled=1.0), 1 << 30
    for now in range(1, 500):
        unsent -= HTTP.min_rate + 300
        assert times.late(HTTP, float(now), unsent, -1, False) is None
    assert times.late(HTTP, 561.0, unsent, -1, False) is Late.ANSWER


def test_who_takes_a_byte_now_and_then_is_late() -> None:
    times = started(stalled=1.0)
    assert [times.late(HTTP, float(now), 1000 - now, -1, False) for now in range(1, 32)] == [None] * 31
    assert times.late(HTTP, 32.0, 900, -1, False) is Late.ANSWER


def test_bodies_come_at_some_rate() -> None:
    times = started(body=100.0)
    assert times.late(HTTP, 100 + GRACE_SECONDS, 0, 0, False) is None
    assert times.late(HTTP, 101 + GRACE_SECONDS, 0, HTTP.min_rate - 1, False) is Late.SLOW
    assert times.late(HTTP, 101 + GRACE_SECONDS, 0, HTTP.min_rate, False) is None
    assert times.late(HTTP, 150.0, 0, 1 << 20, False) is None
    # It waits for room.
    assert times.late(HTTP, 150.0, 0, -1, False) is None
    assert started(body=100.0).late(Http(min_rate=0), 150.0, 0, 0, False) is None


@pytest.mark.parametrize("waits", ["head", "body"])
def test_what_the_server_does_not_read_is_not_late(waits: str) -> None:
    """It reads no further while requests that were sent ahead wait for their answers."""
    times = started(**{waits: 100.0})
    times.held_up(500.0)
    assert times.late(HTTP, 505.0, 0, 10 * HTTP.min_rate, False) is None
    assert times.late(HTTP, 561.0, 0, 1 << 30, False) in (Late.HEAD, Late.BODY)
    times = started()
    times.held_up(500.0)
    assert (times.head_since, times.body_since) == (0.0, 0.0)


@pytest.mark.parametrize("waits", ["head", "body"])
def test_a_pause_does_not_count(waits: str) -> None:
    times = started(**{waits: 100.0})
    times.held_up(500.0, 102.0)
    assert getattr(times, f"{waits}_since") == 498.0
    # The server says during a pause that it holds the client up, and the rest of the pause does not count twice.
    times.held_up(600.0)
    times.held_up(605.0, 510.0)
    assert getattr(times, f"{waits}_since") == 605.0
    times = started()
    times.held_up(500.0, 102.0)
    assert (times.head_since, times.body_since) == (0.0, 0.0)
