"""The counter of traces: exact whoever draws from it."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest

from tensord.shm.trace_counters import SampleCounter, TraceBudget


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


@pytest.mark.parametrize("rate", [1, 2, 3, 7])
def test_all_fronts_count_together(rate: int) -> None:
    ours = SampleCounter.create(rate)
    theirs = SampleCounter(os.dup(ours.fd), rate)
    traced = [number for number in range(1, 43) if (ours, theirs, theirs)[number % 3].take()]
    assert traced[0] == rate
    assert {later - earlier for earlier, later in pairwise(traced)} == {rate}
    ours.close()
    theirs.close()


@pytest.mark.parametrize("rate", [16, 100, 101, 1000])
def test_one_in_rate_where_fronts_take_blocks(rate: int) -> None:
    """A front alone finds each ``rate``-th request; of two, whoever is asked how often, the traced ones are as many."""
    alone = SampleCounter.create(rate)
    traced = [number for number in range(1, 5 * rate + 1) if alone.take()]
    assert traced == [rate * round_ for round_ in range(1, 6)]
    theirs = SampleCounter(os.dup(alone.fd), rate)
    count = sum((alone if number % 3 else theirs).take() for number in range(50 * rate))
    assert 49 <= count <= 50
    alone.close()
    theirs.close()


def test_most_requests_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    read = os.eventfd_read

    def ask(fd: int) -> int:
        asked.append(fd)
        return read(fd)

    monkeypatch.setattr(os, "eventfd_read", ask)
    turn = SampleCounter.create(100)
    assert sum(turn.take() for _ in range(1000)) == 10
    assert len(asked) <= 100
    turn.close()


def test_the_largest_rate() -> None:
    turn = SampleCounter.create((1 << 32) - 1)
    assert not any(turn.take() for _ in range(100))
    turn.close()


def test_two_that_find_none_at_once() -> None:
    """Both are traced, and so many more are passed over: what is traced stays one in ``rate``."""
    turn = SampleCounter.create(4)
    while not turn.take():
        pass
    os.eventfd_write(turn.fd, 3)  # the other one of the two
    assert [turn.take() for _ in range(8)] == [False] * 6 + [True, False]
    turn.close()
