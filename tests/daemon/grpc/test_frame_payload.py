"""A frame's part of a tensor: never more than is left of either."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from daemon.grpc.frame_payload import FramePayload


@pytest.mark.parametrize("steps", [[60], [1, 59], [20] * 3])
def test_the_frame_and_no_more(steps: list[int]) -> None:
    tensor, at = memoryview(bytearray(100)), 0
    taken: list[int] = []

    def advance(byte_size: int) -> None:
        nonlocal at
        at += byte_size

    stream = Mock()
    stream.room.side_effect = lambda: tensor[at:]
    stream.advance.side_effect = advance
    payload = FramePayload(stream, 60, taken.append)
    for step in steps:
        payload.rest()[:step] = b"x" * step
        payload.advance(step)
    assert len(payload.rest()) == 0
    assert taken == steps
    assert bytes(tensor) == b"x" * 60 + bytes(40)
