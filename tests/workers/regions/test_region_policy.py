"""Whose objects are welcome, who may hand them over, and how they are used."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tensord.config.options import Regions
from tensord.shm import guard
from tensord.shm.errors import InvalidArgument
from tensord.shm.operations import ANONYMOUS, Peer, RegisterSystemRegion
from tensord.workers.regions.region_policy import RegionPolicy

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
    policy = RegionPolicy(Regions(**options))
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
    policy = RegionPolicy(Regions(owners=("1001",)))
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
    assert RegionPolicy(Regions(**options)).access(request(key), found(uid, 0, 0o600)) == access


def test_without_the_guard_everything_is_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "available", False)
    assert RegionPolicy(Regions(guarded_key_prefixes=("k",))).access(request(), found(US, 0, 0o600)) == "snapshot"
