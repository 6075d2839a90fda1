"""The life every front shares; what is its protocol's is tested with that protocol."""

from __future__ import annotations

from tests.fakes import serving


def test_a_front_without_its_supervisor_ends() -> None:
    with serving() as (front, _):
        front._control.close()
        assert front.process.wait(30) == 1
