"""Connections made by hand: who makes room for a new one, in which order, and who never does."""

from __future__ import annotations

import logging

import pytest

from tensord.daemon.front.longest_idle import LongestIdle


class Guest:
    def __init__(self, used_at: float, idle: bool = True) -> None:
        self.used_at = used_at
        self.asks_nothing = idle
        self.looks = 0

    def make_room(self) -> None:
        self.asks_nothing = False


class House:
    def __init__(self, *guests: Guest) -> None:
        self.guests = set(guests)
        self.longest_idle = LongestIdle(self.guests, 10)

    def leaves(self, now: float = 0.0) -> Guest | None:
        """Asks for room at a time; returns the connection that was closed, or None."""
        before = {guest for guest in self.guests if guest.asks_nothing}
        found = self.longest_idle.make_room(now)
        gone = [guest for guest in before if not guest.asks_nothing]
        assert len(gone) == found
        self.guests.difference_update(gone)
        return gone[0] if gone else None


def test_the_longest_idle_first() -> None:
    guests = [Guest(float(number % 50), number % 3 > 0) for number in range(100)]
    house = House(*guests)
    order = []
    while (gone := house.leaves()) is not None:
        order.append(gone.used_at)
    assert order == sorted(guest.used_at for guest in guests if guests.index(guest) % 3)
    assert all(not guest.asks_nothing for guest in house.guests)


def test_who_was_found_and_is_of_use_again_stays() -> None:
    first, second, third = (Guest(at) for at in (1.0, 2.0, 3.0))
    house = House(first, second, third)
    assert house.leaves() is first
    second.used_at = 4.0
    assert house.leaves() is third
    assert house.leaves() is second


def test_a_crowd_of_refused_ones_costs_one_search() -> None:
    class Counted(Guest):
        @property
        def asks_nothing(self) -> bool:
            self.looks += 1
            return False

        @asks_nothing.setter
        def asks_nothing(self, idle: bool) -> None:
            pass

    guest = Counted(1.0)
    longest_idle = LongestIdle({guest}, 1)
    guest.looks = 0
    for _ in range(100):
        assert not longest_idle.make_room(5.0)
    assert guest.looks == 1
    assert not longest_idle.make_room(6.0)
    assert guest.looks == 2


def test_the_operator_is_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    house = House(*(Guest(float(number)) for number in range(4)))
    with caplog.at_level(logging.WARNING):
        for now in (100.0, 101.0, 159.0, 161.0):
            assert house.leaves(now) is not None
    assert [record.message for record in caplog.records] == [
        "10 connections are allowed (max_connections): those idle longest make room"
    ] * 2
