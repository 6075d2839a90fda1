"""Loads that wait for others: none may wait for itself, by however many."""

from __future__ import annotations

import contextlib

import pytest

from tensord.daemon.models.ensembles import LoadWaits
from tensord.shm.errors import InvalidArgument


def test_who_waits_for_itself_is_told_the_way() -> None:
    waits = LoadWaits()
    with waits.waiting("a", "b"), waits.waiting("b", "c"), waits.waiting("b", "d"):
        for model, way in (("c", "c -> a -> b -> c"), ("d", "d -> a -> b -> d")):
            with (
                pytest.raises(InvalidArgument, match=f"model '{model}' waits for itself: {way}"),
                waits.waiting(model, "a"),
            ):
                pass
        with waits.waiting("c", "e"), waits.waiting("a", "b"):
            pass
    with waits.waiting("c", "a"), pytest.raises(InvalidArgument, match="a -> a"), waits.waiting("a", "a"):
        pass


def test_it_is_known_who_waits_also_by_way_of_others() -> None:
    waits = LoadWaits()
    with waits.waiting("a", "b"), waits.waiting("b", "c"), waits.waiting("d", "e"):
        assert (waits.waiters("c"), waits.waiters("e"), waits.waiters("a")) == ({"a", "b"}, {"d"}, set())


def test_who_has_waited_waits_no_longer_however_it_ended() -> None:
    waits = LoadWaits()
    # On two workers.
    with waits.waiting("a", "b"):
        with contextlib.suppress(ValueError), waits.waiting("a", "b"):
            raise ValueError
        with pytest.raises(InvalidArgument), waits.waiting("b", "a"):
            pass
    with waits.waiting("b", "a"), waits.waiting("", "b"):
        pass
    assert repr(waits) == "<LoadWaits []>"
