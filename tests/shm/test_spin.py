"""Looking instead of sleeping: only while it pays."""

from __future__ import annotations

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


def test_it_can_be_turned_off() -> None:
    spin = Spin(0)
    spin.begin(1000)
    spin.end(1000)
    assert spin.begin(1000) == 0


def test_giving_way_says_what_time_it_is_then() -> None:
    now = time.monotonic_ns()
    assert Spin.give_way() >= now
