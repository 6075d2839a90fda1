"""Tests what is told of regions: which are listed, and which of two of one name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from tensord.config.options import RegionsOptions
from tensord.daemon.processes.fronts import Fronts
from tensord.daemon.processes.worker_pool import WorkerPool
from tensord.daemon.regions.region_record import RegionState, RegisteredRegion
from tensord.daemon.regions.region_registry import RegionRegistry
from tensord.shm.errors import NotFound, Unavailable
from tensord.shm.operations import Operation, Peer, RegionStatus, RegisterCudaRegion, RegisterSystemRegion


def region(name: str, state: RegionState, byte_size: int = 64) -> RegisteredRegion:
    return RegisteredRegion(
        "system", RegisterSystemRegion(name, "/k", 0, byte_size), Peer("tcp", "h:1"), 0.0, state=state
    )


def having(
    regions: list[RegisteredRegion], leaving: Sequence[RegisteredRegion] = (), workers: Sequence[Holder] = ()
) -> RegionRegistry:
    registry = RegionRegistry(
        RegionsOptions(), cast("WorkerPool", SimpleNamespace(ready=lambda: workers)), cast("Fronts", None)
    )
    registry._regions.update({each.request.name: each for each in regions})
    registry._leaving.extend(leaving)
    return registry


def listed(regions: list[RegisteredRegion], leaving: list[RegisteredRegion], name: str = "") -> list[tuple[str, int]]:
    found = json.loads(having(regions, leaving).status(RegionStatus("system", name)))
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
    assert having(regions).by_kind() == {"system": (2, 96), "cuda": (1, 8)}
    assert having(regions).statistics() == {
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
    registry = having([new], [old], [Holder(0, {"r": (0, 1)}), Holder(1, {"r": (2, 3)}), Holder(2, None)])
    found = json.loads(await registry.records(""))
    assert [(entry["byte_size"], entry["leases"], entry["workers"]) for entry in found] == [
        (32, 2, ["worker-1"]),
        (64, 4, ["worker-0", "worker-1"]),
    ]
    with pytest.raises(NotFound, match="'x'"):
        await registry.records("x")
