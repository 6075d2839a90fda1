"""The fault guard: a client's missing memory is a count, every other fault is as fatal as ever."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tensord.shm import guard
from tensord.shm.arrays import address_of
from tensord.shm.errors import Unavailable
from tensord.shm.regions import Region

ROOT = Path(__file__).parent.parent.parent
PAGE = mmap.PAGESIZE

pytestmark = pytest.mark.skipif(not guard.available, reason="the C extension was not built")


def region_of(byte_size: int) -> Region:
    fd = os.memfd_create("a client's")
    os.ftruncate(fd, byte_size)
    os.pwrite(fd, b"\x01" * byte_size, 0)
    return Region("r", fd, 0, byte_size)


def test_a_truncated_region_reads_as_zeros_and_counts() -> None:
    region = region_of(8 * PAGE)
    values = np.frombuffer(region.view(0, 8 * PAGE), np.uint8)
    assert values.sum() == 8 * PAGE
    assert region.faults == 0
    os.ftruncate(region.fd, 3 * PAGE)
    assert values.sum() == 3 * PAGE
    assert region.faults == 1
    values = np.frombuffer(b"", np.uint8)
    region.close()


def test_writing_goes_nowhere_and_counts() -> None:
    region = region_of(4 * PAGE)
    os.ftruncate(region.fd, 0)
    region.view(2 * PAGE, 4)[:] = b"lost"
    assert region.faults == 1
    assert os.fstat(region.fd).st_size == 0
    region.close()


def test_truncation_while_another_thread_reads() -> None:
    region = region_of(1024 * PAGE)
    values = np.frombuffer(region.view(0, 1024 * PAGE), np.uint8)
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            values.sum()

    reader = threading.Thread(target=read)
    reader.start()
    os.ftruncate(region.fd, 0)
    while not region.faults:
        pass
    stop.set()
    reader.join()
    assert values.sum() == 0
    region.close()


def test_what_may_be_missing() -> None:
    """Guarded memory, but for what a driver has locked; a range that takes another one's place is not locked."""
    region, held = region_of(2 * PAGE), region_of(2 * PAGE)
    held.hold(True)
    start, end = address_of(region.view(0, 1)), address_of(region.view(2 * PAGE - 1, 1))
    kept = address_of(held.view(0, 1))
    own = np.zeros(1)
    assert [guard.may_be_missing(each) for each in (start, end, kept, address_of(own))] == [True, True, False, False]
    held.hold(False)
    assert guard.may_be_missing(kept)
    held.hold(True)
    held.close()
    held.hold(True)
    for each in (region, region_of(2 * PAGE)):
        assert guard.may_be_missing(address_of(each.view(0, 1)))
        each.close()
    assert not guard.may_be_missing(start)


def test_each_region_counts_its_own() -> None:
    first, second = region_of(2 * PAGE), region_of(2 * PAGE)
    os.ftruncate(second.fd, 0)
    assert bytes(first.view(0, 1)) == b"\x01"
    assert bytes(second.view(0, 1)) == b"\x00"
    assert (first.faults, second.faults) == (0, 1)
    first.close()
    second.close()


def test_one_question_for_all() -> None:
    """Nobody has to ask each region while none has missed anything; that holds again once the bad ones are gone."""
    gc.collect()  # what other tests have left
    good, first, second = region_of(PAGE), region_of(PAGE), region_of(2 * PAGE)
    assert not guard.any_faults()
    for region in (first, second):
        os.ftruncate(region.fd, 0)
        bytes(region.view(0, 1))
    assert guard.any_faults()
    first.close()
    assert guard.any_faults()
    second.close()
    assert not guard.any_faults()
    again = region_of(PAGE)
    assert (again.faults, good.faults) == (0, 0)
    again.close()
    good.close()


def test_what_is_still_looked_at_stays_guarded() -> None:
    """A model keeps an array of a region that was unregistered; its owner truncates it: zeros, no death."""
    gc.collect()
    region = region_of(2 * PAGE)
    kept = np.frombuffer(region.view(0, 2 * PAGE), np.uint8)
    fd = os.dup(region.fd)
    region.close()
    region.close()
    os.ftruncate(fd, 0)
    os.close(fd)
    assert kept.sum() == 0
    assert guard.any_faults()
    del kept, region
    assert not guard.any_faults()


def test_a_region_that_nobody_has_closed_guards_nothing_once_it_is_gone() -> None:
    """A mapping that is made later at the address of a region counts its own faults, and is not overwritten for the region."""
    gc.collect()
    region = region_of(2 * PAGE)
    os.ftruncate(region.fd, 0)
    assert bytes(region.view(0, 1)) == b"\x00"
    start, fd = address_of(region.view(0, 1)), region.fd
    del region
    os.close(fd)
    assert not guard.may_be_missing(start)
    assert not guard.any_faults()


def test_more_mappings_than_can_be_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The region is refused, and nothing of it stays."""
    before = len(os.listdir("/proc/self/fd"))

    def full(mapping: mmap.mmap) -> int:
        raise OverflowError("all 8192 slots of the guard are taken")

    monkeypatch.setattr(guard._guard, "add", full)
    with pytest.raises(Unavailable, match="'r': all 8192 slots of the guard are taken"):
        region_of(PAGE)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_slots_are_used_again() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10_000):
        mapping = mmap.mmap(-1, PAGE)
        guarded = guard.Guarded(mapping)
        guarded.release()
        guarded.release()
        mapping.close()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    ("story", "body"),
    [
        ("a fault in a mapping that is not guarded", "os.ftruncate(fd, 0); m[0]"),
        ("a fault after the guard is released", "g = guard.Guarded(m); g.release(); os.ftruncate(fd, 0); m[0]"),
        ("a signal somebody sent", "os.kill(os.getpid(), signal.SIGBUS)"),
    ],
)
def test_everything_else_stays_fatal(story: str, body: str) -> None:
    script = (
        "import mmap, os, signal\nfrom shm import guard\nguard.install()\n"
        f"fd = os.memfd_create('x'); os.ftruncate(fd, 8192); m = mmap.mmap(fd, 8192)\n{body}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False, capture_output=True)
    assert done.returncode == -signal.SIGBUS, (story, done.stderr)


def test_misuse_is_refused() -> None:
    from tensord.shm import _guard

    with pytest.raises(LookupError):
        _guard.faults(8191)
    with pytest.raises(LookupError):
        _guard.remove(-5)
    mapping = mmap.mmap(-1, 2 * PAGE)
    with pytest.raises(ValueError):
        _guard.add(memoryview(mapping)[1:])
    mapping.close()
