"""Mappings of memfds: aligned for large pages, gone with the last view, and the same bytes whether pages are joined or not."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tensord.shm.common.mapping import join_pages, mapped

LARGE = 2 << 20
SIZES = [1, 4096, LARGE - 1, LARGE, LARGE + 1, 2 * LARGE - 4096, 5 * LARGE + 4097]


@pytest.fixture
def memory() -> Iterator[Callable[[int], int]]:
    opened: list[int] = []

    def make(byte_size: int) -> int:
        opened.append(fd := os.memfd_create("mapped"))
        os.posix_fallocate(fd, 0, byte_size)
        return fd

    yield make
    for fd in opened:
        os.close(fd)


def ranges() -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line.split()[0] for line in maps if "/memfd:mapped" in line]


@pytest.mark.parametrize("byte_size", SIZES)
def test_two_mappings_have_the_same_bytes_when_pages_are_joined(memory: Callable[[int], int], byte_size: int) -> None:
    fd = memory(byte_size)
    before = mapped(fd, byte_size)
    written = np.frombuffer(before, np.uint8)
    written[:] = np.arange(byte_size, dtype=np.uint64).view(np.uint8)[:byte_size]
    wanted = bytes(before)
    join_pages(before)
    read = mapped(fd, byte_size, mmap.PROT_READ)
    assert bytes(before) == bytes(read) == wanted
    written[-1] ^= 255
    assert read[-1] == written[-1]
    assert read.readonly
    assert not before.readonly
    if byte_size >= LARGE:
        assert not np.frombuffer(read, np.uint8).ctypes.data % LARGE


@pytest.mark.parametrize("byte_size", SIZES)
def test_a_mapping_ends_with_its_last_view_and_leaves_nothing_behind(
    memory: Callable[[int], int], byte_size: int
) -> None:
    fd, before = memory(byte_size), len(os.listdir("/proc/self/fd"))
    view = mapped(fd, byte_size)
    part = np.frombuffer(view[byte_size // 2 :], np.uint8)
    view.release()
    assert len(ranges()) == 1
    assert part[0] == 0
    assert len(os.listdir("/proc/self/fd")) == before
    start, end = (int(side, 16) for side in ranges()[0].split("-"))
    assert end - start == -(-byte_size // mmap.PAGESIZE) * mmap.PAGESIZE
    del part
    assert not ranges()


def test_what_cannot_be_mapped_is_refused(memory: Callable[[int], int]) -> None:
    fd = memory(LARGE)
    for byte_size in (0, -1, LARGE + 1):
        with pytest.raises(ValueError, match="cannot be mapped"):
            mapped(fd, byte_size)
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    with pytest.raises(PermissionError):
        mapped(reader, LARGE)
    os.close(reader)
    assert not ranges()
