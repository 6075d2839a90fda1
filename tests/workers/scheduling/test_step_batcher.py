"""Tests who has a slot and who is stepped: stories with the expected decisions, and chance."""

from __future__ import annotations

import pytest

from tensord.shm.errors import Cancelled, DeadlineExceeded
from tensord.workers.scheduling.queue import QueueRules, RequestQueue, Waiting
from tensord.workers.scheduling.step_batcher import AHEAD, EMITS, FINISHED, SlotAnswer, StepBatcher, StepRules
from tests.generated import examples
from tests.invariants import check_invariants
from tests.workers.scheduling.step_simulator import Simulation


def batcher_of(
    waiting: int = 0, slots: int = 2, max_steps: int = 100, inserts_per_step: int = 2, insert_rows: int = 1
) -> tuple[StepBatcher[Waiting], list[Waiting]]:
    rules = StepRules(slots, max_steps, inserts_per_step, insert_rows)
    batcher: StepBatcher[Waiting] = StepBatcher(rules, RequestQueue(QueueRules(10, levels=3, default_level=2)))
    return batcher, [arrive(batcher, at) for at in range(1, waiting + 1)]


def arrive(batcher: StepBatcher[Waiting], at: int, key: str = "a", priority: int = 0) -> Waiting:
    request = Waiting(key, 1, at)
    request.priority = priority
    batcher.arrived(request)
    return request


def give_slots(batcher: StepBatcher[Waiting]) -> list[Waiting]:
    """Gives slots to all requests that may have one now; returns them."""
    found: list[Waiting] = []
    while taken := batcher.take(0):
        found += taken
    check_invariants(batcher)
    return found


def test_free_slots_are_taken_in_order() -> None:
    batcher, (a, b, c) = batcher_of(3)
    assert batcher.due_ns() == 1
    assert give_slots(batcher) == [a, b]
    assert (batcher.slot(a), batcher.slot(b)) == (0, 1)
    assert (batcher.due_ns(), len(batcher)) == (None, 1)
    batcher.done([a], 0)
    batcher.step()
    assert batcher.due_ns() == 3
    assert give_slots(batcher) == [c]
    assert batcher.slot(c) == 0


def test_priority_comes_first() -> None:
    batcher, _ = batcher_of()
    slow, urgent, usual = arrive(batcher, 1, priority=3), arrive(batcher, 2, priority=1), arrive(batcher, 3)
    assert give_slots(batcher) == [urgent, usual]
    assert batcher.cancelled(slow)


def test_few_begin_between_two_steps() -> None:
    batcher, (a, b, c) = batcher_of(3, slots=8, inserts_per_step=1)
    assert give_slots(batcher) == [a]
    assert batcher.due_ns() == 2
    step = batcher.step()
    assert step is not None
    assert give_slots(batcher) == [b]
    # Nothing was stepped in between.
    assert give_slots(batcher) == []
    batcher.step()
    assert give_slots(batcher) == [c]


def test_one_call_is_for_requests_of_one_key() -> None:
    batcher, _ = batcher_of(slots=8, inserts_per_step=8, insert_rows=2)
    a, b, c, d = (arrive(batcher, at, key) for at, key in enumerate("abaa", 1))
    assert [batcher.take(0) for _ in range(4)] == [[a, c], [b], [d], []]


def test_nobody_is_stepped_who_is_not_there() -> None:
    batcher, _ = batcher_of()
    assert batcher.step() is None
    assert not batcher.lives


def test_two_steps_are_on_their_way() -> None:
    batcher, (a,) = batcher_of(1)
    give_slots(batcher)
    steps = [batcher.step() for _ in range(AHEAD)]
    assert [[each.request for each in step.holders] for step in steps if step] == [[a], [a]]
    assert batcher.step() is None
    assert steps[0] is not None
    assert batcher.stepped(steps[0], [EMITS, 0])[0] == [SlotAnswer(a, 0, True, False)]
    assert batcher.step() is not None


def test_a_slot_is_free_when_its_request_has_finished() -> None:
    batcher, (a, b) = batcher_of(2, slots=1)
    give_slots(batcher)
    first, second = batcher.step(), batcher.step()
    assert first is not None
    assert second is not None
    assert batcher.stepped(first, [EMITS | FINISHED])[0] == [SlotAnswer(a, 0, True, True)]
    assert give_slots(batcher) == [b]
    # The step that was on its way already is nobody's: neither what it says of the first request counts, nor is it the second's.
    assert batcher.stepped(second, [EMITS | FINISHED])[0] == []
    assert batcher.with_slots() == [b]
    third = batcher.step()
    assert third is not None
    assert not third.masked
    assert batcher.stepped(third, [FINISHED])[0] == [SlotAnswer(b, 0, False, True)]
    assert not batcher.lives


