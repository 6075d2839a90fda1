"""Slots of sequences: the lowest free one of all instances is the next, and none is given out twice."""

from __future__ import annotations

import weakref
from unittest.mock import ANY, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.workers.scheduling.sequence import Controls, LiveSequence, Slot
from tensord.workers.scheduling.sequence_table import TIMED_OUT, SequenceRules, SequenceTable, Slots
from tests.invariants import check_slots
from tests.workers.scheduling.naive_sequences import Step


@given(st.integers(1, 5), st.integers(1, 3), st.lists(st.integers(0, 20)))
def test_the_lowest_free_one_is_taken(of_each: int, instances: int, events: list[int]) -> None:
    """An event gives back the slot of that number among those that are taken, or takes one."""
    slots, taken = Slots(of_each, instances), set[Slot]()
    every = {Slot(number, instance) for number in range(of_each) for instance in range(instances)}
    for event in events:
        if event < len(taken):
            slots.give_back(gone := sorted(taken)[event])
            taken.remove(gone)
        elif slots.free:
            slot = slots.take()
            assert slot == min(every - taken)
            taken.add(slot)
        check_slots(slots, taken)
    assert slots.free == len(every) - len(taken)


def test_more_than_memory_could_list() -> None:
    slots = Slots(1 << 40, 2)
    assert [slots.take(), slots.take(), slots.take()] == [Slot(0, 0), Slot(0, 1), Slot(1, 0)]
    assert slots.free == (1 << 41) - 3


def step(number: int, deadline_ns: int = 0, timeout_ns: int = 0, has_slot: bool = False) -> Step:
    made = Step(number, "k", number, Controls(number, True, False), timeout_ns)
    made.deadline_ns = deadline_ns
    made.live = LiveSequence(number, number)
    made.live.slot = Slot(0, 0) if has_slot else None
    made.line = 0
    return made


def table() -> SequenceTable[Step]:
    return SequenceTable("m", SequenceRules(), 1, Mock())


def test_the_earliest_moment_is_the_first() -> None:
    waiting = table()
    assert waiting.next_tick_ns == 0
    late, soon, backlog = step(1, deadline_ns=300), step(2, deadline_ns=100), step(3, timeout_ns=200)
    for each in (late, soon, backlog):
        waiting._watch(each)
    assert waiting.next_tick_ns == 100
    assert waiting.expired(99) is None
    found = [waiting.expired(1000) for _ in range(4)]
    assert [None if one is None else (one[0], one[1].message) for one in found] == [
        (soon, "Deadline Exceeded"),
        (backlog, TIMED_OUT),
        (late, "Deadline Exceeded"),
        None,
    ]


@pytest.mark.parametrize("left", [True, False])
def test_who_left_or_got_a_slot_is_passed_over(left: bool) -> None:
    waiting = table()
    waiting._watch(one := step(1, timeout_ns=50))
    if left:
        one.line = -1
    else:
        one.live.slot = Slot(0, 0)
    assert waiting.expired(1000) is None
    assert len(waiting.expiries) == 0


def test_a_step_that_left_is_kept_by_nobody() -> None:
    """Also while one waits that would expire before it."""
    waiting = table()
    waiting._watch(first := step(1, deadline_ns=5))
    waiting._watch(gone := step(2, deadline_ns=1 << 60, timeout_ns=1 << 50))
    gone.line, left = -1, weakref.ref(gone)
    del gone
    assert (left(), waiting.next_tick_ns) == (None, 5)
    assert [waiting.expired(1 << 61), waiting.expired(1 << 61)] == [(first, ANY), None]


def test_a_timeout_counts_only_in_the_backlog() -> None:
    waiting = table()
    waiting._watch(step(1, timeout_ns=50, has_slot=True))
    assert waiting.next_tick_ns == 0


def test_moments_of_those_that_left_do_not_pile_up() -> None:
    waiting = table()
    for number in range(1, 5000):
        each = step(number, deadline_ns=1 << 60)
        waiting._watch(each)
        each.line = -1
    assert len(waiting.expiries) <= 65
