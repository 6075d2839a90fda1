"""The bound of all page-locked memory."""

from __future__ import annotations

from tensord.workers.devices.pinned_budget import PinnedBudget


def test_what_does_not_fit_takes_nothing() -> None:
    budget = PinnedBudget(100)
    assert budget.take(60)
    assert not budget.take(41)
    assert budget.byte_size == 60
    assert budget.take(40)
    budget.give_back(60)
    assert budget.byte_size == 40
