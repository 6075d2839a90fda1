"""Tests until when requests of sequences wait: the earliest is first, those that left are skipped, none is kept for ever."""

from __future__ import annotations

import pytest

from tensord.workers.scheduling.expiries import TIMED_OUT, Expiries
from tensord.workers.scheduling.sequence import Controls, LiveSequence, Slot
from tests.workers.scheduling.naive_sequences import Step


def step(number: int, deadline_ns: int = 0, timeout_ns: int = 0, has_slot: bool = False) -> Step:
    made = Step(number, "k", number, Controls(number, True, False), timeout_ns)
    made.deadline_ns = deadline_ns
    made.live = LiveSequence(number, number)
    made.live.slot = Slot(0, 0) if has_slot else None
    made.line = 0
    return made


def test_the_earliest_moment_is_the_first() -> None:
    expiries: Expiries[Step] = Expiries()
    assert expiries.earliest_ns is None
    late, soon, backlog = step(1, deadline_ns=300), step(2, deadline_ns=100), step(3, timeout_ns=200)
    for each in (late, soon, backlog):
        expiries.watch(each, 3)
    assert expiries.earliest_ns == 100
    assert expiries.next(99) is None
    found = [expiries.next(1000) for _ in range(4)]
    assert [None if one is None else (one[0], one[1].message) for one in found] == [
        (soon, "Deadline Exceeded"),
        (backlog, TIMED_OUT),
        (late, "Deadline Exceeded"),
        None,
    ]


@pytest.mark.parametrize("left", [True, False])
def test_who_left_or_got_a_slot_is_passed_over(left: bool) -> None:
    expiries: Expiries[Step] = Expiries()
    expiries.watch(one := step(1, timeout_ns=50), 1)
    if left:
        one.line = -1
    else:
        one.live.slot = Slot(0, 0)
    assert expiries.next(1000) is None
    assert len(expiries) == 0


def test_a_timeout_counts_only_in_the_backlog() -> None:
    expiries: Expiries[Step] = Expiries()
    expiries.watch(step(1, timeout_ns=50, has_slot=True), 1)
    assert expiries.earliest_ns is None


def test_moments_of_those_that_left_do_not_pile_up() -> None:
    expiries: Expiries[Step] = Expiries()
    for number in range(1, 5000):
        each = step(number, deadline_ns=1 << 60)
        expiries.watch(each, 0)
        each.line = -1
    assert len(expiries) <= 65
