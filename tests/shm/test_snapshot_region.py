"""Snapshot regions: what is read is a copy, what is gone is an error, and nothing is ever made to grow."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensord.shm.errors import InvalidArgument
from tensord.shm.regions import SnapshotRegion, open_object


@pytest.fixture
def path() -> Iterator[Path]:
    made = Path("/dev/shm", f"tensord-test-{uuid.uuid4().hex}")
    made.write_bytes(bytes(range(256)) * 48)  # three pages
    yield made
    made.unlink(missing_ok=True)


@pytest.fixture
def region(path: Path) -> Iterator[SnapshotRegion]:
    made = SnapshotRegion("r", open_object("r", path.name), 4096, 8192)
    yield made
    made.close()
    made.close()


def test_reads_are_copies_and_writes_arrive(region: SnapshotRegion, path: Path) -> None:
    read = region.read(3, 4)
    region.write(3, memoryview(b"here"))
    assert read == bytes((3, 4, 5, 6))
    assert path.read_bytes()[4096 + 3 : 4096 + 7] == b"here"
    path.unlink()
    assert region.read(3, 4) == b"here"


@pytest.mark.parametrize(("offset", "byte_size"), [(8192, 1), (8191, 2), (-1, 1), (0, 8193), (1 << 63, 1)])
def test_ranges(region: SnapshotRegion, offset: int, byte_size: int) -> None:
    with pytest.raises(InvalidArgument, match="'r'"):
        region.read(offset, byte_size)
    with pytest.raises(InvalidArgument, match="'r'"):
        region.write(offset, memoryview(bytes(byte_size)))


def test_a_truncated_object(region: SnapshotRegion, path: Path) -> None:
    os.truncate(path, 4096 + 100)
    with pytest.raises(InvalidArgument, match="'r': 100 of 200 bytes could be read"):
        region.read(0, 200)
    with pytest.raises(InvalidArgument, match="'r': 100 of 200 bytes could be written"):
        region.write(0, memoryview(bytes(200)))
    assert path.stat().st_size == 4096 + 100
    assert region.read(0, 100)
    os.truncate(path, 0)
    with pytest.raises(InvalidArgument, match="0 of 1 bytes could be written"):
        region.write(0, memoryview(b"x"))
    assert path.stat().st_size == 0


def test_it_must_be_inside_the_object(path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidArgument, match="failed to register shared memory region 'r'"):
        SnapshotRegion("r", open_object("r", path.name), 4096, 8193)
    assert set(os.listdir("/proc/self/fd")) <= before
