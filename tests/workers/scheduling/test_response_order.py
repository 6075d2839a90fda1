"""Answers in the order in which requests were taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensord.workers.scheduling.response_order import ResponseOrder


def test_an_answer_waits_for_those_before_it() -> None:
    order: ResponseOrder[str, int] = ResponseOrder()
    for name in "abc":
        order.taken(name)
    assert order.done("c", 3) == []
    assert order.done("a", 1) == [("a", 1)]
    assert order.done("b", 2) == [("b", 2), ("c", 3)]
    order.check_invariants()
    assert len(order) == 0


@given(st.permutations(range(12)), st.integers(1, 5))
def test_all_leave_once_and_in_order(finished: list[int], at_a_time: int) -> None:
    order: ResponseOrder[int, int] = ResponseOrder()
    left: list[int] = []
    for number in range(12):
        order.taken(number)
    for number in finished:
        left += [answer for _, answer in order.done(number, number)]
        order.check_invariants()
    assert left == list(range(12))
