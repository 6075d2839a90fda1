"""Tests which registrations may be, and which ask once more for what is there."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.config.options import RegionsOptions
from tensord.daemon.regions import region_checks
from tensord.daemon.regions.region_checks import check_bounds
from tensord.daemon.regions.region_record import RegisteredRegion, Registration
from tensord.shm.errors import InvalidArgument, ServingError, Unsupported
from tensord.shm.operations import Peer, RegisterCudaRegion, RegisterSystemRegion

HERE, THERE = Peer("tcp", "127.0.0.1:1"), Peer("tcp", "10.0.0.1:1")
ALICE, BOB = Peer("unix", uid=1001), Peer("unix", uid=1002)
SYSTEM = RegisterSystemRegion("r", "/k", 4096, 64, "guarded")
CUDA = RegisterCudaRegion("r", bytes(64), 0, 64)


def region(request: Registration, peer: Peer = HERE, fd: int = -1) -> RegisteredRegion:
    return RegisteredRegion("cuda" if isinstance(request, RegisterCudaRegion) else "system", request, peer, 0.0, fd=fd)


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
        region_checks.check_form(RegionsOptions(enabled=False), SYSTEM)
    with pytest.raises(InvalidArgument, match="a CUDA handle of 3 bytes, 64 are expected"):
        region_checks.check_form(RegionsOptions(), RegisterCudaRegion("r", b"abc", 0, 64))
    with pytest.raises(InvalidArgument, match="keys must begin like one of"):
        region_checks.check_fields(RegionsOptions(key_prefixes=("cam-",)), SYSTEM)
    region_checks.check_fields(RegionsOptions(key_prefixes=("k",)), SYSTEM)


OWNERS = [
    Peer("tcp", "10.0.0.1:1"),
    Peer("tcp", "10.0.0.1:2"),
    Peer("tcp", "[::1]:3"),
    Peer("unix", uid=5),
    Peer("operator"),
]


def test_one_that_is_too_large() -> None:
    with pytest.raises(InvalidArgument, match="'r': 65 bytes, at most 64 are allowed"):
        check_bounds(RegionsOptions(max_byte_size=64), "r", 65, OWNERS[0], [])


@given(
    st.lists(st.tuples(st.sampled_from(OWNERS), st.integers(1, 10)), max_size=8),
    st.sampled_from(OWNERS),
    st.integers(1, 10),
)
def test_what_is_let_in_is_within_every_bound(there: list[tuple[Peer, int]], peer: Peer, size: int) -> None:
    options = RegionsOptions(max_count=6, max_total_byte_size=30, max_owner_count=3, max_owner_byte_size=15)
    own = [found for owner, found in there if owner.owner == peer.owner]
    fits = len(there) < 6 and len(own) < 3 and sum(n for _, n in there) + size <= 30 and sum(own) + size <= 15
    if fits:
        check_bounds(options, "r", size, peer, there)
    else:
        with pytest.raises(ServingError, match=r"'r': .* at most \d+ are allowed"):
            check_bounds(options, "r", size, peer, there)
