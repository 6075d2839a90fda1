"""Tests when a trial of an attack holds: nothing failed, and nobody waited twice its own quiet time and 0.3 s."""

from __future__ import annotations

import pytest

from bench.small_arenas import Trial


def trial(*worst_ms: float, failures: int = 0) -> Trial:
    others = [{"worst_ms": worst, "failures": {}} for worst in worst_ms]
    others[0]["failures"] = {"OSError": failures} if failures else {}
    return Trial(tuple(others))


@pytest.mark.parametrize(("worst_ms", "late"), [((10, 20), 0), ((320, 340), 0), ((321, 340), 1), ((900, 900), 2)])
def test_who_waited_too_long(worst_ms: tuple[float, float], late: int) -> None:
    assert trial(*worst_ms).late(trial(10, 20)) == late


def test_what_failed_and_how_much_longer_it_took() -> None:
    seen = trial(30, 20, failures=3)
    assert seen.failed == 3
    assert seen.waits(trial(10, 20)) == [3, 1]
