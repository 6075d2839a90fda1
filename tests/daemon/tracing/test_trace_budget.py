"""The counter of traces: exact whoever draws from it."""

from __future__ import annotations

import os

import pytest

from tensord.daemon.tracing.trace_budget import TraceBudget


@pytest.mark.parametrize("count", [0, 1, 3, 2**31 - 1])
def test_every_trace_is_counted_once(count: int) -> None:
    ours = TraceBudget.create(count)
    theirs = TraceBudget(os.dup(ours.fd))
    assert ours.remaining() == count
    taken = sum(budget.take() for budget in (ours, theirs) * 3)
    assert taken == min(count, 6)
    assert ours.remaining() == theirs.remaining() == count - taken
    ours.close()
    theirs.close()
