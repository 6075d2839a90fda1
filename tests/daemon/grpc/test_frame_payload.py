"""A frame's part of a tensor: what comes of it goes where it belongs, and no further."""

from __future__ import annotations

import pytest

from tensord.daemon.grpc.frame_payload import FramePayload


@pytest.mark.parametrize("steps", [[60], [1, 59], [20] * 3])
def test_the_frame_and_no_more(steps: list[int]) -> None:
    tensor = memoryview(bytearray(100))
    heard: list[int] = []
    payload = FramePayload(tensor[:60], lambda: heard.append(payload.taken))
    for number, step in enumerate(steps, 1):
        payload.rest()[:step] = b"%d" % number * step
        payload.advance(step)
    assert len(payload.rest()) == 0
    assert payload.taken == payload.byte_size == 60
    assert heard == [sum(steps[:number]) for number in range(1, len(steps) + 1)]
    assert bytes(tensor) == b"".join(b"%d" % number * step for number, step in enumerate(steps, 1)) + bytes(40)