def test_an_insertion_may_end_a_request() -> None:
    batcher, (a, b) = batcher_of(2)
    give_slots(batcher)
    assert batcher.inserted([a, b], [EMITS | FINISHED, 0]) == [SlotAnswer(a, 0, True, True)]
    assert batcher.with_slots() == [b]


def test_who_is_cancelled_is_not_stepped_again() -> None:
    batcher, (a, b, c) = batcher_of(3)
    give_slots(batcher)
    step = batcher.step()
    assert step is not None
    assert batcher.cancelled(a) == []
    ((answered, error),) = batcher.cancelled(c)
    assert answered is c
    assert isinstance(error, Cancelled)
    c = arrive(batcher, 4)
    following = batcher.step()
    assert following is not None
    assert [each.request for each in following.holders] == [b]
    assert following.masked == {0}
    assert batcher.stepped(step, [EMITS, EMITS])[0] == [SlotAnswer(b, 1, True, False)]
    # Its slot is the next one's, who is stepped.
    assert give_slots(batcher) == [c]
    assert batcher.stepped(following, [EMITS, EMITS])[0] == [SlotAnswer(b, 1, True, False)]
    last = batcher.step()
    assert last is not None
    assert not last.masked


def test_the_last_step_ends_a_request() -> None:
    batcher, (a,) = batcher_of(1, max_steps=2)
    give_slots(batcher)
    first, second = batcher.step(), batcher.step()
    assert first is not None
    assert second is not None
    assert (first.last, second.last) == (frozenset(), {0})
    assert batcher.stepped(first, [EMITS, 0])[0] == [SlotAnswer(a, 0, True, False)]
    assert batcher.step() is None
    assert batcher.stepped(second, [EMITS, 0])[0] == [SlotAnswer(a, 0, True, True)]
    assert not batcher.lives


def test_who_is_paused_keeps_the_slot() -> None:
    batcher, (a, b) = batcher_of(2)
    give_slots(batcher)
    batcher.pause(a)
    step = batcher.step()
    assert step is not None
    assert ([each.request for each in step.holders], step.masked) == ([b], {0})
    batcher.resume(a)
    batcher.resume(a)
    following = batcher.step()
    assert following is not None
    assert ({each.request for each in following.holders}, following.masked) == ({a, b}, frozenset())
    check_invariants(batcher)


def test_all_that_have_a_slot_fail_together() -> None:
    batcher, (a, b, c) = batcher_of(3)
    give_slots(batcher)
    step = batcher.step()
    batcher.cancelled(b)
    assert batcher.failed() == [a]
    assert (len(batcher), batcher.lives) == (1, False)
    assert step is not None
    # The device begins anew.
    assert give_slots(batcher) == [c]
    fresh = batcher.step()
    assert fresh is not None
    assert not fresh.masked


def test_what_could_not_be_inserted_waits_in_front() -> None:
    batcher, (a, b, c) = batcher_of(3)
    give_slots(batcher)
    assert batcher.restore([a, b], 0) == []
    batcher.step()
    assert give_slots(batcher) == [a, b]
    assert batcher.dropped(a, 0) == []
    batcher.step()
    assert give_slots(batcher) == [c]


def test_who_waits_too_long_is_told() -> None:
    batcher, (a, _, c) = batcher_of(3)
    give_slots(batcher)
    late = Waiting("a", 1, 4)
    late.deadline_ns = 10
    batcher.arrived(late)
    assert batcher.next_tick_ns == 10
    assert batcher.tick(9) == []
    ((answered, error),) = batcher.tick(10)
    assert answered is late
    assert isinstance(error, DeadlineExceeded)
    assert [request for request, _ in batcher.cancelled(c)] == [c]
    assert a in batcher.with_slots()


@pytest.mark.parametrize("seed", range(0, 4000, 500))
def test_by_chance(seed: int) -> None:
    for each in range(seed, seed + examples(500)):
        try:
            Simulation(each).run()
        except AssertionError as error:
            raise AssertionError(f"seed {each}") from error
