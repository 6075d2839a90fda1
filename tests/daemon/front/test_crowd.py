"""How many connections are taken in one turn."""

from __future__ import annotations

from tensord.daemon.front.crowd import Crowd


def _took(crowd: Crowd, waiting: int) -> int:
    """A turn in which so many wait; how many are taken."""
    room = crowd.room
    taken = min(room, waiting)
    crowd.took(taken, room)
    return taken


def test_who_comes_alone_is_seldom_followed_by_an_accept_in_vain() -> None:
    crowd = Crowd()
    vain = 0
    for _ in range(170):
        room = crowd.room
        vain += room - _took(crowd, 1)
    assert vain <= 14


def test_of_a_crowd_twice_as_many_are_taken_each_turn() -> None:
    crowd = Crowd()
    assert [_took(crowd, 1000) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 64, 64]
    # What is left of it, and one that comes later.
    assert _took(crowd, 5) == 5
    assert [_took(crowd, 1) for _ in range(3)] == [1, 1, 1]


def test_a_crowd_is_seen_after_many_that_came_alone() -> None:
    crowd = Crowd()
    for _ in range(200):
        _took(crowd, 1)
    assert sum(_took(crowd, 1000) for _ in range(24)) >= 64


def test_others_may_take_what_one_was_woken_for() -> None:
    crowd = Crowd()
    for _ in range(10):
        assert _took(crowd, 0) == 0
        assert crowd.room <= 2
