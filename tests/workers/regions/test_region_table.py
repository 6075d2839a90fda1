"""Names, mappings and leases: a region lives exactly as long as somebody uses it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import posix_ipc
import pytest

from tensord.config.options import RegionsOptions
from tensord.shm import guard
from tensord.shm.cuda_regions import Driver
from tensord.shm.errors import AlreadyExists, InvalidArgument, NotFound
from tensord.shm.operations import ANONYMOUS, Peer, RegisterSystemRegion
from tensord.workers.regions.region_table import RegionPolicy, RegionTable


@pytest.fixture
def key() -> Iterator[str]:
    name = f"/tensord-test-table-{os.getpid()}"
    made = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=8192)
    os.close(made.fd)
    yield name
    posix_ipc.unlink_shared_memory(name)


@pytest.fixture
def table() -> Iterator[RegionTable]:
    made = RegionTable(RegionPolicy(RegionsOptions()), Driver(), None)
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


def test_a_region_is_closed_after_its_last_lease_while_the_name_is_free(table: RegionTable, key: str) -> None:
    old, _ = table.register(RegisterSystemRegion("r", key, 0, 4096), None)
    assert table.leases() == {"system": 0, "cuda": 0}
    old.lease()
    done: list[str] = []
    assert table.unregister("cuda", "r") == 0
    assert table.unregister("system", "r") == 1
    table.when_closed("r", lambda: done.append("r"))
    with pytest.raises(NotFound):
        table.find("r")
    new, _ = table.register(RegisterSystemRegion("r", key, 0, 4096), None)
    new.lease()
    assert table.uses("") == {"r": (1, 1)}
    new.unlease()
    assert table.unregister("system", "r") == 0
    assert (new.fd, done) == (-1, [])
    # The region that is leaving is still in use.
    assert table.leases() == {"system": 1, "cuda": 0}
    assert table.uses("r") == {"r": (0, 1)}
    assert old.read(0, 4) == bytes(4)
    old.unlease()
    table.settle()
    assert done == ["r"]
    assert old.fd == -1
    assert table.leases() == {"system": 0, "cuda": 0}
    assert table.uses("") == {}


def test_a_region_that_was_renewed_is_in_use_while_a_request_uses_what_it_was_before(
    table: RegionTable, key: str
) -> None:
    """
    1. A request uses a region, which is renewed: its key is another object now. 2. It is unregistered, of the wrong kind first.
    3. The name is registered and unregistered once more. 4. The request ends.
    Result: who unregisters the region is told of the request, and that it has ended; who does so after that uses nothing.
    """
    old, _ = table.register(RegisterSystemRegion("r", key, 0, 4096), None)
    old.lease()
    posix_ipc.unlink_shared_memory(key)
    os.close(posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=8192).fd)
    new, _ = table.register(RegisterSystemRegion("r", key, 0, 4096, renews=True), None)
    assert new is not old
    assert table.unregister("cuda", "r") == 0
    assert table.unregister("system", "r") == 1
    assert new.fd == -1
    done: list[str] = []
    table.when_closed("r", lambda: done.append("r"))
    table.register(RegisterSystemRegion("r", key, 0, 4096), None)
    assert table.unregister("system", "r") == 0
    assert done == []
    old.unlease()
    table.settle()
    assert (old.fd, done) == (-1, ["r"])


def test_unknown_names_are_gone_already(table: RegionTable) -> None:
    assert table.unregister("system", "nobody") == 0
    done: list[str] = []
    table.when_closed("nobody", lambda: done.append("x"))
    assert done == ["x"]


def test_the_same_again_stays_and_another_object_takes_its_place(table: RegionTable, key: str) -> None:
    """
    1. A region is registered and used. 2. It is renewed while the key is the same object. 3. The key is made anew and the region
    renewed. 4. A renewal that is refused.
    Result: nothing changes; then the name means the new object, and the request goes on with the old one; nothing changes.
    """
    old, access = table.register(RegisterSystemRegion("r", key, 0, 4096), None)
    old.lease()
    again = RegisterSystemRegion("r", key, 0, 4096, renews=True)
    changes = table.changes
    assert table.register(again, None) == (old, access)
    assert table.changes == changes
    posix_ipc.unlink_shared_memory(key)
    os.close(posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=8192).fd)
    new, _ = table.register(again, None)
    new.write(0, b"new!")
    assert table.find("r") is new
    assert old.read(0, 4) == bytes(4)
    assert table.uses("r") == {"r": (0, 1)}
    old.unlease()
    table.settle()
    assert old.fd == -1
    with pytest.raises(InvalidArgument, match="invalid args: 4096 bytes at offset 8192, the object has 8192"):
        table.register(RegisterSystemRegion("r", key, 8192, 4096, renews=True), None)
    assert table.find("r") is new


@pytest.mark.skipif(not guard.available, reason="without the C extension nothing is mapped")
def test_a_region_that_lost_its_memory_is_mapped_anew(table: RegionTable, key: str) -> None:
    region, _ = table.register(RegisterSystemRegion("r", key, 0, 8192), None)
    os.truncate(f"/dev/shm{key}", 0)
    assert region.read(4096, 4) == bytes(4)
    assert region.faults
    os.truncate(f"/dev/shm{key}", 8192)
    renewed, _ = table.register(RegisterSystemRegion("r", key, 0, 8192, renews=True), None)
    assert renewed is not region
    assert (table.find("r"), renewed.faults) == (renewed, 0)


US, GROUP = os.geteuid(), os.getegid()
STRANGER = 54321


def request(key: str = "/k", peer: Peer = ANONYMOUS) -> RegisterSystemRegion:
    return RegisterSystemRegion("r", key, 0, 64, peer=peer)


def found(uid: int, gid: int, mode: int) -> os.stat_result:
    return cast(os.stat_result, SimpleNamespace(st_uid=uid, st_gid=gid, st_mode=mode))


@pytest.mark.parametrize(
    ("options", "uid", "gid", "mode", "welcome"),
    [
        ({}, US, STRANGER, 0o600, True),
        ({}, STRANGER, GROUP, 0o660, True),
        ({}, STRANGER, GROUP, 0o640, False),
        ({}, STRANGER, STRANGER, 0o666, False),
        ({"owners": (str(STRANGER),)}, STRANGER, STRANGER, 0o600, True),
        ({"groups": (str(STRANGER),)}, 1, STRANGER, 0o660, True),
        ({"groups": (str(STRANGER),)}, 1, STRANGER, 0o600, False),
        ({"owners": ("root",)}, 0, 0, 0o600, True),
    ],
)
def test_whose(options: dict[str, Any], uid: int, gid: int, mode: int, welcome: bool) -> None:
    policy = RegionPolicy(RegionsOptions(**options))
    if welcome:
        policy.check(request(), found(uid, gid, mode))
    else:
        with pytest.raises(InvalidArgument, match="another user"):
            policy.check(request(), found(uid, gid, mode))


@pytest.mark.parametrize(
    ("uid", "gid", "mode", "may"),
    [
        (1001, 1, 0o600, True),
        (1001, 1, 0o400, False),
        (US, 1001, 0o660, True),
        (US, 2002, 0o660, True),
        (US, 1001, 0o606, False),
        (US, 7, 0o606, True),
        (US, 7, 0o660, False),
    ],
)
def test_a_unix_client_lends_only_what_it_may_use_itself(uid: int, gid: int, mode: int, may: bool) -> None:
    policy = RegionPolicy(RegionsOptions(owners=("1001",)))
    peer = Peer("unix", "", 1, 1001, 1001, (2002,))
    if may:
        policy.check(request(peer=peer), found(uid, gid, mode))
    else:
        with pytest.raises(InvalidArgument, match="not readable and writable for you"):
            policy.check(request(peer=peer), found(uid, gid, mode))
    policy.check(request(peer=Peer("unix", "", 1, 0, 0)), found(uid, gid, mode))


@pytest.mark.skipif(not guard.available, reason="the C extension was not built")
@pytest.mark.parametrize(
    ("options", "key", "uid", "access"),
    [
        ({}, "/k", US, "guarded"),
        ({"access": "snapshot"}, "/k", US, "snapshot"),
        ({"snapshot_key_prefixes": ("cam",)}, "/cam-1", US, "snapshot"),
        ({"snapshot_key_prefixes": ("cam",)}, "/mic-1", US, "guarded"),
        ({"snapshot_owners": ("7",)}, "/k", 7, "snapshot"),
        ({"access": "snapshot", "guarded_key_prefixes": ("mine",)}, "mine", US, "guarded"),
        ({"access": "snapshot", "guarded_owners": ("7",)}, "/k", 7, "guarded"),
        ({"snapshot_owners": ("7",), "guarded_key_prefixes": ("k",)}, "/k", 7, "snapshot"),
    ],
)
def test_how(options: dict[str, Any], key: str, uid: int, access: str) -> None:
    assert RegionPolicy(RegionsOptions(**options)).access(request(key), found(uid, 0, 0o600)) == access


def test_without_the_guard_everything_is_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "available", False)
    assert (
        RegionPolicy(RegionsOptions(guarded_key_prefixes=("k",))).access(request(), found(US, 0, 0o600)) == "snapshot"
    )
