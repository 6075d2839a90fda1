from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from bench.footprint import Footprint, proportional
from bench.soak import grown

#: Takes that much when it is told to. A process of its own: nobody else allocates or frees in it.
_TAKES = """
import mmap, os
print(flush=True)
input()
taken = [os.dup(0) for _ in range(10)], os.urandom(24 << 20)
arena = os.memfd_create("tensord")
os.ftruncate(arena, 16 << 20)
mapped = mmap.mmap(arena, 16 << 20)
mapped[: 8 << 20] = bytes(8 << 20)
print(flush=True)
input()
"""


def test_a_process_holds_descriptors_and_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", _TAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        before = Footprint.of(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        now = Footprint.of(child.pid)
    assert now.descriptors == before.descriptors + 12
    assert now.kinds["pipe"] == before.kinds["pipe"] + 10
    assert now.kinds["memfd:tensord"] == 2
    assert (before.arena_bytes, now.arena_bytes) == (0, 8 << 20)
    # Not to the byte: Python's own pages are private or not as other processes of it come and go.
    assert 16 << 20 < now.private_bytes - before.private_bytes < 48 << 20


def test_growth_is_what_exceeds_the_first_quarter() -> None:
    def sample(descriptors: int, private_bytes: int) -> dict[str, Footprint]:
        return {"workers": Footprint(descriptors, private_bytes)}

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
