"""Names, mappings and leases: a region lives exactly as long as somebody uses it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import posix_ipc
import pytest

from config.options import Regions
from shm import guard
from shm.cuda_regions import Driver
from shm.errors import AlreadyExists, InvalidArgument, NotFound
from shm.messages import RegisterSystemRegion
from workers.region_policy import RegionPolicy
from workers.region_table import RegionTable


@pytest.fixture
def key() -> Iterator[str]:
    name = f"/tensord-test-table-{os.getpid()}"
    made = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=8192)
    os.close(made.fd)
    yield name
    posix_ipc.unlink_shared_memory(name)


@pytest.fixture
def table() -> Iterator[RegionTable]:
    made = RegionTable(RegionPolicy(Regions()), Driver(), None)
    yield made
    made.close()


def test_register_and_find(table: RegionTable, key: str) -> None:
    region, access = table.register(RegisterSystemRegion("r", key, 4096, 4096), None)
    assert table.find("r") is region
    assert access == ("guarded" if guard.available else "snapshot")
    with pytest.raises(AlreadyExists, match="'r' already in manager"):
        table.register(RegisterSystemRegion("r", key, 0, 4096), None)
    with pytest.raises(InvalidArgument, match="'s'"):
        table.register(RegisterSystemRegion("s", key, 0, 8193), None)
    with pytest.raises(NotFound, match="Unable to find shared memory region: 's'"):
        table.find("s")


def test_unregister_waits_for_leases_while_the_name_is_free(table: RegionTable, key: str) -> None:
    old, _ = table.register(RegisterSystemRegion("r", key, 0, 4096), None)
    assert table.leases() == {"system": 0, "cuda": 0}
    old.lease()
    done: list[str] = []
    table.unregister("system", "r", lambda: done.append("r"))
    with pytest.raises(NotFound):
        table.find("r")
    new, _ = table.register(RegisterSystemRegion("r", key, 0, 4096), None)
    table.unregister("system", "", lambda: done.append("all"))
    assert done == ["all"]
    # The region that is leaving is still in use.
    assert table.leases() == {"system": 1, "cuda": 0}
    assert new.fd == -1
    assert old.read(0, 4) == bytes(4)
    old.unlease()
    table.settle()
    assert done == ["all", "r"]
    assert old.fd == -1
    assert table.leases() == {"system": 0, "cuda": 0}


def test_unknown_names_are_gone_already(table: RegionTable) -> None:
    done: list[str] = []
    table.unregister("system", "nobody", lambda: done.append("x"))
    assert done == ["x"]
