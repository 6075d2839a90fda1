"""Tests how an operator states how much of a resource there is."""

from __future__ import annotations

import pytest

from tensord.config import rate_limits


def test_what_is_said_of_a_device_goes_first() -> None:
    limits = rate_limits.parse(("R1:4:1", "r1:10", "R2:0"))
    assert rate_limits.of_device(limits, 0) == {"r1": 10, "r2": 0}
    assert rate_limits.of_device(limits, 1) == {"r1": 4, "r2": 0}


@pytest.mark.parametrize("text", ["", "R", "R:", ":3", "R:-1", "R:1:2:3", "R:x", "R:4294967296", "R:1:gpu"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME:COUNT or NAME:COUNT:DEVICE"):
        rate_limits.parse((text,))
