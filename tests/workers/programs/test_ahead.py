"""Several at a time, taken in order, none lost."""

from __future__ import annotations

import itertools
import threading

import pytest

from workers.programs.ahead import ahead


@pytest.mark.parametrize("threads", [1, 2, 3, 20])
def test_in_their_order(threads: int) -> None:
    under_way = itertools.count()
    most = []
    ended = []

    def make(number: int) -> int:
        most.append(next(under_way) - len(ended))
        ended.append(number)
        return number * number

    assert list(ahead(make, range(10), threads)) == [number * number for number in range(10)]
    assert max(most) <= threads


def test_several_at_once() -> None:
    """Each waits for the other."""
    meeting = threading.Barrier(2, timeout=60)
    assert sorted(ahead(lambda _: meeting.wait(), range(4), 2)) == [0, 0, 1, 1]


def test_one_alone_is_made_when_it_is_asked_for_in_the_thread_that_asks() -> None:
    made: list[int] = []
    found = ahead(lambda number: (made.append(number), threading.get_ident())[1], range(3), 1)
    assert next(found) == threading.get_ident()
    assert made == [0]


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_failure_is_raised_and_nothing_further_begun(threads: int) -> None:
    begun = []

    def make(number: int) -> int:
        begun.append(number)
        if number == 2:
            raise ValueError("two")
        return number

    found = ahead(make, range(100), threads)
    with pytest.raises(ValueError, match="two"):
        list(found)
    assert len(begun) <= 2 + threads
