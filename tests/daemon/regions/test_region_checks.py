"""Which registrations may be, and which ask once more for what is there."""

from __future__ import annotations

import os

import pytest

from tensord.config.options import Regions
from tensord.daemon.regions import region_checks
from tensord.daemon.regions.region_record import Region, Registration
from tensord.shm.errors import InvalidArgument, Unsupported
from tensord.shm.operations import Peer, RegisterCudaRegion, RegisterSystemRegion

HERE, THERE = Peer("tcp", "127.0.0.1:1"), Peer("tcp", "10.0.0.1:1")
ALICE, BOB = Peer("unix", uid=1001), Peer("unix", uid=1002)
SYSTEM = RegisterSystemRegion("r", "/k", 4096, 64, "guarded")
CUDA = RegisterCudaRegion("r", bytes(64), 0, 64)


def region(request: Registration, peer: Peer = HERE, fd: int = -1) -> Region:
    return Region("cuda" if isinstance(request, RegisterCudaRegion) else "system", request, peer, 0.0, fd=fd)


@pytest.mark.parametrize(
    ("there", "asked", "peer", "same"),
    [
        (SYSTEM, RegisterSystemRegion("r", "/k", 4096, 64), HERE, True),
        (SYSTEM, RegisterSystemRegion("r", "k", 4096, 64), Peer("tcp", "127.0.0.1:2"), True),
        (SYSTEM, RegisterSystemRegion("r", "/k2", 4096, 64), HERE, False),
        (SYSTEM, RegisterSystemRegion("r", "/k", 0, 64), HERE, False),
        (SYSTEM, RegisterSystemRegion("r", "/k", 4096, 65), HERE, False),
        (SYSTEM, SYSTEM, THERE, False),
        (SYSTEM, SYSTEM, ALICE, False),
        (SYSTEM, CUDA, HERE, False),
        (CUDA, CUDA, HERE, True),
        (CUDA, SYSTEM, HERE, False),
        (CUDA, RegisterCudaRegion("r", b"\1" * 64, 0, 64), HERE, False),
        (CUDA, RegisterCudaRegion("r", bytes(64), 1, 64), HERE, False),
    ],
)
def test_what_is_the_same_again(there: Registration, asked: Registration, peer: Peer, same: bool) -> None:
    assert region_checks.repeats(region(there), asked, peer, -1) is same


def test_users_are_owners_and_sealed_memory_is_itself() -> None:
    assert region_checks.repeats(region(SYSTEM, ALICE), SYSTEM, Peer("unix", pid=7, uid=1001), -1)
    assert not region_checks.repeats(region(SYSTEM, ALICE), SYSTEM, BOB, -1)
    asked = RegisterSystemRegion("r", "", 0, 64)
    one, other = os.memfd_create("tensord-test"), os.memfd_create("tensord-test")
    duplicate = os.dup(one)
    try:
        there = region(RegisterSystemRegion("r", "", 0, 64, "sealed"), ALICE, one)
        assert region_checks.repeats(there, asked, ALICE, duplicate)
        assert not region_checks.repeats(there, asked, ALICE, other)
        assert not region_checks.repeats(there, asked, ALICE, -1)
    finally:
        for fd in (one, other, duplicate):
            os.close(fd)


def test_form_and_fields() -> None:
    with pytest.raises(Unsupported, match="Client shared memory is disabled"):
        region_checks.check_form(Regions(enabled=False), SYSTEM)
    with pytest.raises(InvalidArgument, match="a CUDA handle of 3 bytes, 64 are expected"):
        region_checks.check_form(Regions(), RegisterCudaRegion("r", b"abc", 0, 64))
    with pytest.raises(InvalidArgument, match="keys must begin like one of"):
        region_checks.check_fields(Regions(key_prefixes=("cam-",)), SYSTEM)
    region_checks.check_fields(Regions(key_prefixes=("k",)), SYSTEM)
