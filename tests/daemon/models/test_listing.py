"""The repository index, as it follows from where versions stand."""

from __future__ import annotations

from tensord.daemon.models.lifecycle import Lifecycle
from tensord.daemon.models.listing import entries
from tensord.shm.control_records import Loaded
from tests.daemon.models.test_lifecycle import found, ready


def test_index() -> None:
    lifecycle = Lifecycle()
    lifecycle.known = {"b", "a"}
    ready(lifecycle, 1)
    lifecycle.load(found("b", 10, 9), 1)
    lifecycle.loaded(1, Loaded("b", 9))
    assert entries(lifecycle) == [
        {"name": "a"},
        {"name": "b", "version": "9", "state": "READY"},
        {"name": "b", "version": "10", "state": "LOADING"},
    ]
    assert entries(lifecycle, ready=True) == [{"name": "b", "version": "9", "state": "READY"}]
