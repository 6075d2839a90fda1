"""Tests what fronts are told of a version."""

from __future__ import annotations

import pytest

from tensord.daemon.models.versions import IndexState, VersionEntry
from tensord.shm.control_records import Load, Loaded, ModelState

LOAD = Load("m", 3, "/m", "/m/3", b"")
DESCRIBED = Loaded("m", 3, metadata=b"{}", config=b"[]", repeatable=False, streams=True)


@pytest.mark.parametrize(
    ("version", "told"),
    [
        (VersionEntry(LOAD), ModelState("m", 3, "UNKNOWN")),
        (
            VersionEntry(LOAD, IndexState.READY, ready={7: DESCRIBED, 2: DESCRIBED}, described=DESCRIBED),
            ModelState("m", 3, "READY", "", (2, 7), metadata=b"{}", config=b"[]", repeatable=False, streams=True),
        ),
        # Its last worker has died: it is still described, and waits for the next.
        (
            VersionEntry(LOAD, IndexState.READY, described=DESCRIBED),
            ModelState("m", 3, "READY", metadata=b"{}", config=b"[]", repeatable=False, streams=True),
        ),
        (
            VersionEntry(LOAD, IndexState.UNAVAILABLE, "it is broken", described=DESCRIBED),
            ModelState("m", 3, "UNAVAILABLE", "it is broken"),
        ),
    ],
)
def test_told(version: VersionEntry, told: ModelState) -> None:
    assert version.state_record() == told
