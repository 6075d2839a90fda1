"""Tests what an iteration has to ask, against a list of moments."""

from __future__ import annotations

import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.workers.scheduling.agenda import NEVER, Agenda
from tests.invariants import check_invariants

PARTS = st.sampled_from("abcdef")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), PARTS, st.integers(1, 50) | st.just(NEVER)),
        st.tuples(st.just("wake"), PARTS, st.just(0)),
        st.tuples(st.just("take"), st.just(""), st.integers(1, 50)),
    ),
    max_size=300,
)


@given(STEPS)
def test_a_part_is_asked_when_it_is_due_or_has_work_and_then_no_more(steps: list[tuple[str, str, int]]) -> None:
    agenda: Agenda[str] = Agenda()
    due: dict[str, int] = {}
    woken: list[str] = []
    for what, part, moment in steps:
        if what == "put":
            agenda.put(part, moment)
            due[part] = moment
        elif what == "wake":
            agenda.wake(part)
            woken += [part] if part not in woken else []
        else:
            late = sorted({at for at in due.values() if at <= moment and at != NEVER})
            expected = woken + [each for at in late for each in due if due[each] == at and each not in woken]
            taken = agenda.take(moment)
            assert taken[: len(woken)] == woken
            assert sorted(taken) == sorted(expected)
            times = [due[each] for each in taken[len(woken) :]]
            assert times == sorted(times)
            for each in taken:
                due.pop(each, None)
            woken = []
        check_invariants(agenda)
        assert list(agenda.woken) == woken
        assert agenda.due_ns == min(due.values(), default=NEVER)


def test_a_time_that_is_put_off_again_and_again_takes_no_room() -> None:
    agenda: Agenda[str] = Agenda()
    agenda.put("first", 1)
    for moment in range(2, 10_000):
        agenda.put("a", moment)
    assert len(agenda._heap) < 200
    assert agenda.take(20_000) == ["first", "a"]


class Part:
    """A part that can be collected."""


@pytest.mark.parametrize("woken", [False, True])
def test_a_part_that_is_not_due_any_more_is_kept_by_nobody(woken: bool) -> None:
    """Also while another part is due before the time at which it would have been."""
    agenda: Agenda[object] = Agenda()
    agenda.put("first", 1)
    agenda.put(part := Part(), 2)
    left = weakref.ref(part)
    if woken:
        agenda.wake(part)
        assert agenda.take(0) == [part]
    else:
        agenda.put(part, NEVER)
    del part
    assert left() is None
    assert agenda.take(2) == ["first"]
