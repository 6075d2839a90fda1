"""Looking instead of sleeping: only while it pays."""

from __future__ import annotations

import itertools
import time

from tensord.shm.spin import Spin


def test_it_starts_asleep_and_learns_from_each_wait() -> None:
    spin = Spin(300)
    assert spin.begin(1000) == 0
    spin.end(1200)
    assert spin.begin(2000) == 2300
    spin.end(2299)
    assert spin.begin(3000) == 3300
    spin.end(3300)
    assert spin.begin(4000) == 0


def test_after_much_work_it_sleeps() -> None:
    spin = Spin(300)
    spin.begin(1000)
    spin.end(1100)
    assert spin.begin(2000, worked_ns=150) == 2300
    assert spin.begin(2000, worked_ns=151) == 0
    # That says nothing of the waits, which are as short as ever.
    assert spin.begin(3000, worked_ns=10) == 3300


def test_polls_in_vain_become_rare() -> None:
    """After each poll in vain more waits sleep than before, at most 64; one poll that pays ends that."""
    spin, now, polls = Spin(300), 1000, list[int]()

    def wait(number: int, polled: int) -> None:
        nonlocal now
        until = spin.begin(now)
        polls.extend([number] if until else [])
        now += polled if until else 100
        spin.end(now)

    for number in range(300):
        wait(number, polled=300)
    assert [after - before for before, after in itertools.pairwise(polls)] == [3, 5, 9, 17, 33, 65, 65, 65]
    while polls[-1] < number:
        number += 1
        wait(number, polled=30)
    for later in range(number + 1, number + 5):
        wait(later, polled=30)
    assert polls[-5:] == [*range(number, number + 5)]


def test_it_can_be_turned_off() -> None:
    spin = Spin(0)
    spin.begin(1000)
    spin.end(1000)
    assert spin.begin(1000) == 0


def test_giving_way_says_what_time_it_is_then() -> None:
    now = time.monotonic_ns()
    assert Spin.give_way() >= now
