"""Tests the time by which clients are late."""

from __future__ import annotations

import pytest

from tensord.daemon.front.drain_rate import DrainRate
from tensord.shm import running_time
from tensord.shm.running_time import MOST_SECONDS, RunningTime


def test_the_time_in_which_nothing_ran_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    at = [1000.0]
    monkeypatch.setattr(running_time, "monotonic", lambda: at[0])
    clock, read = RunningTime(), [1000.0]
    # Each step in seconds, and by how much the time goes on.
    for step, went_on in ((0.25, 0.25), (MOST_SECONDS, MOST_SECONDS), (60.0, MOST_SECONDS), (0.0, 0.0), (1.0, 1.0)):
        at[0] += step
        read.append(clock())
        assert read[-1] - read[-2] == went_on
        assert clock.look() == read[-1]


def test_it_goes_on_when_its_process_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    at = [1000.0]
    monkeypatch.setattr(running_time, "monotonic", lambda: at[0])
    clock = RunningTime()
    at[0] += 30.0
    assert clock() == 1000.0 + MOST_SECONDS
    at[0] += 1.0
    assert clock() == clock.look() == 1000.0 + MOST_SECONDS
    at[0] += 1.0
    assert clock() == 1001.0 + MOST_SECONDS


def test_who_was_not_looked_at_before_is_not_slow() -> None:
    """However late the first look is: what the client received since its bytes began to wait is not known."""
    pace = DrainRate()
    assert not pace.is_slow(1000.0, 5000, 1100.0, 1.0, 1)
    assert not pace.is_slow(1000.0, 4000, 1101.0, 1.0, 1)
    assert pace.is_slow(1000.0, 3999, 1102.5, 1.0, 1)
