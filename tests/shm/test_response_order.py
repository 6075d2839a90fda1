"""Answers in the order in which requests were taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensord.shm.response_order import ResponseOrder
from tests.invariants import check_invariants


def test_an_answer_waits_for_those_before_it() -> None:
    order: ResponseOrder[str, int] = ResponseOrder()
    for name in "abc":
        order.taken(name)
    assert order.done("c", 3) == []
    assert order.done("a", 1) == [("a", 1)]
    assert order.done("b", 2) == [("b", 2), ("c", 3)]
    check_invariants(order)
    assert len(order) == 0


@given(st.permutations(range(12)), st.integers(1, 5))
def test_all_leave_once_and_in_order(finished: list[int], at_a_time: int) -> None:
    order: ResponseOrder[int, int] = ResponseOrder()
    left: list[int] = []
    for number in range(12):
        order.taken(number)
    for number in finished:
        left += [answer for _, answer in order.done(number, number)]
        check_invariants(order)
    assert left == list(range(12))


@given(st.data())
def test_whoever_has_a_turn_leaves_in_it_as_soon_as_it_may(data: st.DataObject) -> None:
    """Against the plain rule, with requests that come in between, some that lose their turn, and the end of all at any moment."""
    order: ResponseOrder[int, str] = ResponseOrder()
    made = 0
    open_requests: list[int] = []
    stored: set[int] = set()
    for _ in range(data.draw(st.integers(0, 40))):
        step = data.draw(st.sampled_from(["taken", "taken", "done", "done", "withdrawn"]))
        if step == "taken" or not open_requests[len(stored) :]:
            order.taken(made)
            open_requests.append(made)
            made += 1
            continue
        request = data.draw(st.sampled_from([each for each in open_requests if each not in stored]))
        assert order.holds_up(request) == bool(stored and open_requests[0] is request)
        if step == "withdrawn":
            open_requests.remove(request)
            left = [number for number, _ in order.withdrawn(request)]
        elif order.passes(request):
            assert open_requests[0] == request
            assert not stored
            left = [request]
        else:
            stored.add(request)
            left = [number for number, _ in order.done(request, f"answer {request}")]
        first_open = next(
            (at for at, each in enumerate(open_requests) if each not in {*stored, *left}), len(open_requests)
        )
        assert left == open_requests[:first_open]
        del open_requests[:first_open]
        stored -= set(left)
        check_invariants(order)
        assert len(order) == len(open_requests)
    assert sorted(order.drop()) == sorted(f"answer {request}" for request in stored)
    assert len(order) == 0
