"""Loads that wait for others: none may wait for itself, by however many."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tensord.daemon.models.ensembles import Coming, LoadWaits
from tensord.daemon.models.repository import FoundModel
from tensord.daemon.models.versions import IndexState, ModelEntry, VersionEntry
from tensord.shm.control_records import ModelGone, ModelState
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


def test_a_load_that_fails_takes_nothing_from_another_one_of_the_same_ensemble() -> None:
    """The ensemble is LOADING until the last of them has ended, and then what it has become."""
    models: dict[str, ModelEntry] = {}
    published: list[ModelState | ModelGone] = []
    coming = Coming(models, published.append)
    found = FoundModel("e", Path("e"), chosen=(1,), members=(("m", -1),))

    def fails() -> None:
        with contextlib.suppress(InvalidArgument), coming.published(found):
            raise InvalidArgument("a model of it is missing")

    loading = ModelState("e", 1, "LOADING")
    with contextlib.suppress(InvalidArgument), coming.published(found):
        fails()
        assert published == [loading, loading]
        assert coming.states() == [loading]
        raise InvalidArgument("a model of it is missing")
    assert published == [loading, loading, ModelGone("e", 1)]
    published.clear()
    with contextlib.suppress(InvalidArgument), coming.published(found):
        with coming.published(found):
            models["e"] = ModelEntry({1: VersionEntry(found.load(1), IndexState.LOADING)})
        # A new front is told what the models say of it.
        assert (coming.names, coming.states()) == ({"e"}, [])
        raise InvalidArgument("a model of it is missing")
    assert published == [loading, loading, loading]
    assert coming.states() == []
