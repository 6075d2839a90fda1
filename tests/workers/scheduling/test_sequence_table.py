"""Slots of sequences: the lowest free one of all instances is the next, and none is given out twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensord.workers.scheduling.sequence import Slot
from tensord.workers.scheduling.sequence_table import Slots


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
        slots.check_invariants(taken)
    assert slots.free == len(every) - len(taken)


def test_more_than_memory_could_list() -> None:
    slots = Slots(1 << 40, 2)
    assert [slots.take(), slots.take(), slots.take()] == [Slot(0, 0), Slot(0, 1), Slot(1, 0)]
    assert slots.free == (1 << 41) - 3
