"""Ids that are made are all different, and equally long."""

from __future__ import annotations

from tensord.daemon.front import request_id


def test_made() -> None:
    found = {request_id.made() for _ in range(1000)}
    assert len(found) == 1000
    assert {len(each) for each in found} == {36}
