from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from bench.footprint import Footprint, proportional
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


def test_memory_of_a_process_and_its_children() -> None:
    """Whichever thread started a child."""
    with ThreadPoolExecutor(1) as threads:
        command = [sys.executable, "-c", "block = bytearray(b'x' * (32 << 20)); print(flush=True); input()"]
        child = threads.submit(subprocess.Popen, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE).result()
        with child:
            assert child.stdout is not None
            child.stdout.readline()
            assert proportional(os.getpid()) > proportional(child.pid) > 32 << 20
