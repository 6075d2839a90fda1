"""Tests who runs when instances share resources."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.shm.errors import InvalidArgument
from tensord.workers.scheduling.resources import MAX_PASSED, Resources


def resources(**limits: int) -> Resources[str]:
    return Resources(limits)


def test_one_that_needs_nothing_never_waits() -> None:
    pool = resources()
    pool.add("a", {})
    assert pool.ask("a")


def test_more_than_there_is_is_refused() -> None:
    pool = resources(R=3)
    with pytest.raises(
        InvalidArgument, match=r'Resource count for "R" is limited to 3 .* the minimum required count is 4'
    ):
        pool.add("a", {"R": 4})


def test_who_waits_runs_when_there_is_enough() -> None:
    pool = resources(R=3)
    for name, count in (("a", 2), ("b", 2), ("c", 1)):
        pool.add(name, {"R": count})
    assert pool.ask("a")
    assert not pool.ask("b")
    assert pool.ask("c")
    assert pool.give_back("c") == []
    assert pool.give_back("a") == ["b"]
    pool.check_invariants()


def test_who_has_nothing_to_run_any_more_is_passed_over() -> None:
    pool = resources(R=1)
    for name in "abc":
        pool.add(name, {"R": 1})
    assert pool.ask("a")
    assert not pool.ask("b")
    assert not pool.ask("c")
    assert pool.withdraw("b") == []
    assert pool.remove("a") == ["c"]


def test_one_with_priority_two_has_half_the_turns() -> None:
    pool = resources(R=1)
    pool.add("often", {"R": 1}, priority=1)
    pool.add("seldom", {"R": 1}, priority=2)
    turns: Counter[str] = Counter()
    running = "often" if pool.ask("often") else ""
    pool.ask("seldom")
    for _ in range(300):
        turns[running] += 1
        pool.ask(running)
        (running,) = pool.give_back(running)
    assert turns["often"] == pytest.approx(2 * turns["seldom"], abs=3)


def test_one_that_needs_much_is_not_passed_for_ever() -> None:
    pool = resources(R=2)
    pool.add("whole", {"R": 2})
    for name in "ab":
        pool.add(name, {"R": 1})
    assert pool.ask("a")
    assert not pool.ask("whole")
    running, passed = {"a"}, 0
    while "whole" not in running:
        for name in "ab":
            if name not in running and pool.ask(name):
                running.add(name)
                passed += 1
        ended = min(running)
        running.discard(ended)
        running |= set(pool.give_back(ended))
        pool.check_invariants()
    assert 0 < passed <= 4 * MAX_PASSED


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=60))
def test_no_more_is_used_than_there_is_and_nobody_is_forgotten(events: list[tuple[str, bool]]) -> None:
    pool = resources(R=3, S=1)
    for name, needs in zip("abcd", ({"R": 1}, {"R": 2, "S": 1}, {"R": 3}, {}), strict=True):
        pool.add(name, needs)
    waiting: set[str] = set()
    running: set[str] = set()
    for name, asks in events:
        if asks and name not in waiting | running:
            (running if pool.ask(name) else waiting).add(name)
        elif not asks and name in running:
            running.discard(name)
            granted = set(pool.give_back(name))
            assert granted <= waiting
            waiting -= granted
            running |= granted
        pool.check_invariants()
    while running:
        name = running.pop()
        granted = set(pool.give_back(name))
        waiting -= granted
        running |= granted
    assert not waiting
