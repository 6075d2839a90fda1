"""Bounds on how much is registered: each by itself, and exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.config.options import Regions
from tensord.daemon.regions import region_quota
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.operations import Peer

OWNERS = [
    Peer("tcp", "10.0.0.1:1"),
    Peer("tcp", "10.0.0.1:2"),
    Peer("tcp", "[::1]:3"),
    Peer("unix", uid=5),
    Peer("operator"),
]


def test_one_that_is_too_large() -> None:
    with pytest.raises(InvalidArgument, match="'r': 65 bytes, at most 64 are allowed"):
        region_quota.check(Regions(max_byte_size=64), "r", 65, OWNERS[0], [])


@given(
    st.lists(st.tuples(st.sampled_from(OWNERS), st.integers(1, 10)), max_size=8),
    st.sampled_from(OWNERS),
    st.integers(1, 10),
)
def test_what_is_let_in_is_within_every_bound(there: list[tuple[Peer, int]], peer: Peer, size: int) -> None:
    options = Regions(max_count=6, max_total_byte_size=30, max_owner_count=3, max_owner_byte_size=15)
    own = [found for owner, found in there if owner.owner == peer.owner]
    fits = len(there) < 6 and len(own) < 3 and sum(n for _, n in there) + size <= 30 and sum(own) + size <= 15
    if fits:
        region_quota.check(options, "r", size, peer, there)
    else:
        with pytest.raises(ServingError, match=r"'r': .* at most \d+ are allowed"):
            region_quota.check(options, "r", size, peer, there)
