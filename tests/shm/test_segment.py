"""Segments: sealed for everybody, writable only for the creator."""

from __future__ import annotations

import fcntl
import mmap
import os

import pytest

from tensord.shm.errors import InvalidArgument
from tensord.shm.segment import Segment


def test_nobody_resizes_or_writes_a_segment() -> None:
    segment = Segment.create(1 << 16)
    assert segment.share(writable=False) == segment.fd
    # What was said first holds.
    segment.share(writable=True)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 1 << 20)
    with pytest.raises(PermissionError):
        mmap.mmap(segment.fd, 1 << 16)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    segment.close()
    segment.close()


def test_a_reader_with_a_gpu_maps_it_writable_and_has_no_view_to_write_to() -> None:
    segment = Segment.create(1 << 16)
    segment.view[:4] = b"here"
    attached = Segment.attach(os.dup(segment.share(writable=True)), 1 << 16, writable=True)
    with pytest.raises(TypeError, match="read-only"):
        attached.view[:4] = b"gone"
    assert bytes(segment.view[:4]) == b"here"
    # It is as large as ever, whoever has the descriptor.
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    attached.close()
    segment.close()


def test_a_segment_for_others_cannot_be_mapped_writable() -> None:
    segment = Segment.create(4096)
    with pytest.raises(InvalidArgument, match="sealed against mapping it writable"):
        Segment.attach(os.dup(segment.share(writable=False)), 4096, writable=True)
    segment.close()


def test_its_memory_is_there_before_it_is_touched() -> None:
    segment = Segment.create(1 << 20)
    assert os.fstat(segment.fd).st_blocks * 512 >= 1 << 20
    segment.close()


@pytest.mark.parametrize(("size", "announced"), [(4096, 8192), (8192, 4096), (4096, 0), (4096, -1)])
def test_attach_refuses_another_size(size: int, announced: int) -> None:
    segment = Segment.create(size)
    with pytest.raises(InvalidArgument, match="were announced"):
        Segment.attach(os.dup(segment.fd), announced)
    segment.close()


def test_attach_refuses_what_could_be_truncated() -> None:
    before = set(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(InvalidArgument, match="not sealed"):
        Segment.attach(fd, 4096)
    read, write = os.pipe()
    with pytest.raises(InvalidArgument, match="not sealed"):
        Segment.attach(read, 4096)
    os.close(write)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_view_in_use_survives_the_close() -> None:
    segment = Segment.create(4096)
    view = segment.view[:4]
    view[:] = b"held"
    segment.close()
    assert bytes(view) == b"held"
