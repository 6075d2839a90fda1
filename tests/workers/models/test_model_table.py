"""Tests which version a request finds, and when one that is replaced or unloaded is really gone."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tensord.config.model_config import empty
from tensord.shm.errors import NotFound
from tensord.workers.imports.model_imports import ModelImports
from tensord.workers.models.loaded_model import LoadedModel
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import ModelVersion, VersionState
from tensord.workers.scheduling.dynamic_batcher import BatchRules
from tensord.workers.scheduling.queue import QueueRules
from tensord.workers.tensors.signature import signature
from tests.workers.made_requests import request_of


class AnInstance:
    """An execution thread that ends when the test says so."""

    def __init__(self) -> None:
        self.busy = False
        self.needs: dict[str, int] = {}
        self.closed: Any = None
        self.closing = False

    def close(self, closed: Any) -> None:
        self.closed = closed


def version_of(name: str = "m", number: int = 1, instances: int = 0) -> ModelVersion:
    made = tuple(AnInstance() for _ in range(instances))
    loaded = LoadedModel(
        name,
        number,
        signature(empty(name), {}, {}),
        b"",
        b"",
        True,
        False,
        False,
        None,
        cast(Any, made),
        QueueRules(9),
        BatchRules(),
        ModelImports("tensord_model_0_x", []),
    )
    return ModelVersion(loaded)


def test_the_newest_answers_where_none_is_asked_for() -> None:
    table = ModelTable()
    one, three, other = version_of(), version_of(number=3), version_of("other")
    for version in (three, one, other):
        table.add(version)
    assert table.find("m", 0) is three
    assert table.find("m", 1) is one
    assert sorted(version.version for version in table) == [1, 1, 3]
    table.remove("m", 3, lambda: None)
    assert table.find("m", 0) is one
    with pytest.raises(NotFound, match="'m' version 3 is not found"):
        table.find("m", 3)
    table.remove("m", 1, lambda: None)
    with pytest.raises(NotFound, match="unknown model: 'm' is not found"):
        table.find("m", 0)
    assert table.find("other", 0) is other


def test_who_waits_for_a_held_version_hears_that_it_was_unloaded() -> None:
    """1. A version is loaded and not served yet. 2. Somebody waits for it. 3. It is unloaded."""
    table, coming = ModelTable(), list[bool]()
    table.hold(version_of())
    table.on_change = lambda: coming.append(table.is_coming("m", 0))
    assert table.is_coming("m", 1)
    table.remove("m", 1, lambda: None)
    assert coming == [False]


def test_a_version_is_gone_when_its_last_request_and_its_instances_are() -> None:
    table = ModelTable()
    version = version_of(instances=2)
    table.add(version)
    version.queue.push(request_of({}))
    version.executing = 1
    done: list[str] = []
    version.when_closed(lambda: done.append("closed"))
    table.remove("m", 1, lambda: done.append("removed"))
    table.settle()
    assert version.state is VersionState.DRAINING
    version.queue.take(None, 1)
    table.settle()
    assert version.busy
    version.executing = 0
    table.settle()
    assert version.state is VersionState.CLOSED
    assert done == []
    for instance in cast("tuple[AnInstance, ...]", version.loaded.instances):
        assert len(table.draining) == 1
        instance.closed()
        table.settle()
    assert done == ["closed", "removed"]
    assert table.draining == []


def test_a_reloaded_version_replaces_the_old_one_in_one_step() -> None:
    table = ModelTable()
    old, new = version_of(), version_of()
    table.add(old)
    table.add(new)
    assert table.find("m", 0) is new
    assert old.state is VersionState.DRAINING
    table.settle()
    assert old.state is VersionState.CLOSED


def test_figures_go_on_over_a_reload_and_begin_anew_after_an_unload() -> None:
    table = ModelTable()
    old, new, later = version_of(), version_of(), version_of()
    table.add(old)
    old.statistics.copied_byte_size += 5
    old.queue.push(request_of({}))
    assert (old.figures(0).pending, old.figures(0).counts.copied_byte_size) == (1, 5)
    table.add(new)
    old.statistics.copied_byte_size += 2
    old.queue.take(None, 1)
    table.settle()
    new.statistics.copied_byte_size += 1
    assert (new.figures(0).pending, new.figures(0).counts.copied_byte_size) == (0, 8)
    assert new.figures(0).began_ns == old.figures(0).began_ns
    table.remove("m", 1, lambda: None)
    table.add(later)
    assert later.figures(0).counts.copied_byte_size == 0
    assert later.figures(0).began_ns > new.figures(0).began_ns


def test_what_was_never_there_is_gone_at_once() -> None:
    table = ModelTable()
    done: list[int] = []
    table.remove("nobody", 1, lambda: done.append(1))
    assert done == [1]
    table.discard(version_of())
    table.settle()
    assert table.draining == []


def test_repr_shows_state() -> None:
    assert "SERVING" in repr(version_of())
