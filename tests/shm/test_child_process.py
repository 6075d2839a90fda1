"""Large blocks that come again."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys

import pytest

_SCRIPT = """
import ctypes, mmap, resource, sys, threading
from tensord.shm import child_process
library, size = ctypes.CDLL(None), int(sys.argv[1])
library.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: each page is a fault of its own, whatever the kernel's setting
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def resident(): return int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE
def use():
    place = ctypes.c_void_p()
    assert library.posix_memalign(ctypes.byref(place), ctypes.c_size_t(64), ctypes.c_size_t(size)) == 0
    ctypes.memset(place, 1, size)
    library.free(place)
def run():
    for i in range(40):
        if i == 20: before = faults()
        use()
    print(faults() - before)
if sys.argv[2] != "default": child_process.keep_freed_memory(256 << 20)
if sys.argv[2] == "thread":
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
else:
    run()
kept = resident()
child_process.free_garbage()
print(kept - resident())
"""


def _run(byte_size: int, how: str) -> tuple[int, int]:
    """Returns the page faults of twenty blocks of that size in steady state, and how many bytes are given back after them."""
    words = [sys.executable, "-c", _SCRIPT, str(byte_size), how]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    faults, given_back = map(int, done.stdout.split())
    return faults, given_back


@pytest.mark.parametrize("how", ["main", "thread"])
@pytest.mark.parametrize("mebibytes", [16, 33])
def test_large_blocks_are_kept_not_given_back(mebibytes: int, how: str) -> None:
    """In steady state they cost no page faults: neither outputs of 16 MiB nor what XLA needs for a large matrix in between."""
    library = ctypes.CDLL(None)
    library.gnu_get_libc_version.restype = ctypes.c_char_p
    version = tuple(map(int, library.gnu_get_libc_version().decode().split(".")[:2]))
    if mebibytes > 32 and version < (2, 35):
        pytest.skip("this glibc maps and unmaps such blocks")
    faults, given_back = _run(mebibytes << 20, how)
    assert faults < (mebibytes << 20) // mmap.PAGESIZE, "fewer than one block's pages for twenty blocks"
    assert given_back > (mebibytes - 1) << 20, "and nothing of it is kept when a model is unloaded"


def test_without_the_setting_each_block_has_new_pages() -> None:
    """The tests above could not fail otherwise."""
    faults, _ = _run(33 << 20, "default")
    assert faults >= 20 * (33 << 20) // mmap.PAGESIZE
