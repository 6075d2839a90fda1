"""Whose a region is."""

from __future__ import annotations

import pytest

from tensord.daemon.regions.region_record import is_owner
from tensord.shm.operations import Peer

ALICE, BOB = Peer("unix", "", 1, 1001, 1001), Peer("unix", "", 2, 1002, 1002)
ONE, OTHER = Peer("tcp", "127.0.0.1:1"), Peer("tcp", "10.0.0.1:2")


@pytest.mark.parametrize(
    ("peer", "owner", "is_its"),
    [
        (ALICE, ALICE, True),
        (ALICE, Peer("unix", "", 9, 1001, 7), True),
        (ALICE, BOB, False),
        (ALICE, ONE, False),
        (ONE, ALICE, False),
        (ONE, OTHER, True),
        (Peer("operator"), ALICE, True),
        (Peer("operator"), ONE, True),
    ],
)
def test_is_owner(peer: Peer, owner: Peer, is_its: bool) -> None:
    assert is_owner(peer, owner) is is_its
