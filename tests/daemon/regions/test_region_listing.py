"""Tests what is told of regions: which are listed, and which of two of one name."""

from __future__ import annotations

import json
from typing import cast

import pytest

from tensord.daemon.processes.child import WorkerProcess
from tensord.daemon.regions import region_listing
from tensord.daemon.regions.region_record import RegionState, RegisteredRegion
from tensord.shm.errors import NotFound, Unavailable
from tensord.shm.operations import Operation, Peer, RegionStatus, RegisterCudaRegion, RegisterSystemRegion


def region(name: str, state: RegionState, byte_size: int = 64) -> RegisteredRegion:
    return RegisteredRegion(
        "system", RegisterSystemRegion(name, "/k", 0, byte_size), Peer("tcp", "h:1"), 0.0, state=state
    )


def listed(regions: list[RegisteredRegion], leaving: list[RegisteredRegion], name: str = "") -> list[tuple[str, int]]:
    named = {each.request.name: each for each in regions}
    found = json.loads(region_listing.status(named, leaving, RegionStatus("system", name)))
    return [(entry["name"], entry["byte_size"]) for entry in found]


def test_all_are_listed_but_those_that_are_not_there_yet() -> None:
    regions = [region(state.value, state) for state in RegionState]
    gone = region("gone", RegionState.UNREGISTERING)
    expected = ["gone", "registered", "renewing", "unregistering"]
    assert listed(regions, [gone]) == [(name, 64) for name in expected]
    assert listed(regions, [gone], "gone") == [("gone", 64)]
    with pytest.raises(NotFound):
        listed(regions, [gone], "registering")


def test_the_new_one_of_a_name_is_listed() -> None:
    old, new = region("r", RegionState.UNREGISTERING), region("r", RegionState.REGISTERED, 32)
    assert listed([new], [old], "r") == listed([new], [old]) == [("r", 32)]


def test_counts() -> None:
    regions = [region("a", RegionState.REGISTERED), region("b", RegionState.UNREGISTERING, 32)]
    regions.append(RegisteredRegion("cuda", RegisterCudaRegion("c", bytes(64), 0, 8), Peer("unix", uid=1), 0.0))
    assert region_listing.by_kind(regions) == {"system": (2, 96), "cuda": (1, 8)}
    assert region_listing.by_owner(regions) == {
        "tcp h": {"count": 2, "byte_size": 96},
        "uid 1": {"count": 1, "byte_size": 8},
    }


class Holder:
    """A worker that reports these uses of regions; None: its process is gone."""

    def __init__(self, incarnation: int, uses: dict[str, tuple[int, int]] | None) -> None:
        self.name, self.incarnation, self._uses = f"worker-{incarnation}", incarnation, uses

    async def call(self, operation: Operation, *fds: int) -> tuple[bytes, list[int]]:
        if self._uses is None:
            raise Unavailable("gone")
        return json.dumps(self._uses).encode(), []


async def test_records_tell_apart_who_uses_which() -> None:
    old, new = region("r", RegionState.UNREGISTERING), region("r", RegionState.REGISTERED, 32)
    old.holders, new.holders = {0, 1}, {1}
    workers = cast("list[WorkerProcess]", [Holder(0, {"r": (0, 1)}), Holder(1, {"r": (2, 3)}), Holder(2, None)])
    found = json.loads(await region_listing.records({"r": new}, [old], workers, ""))
    assert [(entry["byte_size"], entry["leases"], entry["workers"]) for entry in found] == [
        (32, 2, ["worker-1"]),
        (64, 4, ["worker-0", "worker-1"]),
    ]
    with pytest.raises(NotFound, match="'x'"):
        await region_listing.records({"r": new}, [], workers, "x")
