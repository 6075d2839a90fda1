from __future__ import annotations

import os
from collections import deque

from bench.footprint import Footprint
from bench.soak import grown


def test_a_process_holds_descriptors_and_memory() -> None:
    before = Footprint.of(os.getpid())
    fds = [os.dup(0) for _ in range(10)]
    block = bytearray(os.urandom(32 << 20))
    try:
        now = Footprint.of(os.getpid())
    finally:
        deque(map(os.close, fds))
    assert now.descriptors >= before.descriptors + 9
    assert now.private_bytes >= before.private_bytes + len(block) // 2


def test_growth_is_what_exceeds_the_first_quarter() -> None:
    def sample(descriptors: int, private_bytes: int) -> dict[str, Footprint]:
        return {"workers": Footprint(descriptors, private_bytes, 0)}

    samples = [sample(10, 100), sample(14, 140), sample(12, 120), *[sample(12, 130)] * 4, sample(15, 150)]
    assert grown(samples) == {"workers": (1, 10)}
