"""Copies past the caches: every byte, whatever the alignment, and none beside them."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.shm import guard
from tensord.workers.native import large_copy

built = pytest.mark.skipif(not large_copy.available, reason="the C extension was not built")
AT_LEAST = large_copy.LARGE


@built
@given(st.integers(0, 300), st.integers(0, 130), st.integers(0, 130))
def test_every_byte_and_none_beside(size: int, to: int, at: int) -> None:
    source = np.random.default_rng(size).integers(1, 255, at + size, np.uint8)[at:]
    memory = np.zeros(to + size + 130, np.uint8)
    large_copy._large_copy.copy(memory[to : to + size].data, source)
    assert memory[to : to + size].tobytes() == source.tobytes()
    assert not memory[:to].any()
    assert not memory[to + size :].any()


@pytest.mark.parametrize("dtype", [np.float32, np.bool_, np.int64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("count", [1000, AT_LEAST + 3])
def test_arrays(dtype: type, count: int) -> None:
    source = np.arange(count).astype(dtype)
    source.flags.writeable = False
    target = memoryview(bytearray(source.nbytes))
    large_copy.copy(target, source)
    assert target == source.tobytes()


def test_arrays_that_are_not_contiguous() -> None:
    source = np.arange(2 * AT_LEAST, dtype=np.uint8).reshape(2, -1).T
    target = memoryview(bytearray(source.nbytes))
    large_copy.copy(target, source)
    assert target == source.tobytes()


@built
@pytest.mark.parametrize("size", [AT_LEAST - 1, AT_LEAST + 1])
def test_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"{AT_LEAST} bytes do not fill {size}"):
        large_copy.copy(memoryview(bytearray(size)), np.zeros(AT_LEAST, np.uint8))
    with pytest.raises(BufferError):
        large_copy.copy(memoryview(bytes(AT_LEAST)), np.zeros(AT_LEAST, np.uint8))


@built
def test_other_threads_run_meanwhile() -> None:
    """The interpreter is handed over by itself once in ten minutes: another thread runs only if the copy lets go of it."""
    source, target = np.ones(4 * AT_LEAST, np.uint8), memoryview(bytearray(4 * AT_LEAST))
    thread = threading.Thread(target=lambda: sum(range(100_000)))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(600)
    try:
        deadline = time.monotonic() + 120
        thread.start()
        while thread.is_alive():
            assert time.monotonic() < deadline, "the copy keeps the interpreter"
            large_copy.copy(target, source)
    finally:
        sys.setswitchinterval(interval)
    thread.join()


@built
@pytest.mark.skipif(not guard.available, reason="the C extension was not built")
def test_into_memory_that_is_gone() -> None:
    """The guard sees streaming stores like any other."""
    fd = os.memfd_create("tensord-test")
    os.ftruncate(fd, AT_LEAST)
    guard.install()
    with mmap.mmap(fd, AT_LEAST) as mapping:
        guarded = guard.Guarded(mapping)
        os.ftruncate(fd, 4096)
        with memoryview(mapping) as target:
            large_copy.copy(target, np.ones(AT_LEAST, np.uint8))
        assert guarded.faults == 1
        assert os.pread(fd, 1 << 20, 0) == b"\x01" * 4096
        guarded.release()
    os.close(fd)
