"""Tests which instances run when they share resources."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.workers.models.rate_limiter import MAX_PASSED, RateLimiter


@dataclass(eq=False)
class Instance:
    needs: dict[str, int]
    priority: int = 0
    busy = False


def limiter(instances: list[Any], **limits: int) -> RateLimiter:
    made = RateLimiter(limits)
    made.add(instances)
    return made


def moves(made: RateLimiter) -> bool:
    """Whether one that waited may run since this was last asked."""
    moved, made.moved = made.moved, False
    return moved


def test_of_what_nobody_has_configured_there_is_as_much_as_one_needs() -> None:
    a, b, c = instances = [Instance({"R": 2}), Instance({"R": 1}), Instance({"R": 1})]  # type: Any
    made = limiter(instances)
    assert made.may_run(b)
    assert made.may_run(c)
    assert not made.may_run(a)


def test_who_waits_runs_when_there_is_enough() -> None:
    a, b, c = instances = [Instance({"R": count}) for count in (2, 2, 1)]  # type: Any
    made = limiter(instances, R=3)
    assert made.may_run(a)
    assert not made.may_run(b)
    assert made.may_run(c)
    made.done(c)
    assert not moves(made)
    made.done(a)
    assert moves(made)
    assert made.may_run(b)


def test_who_has_nothing_to_run_any_more_is_passed_over() -> None:
    a, b, c = instances = [Instance({"R": 1}) for _ in range(3)]  # type: Any
    made = limiter(instances, R=1)
    assert [made.may_run(each) for each in instances] == [True, False, False]
    made.done(b)
    assert not moves(made)
    made.remove([a])
    assert moves(made)
    assert made.may_run(c)


def test_one_with_priority_two_has_half_the_turns() -> None:
    often, seldom = instances = [Instance({"R": 1}, 1), Instance({"R": 1}, 2)]  # type: Any
    made = limiter(instances, R=1)
    assert made.may_run(often)
    assert not made.may_run(seldom)
    turns: Counter[Any] = Counter()
    running = often
    for _ in range(300):
        turns[running] += 1
        made.done(running, again=True)
        (running,) = [each for each in instances if made.may_run(each)]
    assert turns[often] == pytest.approx(2 * turns[seldom], abs=3)


def test_one_that_needs_much_is_not_passed_for_ever() -> None:
    whole, a, b = instances = [Instance({"R": 2}), Instance({"R": 1}), Instance({"R": 1})]  # type: Any
    made = limiter(instances, R=2)
    assert made.may_run(a)
    assert not made.may_run(whole)
    running, passed = [a], 0
    while not made.may_run(whole):
        for one in (a, b):
            if one not in running and made.may_run(one):
                running.append(one)
                passed += 1
        made.done(running.pop(0))
    assert 0 < passed <= 4 * MAX_PASSED


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60))
def test_no_more_is_used_than_there_is_and_nobody_is_forgotten(events: list[tuple[int, bool]]) -> None:
    instances: Any = [Instance(needs) for needs in ({"R": 1}, {"R": 2, "S": 1}, {"R": 3})]
    made = limiter(instances, R=3, S=1)
    asked: list[Any] = []
    for number, asks in events:
        one = instances[number]
        if asks and one not in asked:
            asked.append(one)
        elif not asks and one in asked and made.may_run(one):
            asked.remove(one)
            made.done(one)
        used = Counter[str]()
        for each in asked:
            if made.may_run(each):
                used.update(each.needs)
        assert used["R"] <= 3
        assert used["S"] <= 1
    while asked:
        running = [each for each in asked if made.may_run(each)]
        assert running
        for each in running:
            asked.remove(each)
            made.done(each)
