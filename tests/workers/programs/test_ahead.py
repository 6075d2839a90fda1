"""Several at a time, taken in order, none lost."""

from __future__ import annotations

import threading

import pytest

from tensord.workers.programs.ahead import ahead


@pytest.mark.parametrize("threads", [1, 2, 3, 20])
@pytest.mark.parametrize("count", [0, 1, 10])
def test_in_their_order(threads: int, count: int) -> None:
    found = list(ahead(lambda number: (number * number, True), range(count), threads))
    assert found == [(number * number, True) for number in range(count)]


def test_several_at_once() -> None:
    """Behind the first, each waits for another."""
    meeting = threading.Barrier(2, timeout=60)

    def make(number: int) -> tuple[int, bool]:
        if number:
            meeting.wait()
        return number, True

    assert [number for number, _ in ahead(make, range(5), 2)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("threads", "new"), [(1, True), (3, False)])
def test_alone_each_is_made_when_it_is_asked_for_in_the_thread_that_asks(threads: int, new: bool) -> None:
    made: list[int] = []

    def make(number: int) -> tuple[int, bool]:
        made.append(number)
        return threading.get_ident(), new

    found = ahead(make, range(3), threads)
    for number in range(3):
        assert next(found) == (threading.get_ident(), new)
        assert made == list(range(number + 1))


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_failure_is_raised_and_little_begun_after_it(threads: int) -> None:
    begun = []

    def make(number: int) -> tuple[int, bool]:
        begun.append(number)
        if number == 2:
            raise ValueError("two")
        return number, True

    with pytest.raises(ValueError, match="two"):
        list(ahead(make, range(100), threads))
    assert len(begun) <= 3 + threads
