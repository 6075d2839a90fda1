"""Memory of pushes: nobody can change what is in use, and what nobody uses any more is filled again."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.shm.arrays import Array
from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.shm.segment import F_SEAL_FUTURE_WRITE
from tensord.workers.parameters import sealed_memory
from tensord.workers.parameters.sealed_memory import (
    KEPT_NS,
    LEAST_RETURNING,
    MOST_RETURNING,
    PIECE,
    MemoryPool,
    Part,
    SealedMemory,
    is_sealed,
    kernel_tells,
    part_of,
)
from tests.generated import examples
from tests.workers.parameters.made_sets import noise, sealed_bytes

FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
SIZE = LEAST_RETURNING


def pushed(pool: MemoryPool, content: bytes) -> int:
    """Returns a descriptor of memory that was filled with this content."""
    return pool.sealed([part_of(content)])


def held(content: bytes, size: int = SIZE) -> bytes:
    """Returns as many bytes, which begin with this content."""
    return content.ljust(size, b"\1")


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def pool() -> Iterator[MemoryPool]:
    """A pool that has no descriptors left at the end."""
    before = opened()
    pool = MemoryPool()
    yield pool
    assert not pool.expire(time.monotonic_ns() + 2 * KEPT_NS)
    assert opened() == before


# ------------------------------------------------------------------------------------------------------------- filling


@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [PIECE],
        [PIECE + 1],
        [0, 3, 0, 4095, PIECE - 1, 0, 1, 0],
        [8, 56, 0, 3 * PIECE + 5, 2, 7 * PIECE, 1],
        [PIECE // 3] * 40,
    ],
)
def test_parts_lie_in_their_order_in_new_memory_and_in_memory_that_is_filled_again(
    pool: MemoryPool, sizes: list[int]
) -> None:
    for turn in range(3):
        parts = [noise(size + turn)[turn:] for size in sizes]
        fd = pool.sealed([part_of(part) for part in parts])
        assert os.pread(fd, os.fstat(fd).st_size + 1, 0) == b"".join(parts)
        os.close(fd)


def test_what_is_checked_is_what_is_sealed(pool: MemoryPool) -> None:
    checked: list[bytes] = []
    os.close(pool.sealed([part_of(held(b"a"))], lambda content: checked.append(content.tobytes())))
    assert checked == [held(b"a")]


@pytest.mark.parametrize("failing", [0, 5 * PIECE, 31 * PIECE])
@pytest.mark.parametrize("kind", [InvalidArgument, OSError])
def test_an_error_of_a_part_is_told_as_it_is_and_leaves_nothing(
    pool: MemoryPool, kind: type[Exception], failing: int
) -> None:
    before = opened()

    def copy(at: int, target: Array) -> None:
        if at == failing:
            raise kind(f"not from {at}")

    with pytest.raises(kind, match=f"not from {failing}"):
        pool.sealed([Part(32 * PIECE, copy)])
    assert opened() == before


def test_a_host_without_memory_is_an_error_and_no_signal(pool: MemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    before, pwrite = opened(), os.pwrite

    def writing(fd: int, content: memoryview, at: int) -> int:
        if at >= PIECE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, content, at)

    monkeypatch.setattr(os, "pwrite", writing)
    with pytest.raises(Unavailable, match=rf"the host has no {4 * PIECE} bytes of memory for parameters"):
        pool.sealed([part_of(noise(4 * PIECE))])
    assert opened() == before


def test_memory_that_the_process_may_not_have(pool: MemoryPool) -> None:
    def never(at: int, target: Array) -> None:
        raise AssertionError("nothing is copied where there is no memory")

    with pytest.raises(Unavailable, match=r"the host has no 9223372036854771712 bytes of memory for parameters"):
        pool.sealed([Part((1 << 63) - 4096, never)])


# ------------------------------------------------------------------------------------------------------------- sealing


@pytest.mark.parametrize("size", [1, LEAST_RETURNING])
def test_nobody_else_can_change_it(pool: MemoryPool, size: int) -> None:
    fd = pushed(pool, held(b"a", size))
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    for each in (fd, again):
        with pytest.raises(OSError):
            os.pwrite(each, b"x", 0)
        with pytest.raises(OSError):
            os.ftruncate(each, 0)
        with pytest.raises(OSError):
            mmap.mmap(each, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(each, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        os.close(each)


def test_small_memory_never_comes_back(pool: MemoryPool) -> None:
    before = opened()
    fd = pushed(pool, b"small")
    assert is_sealed(fd)
    os.close(fd)
    assert opened() == before


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE])
def test_memory_that_may_still_change_is_refused(missing: int) -> None:
    for seals in (FIXED & ~missing, (FIXED | F_SEAL_FUTURE_WRITE) & ~fcntl.F_SEAL_WRITE):
        fd = sealed_bytes(b"12345678", seals)
        assert not is_sealed(fd)
        with pytest.raises(InvalidArgument, match="not sealed against changes"):
            SealedMemory(fd)
        os.close(fd)


def test_files_and_empty_memory_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with open(tmp_path / "file") as file, pytest.raises(InvalidArgument, match="not sealed"):
        SealedMemory(file.fileno())
    fd = sealed_bytes(b"")
    with pytest.raises(InvalidArgument, match="is empty"):
        SealedMemory(fd)
    os.close(fd)


# ------------------------------------------------------------------------------------------------------ filled once more


def test_memory_comes_back_when_the_last_use_ends(pool: MemoryPool) -> None:
    fd = pushed(pool, held(b"a"))
    first = inode(fd)
    copy = os.dup(fd)
    os.close(fd)
    memory = SealedMemory(copy)
    os.close(copy)
    leaf = np.frombuffer(memory.view, np.uint8)[5:10]
    del memory
    other = pushed(pool, held(b"b"))
    assert inode(other) != first, "an array refers to it"
    assert leaf.tolist() == [1] * 5
    del leaf
    third = pushed(pool, held(b"c"))
    assert inode(third) == first
    assert os.pread(third, SIZE, 0) == held(b"c")
    assert os.pread(other, SIZE, 0) == held(b"b")
    os.close(other)
    os.close(third)


HOLDER = """
import mmap, os, sys, time
mapping = mmap.mmap(0, 0, mmap.MAP_SHARED, mmap.PROT_READ)
os.close(0)
child = os.fork() if sys.argv[1] == "fork" else 1
if child:
    print("held", flush=True)
    if sys.argv[1] == "fork":
        os._exit(0)
time.sleep(600)
"""


def test_memory_of_a_killed_process_comes_back(pool: MemoryPool) -> None:
    fd = pushed(pool, held(b"a"))
    first = inode(fd)
    with subprocess.Popen([sys.executable, "-c", HOLDER, "stay"], stdin=fd, stdout=subprocess.PIPE) as holder:
        os.close(fd)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        fd = pushed(pool, held(b"b"))
        assert inode(fd) != first, "the other process has it mapped, although it has closed the descriptor it was given"
        os.close(fd)
        holder.send_signal(signal.SIGKILL)
    fds = [pushed(pool, held(b"c")), pushed(pool, held(b"d"))]
    assert first in {inode(fd) for fd in fds}
    for each in fds:
        os.close(each)


def test_what_is_refused_leaves_the_memory_for_the_next(pool: MemoryPool) -> None:
    fd = pushed(pool, held(b"a"))
    first = inode(fd)
    os.close(fd)

    def copy(at: int, target: Array) -> None:
        target[:10] = 7
        raise InvalidArgument("shorter by now")

    def wrong(content: Array) -> None:
        raise InvalidArgument(f"checksum of {len(content)} bytes")

    for _ in range(3):
        with pytest.raises(InvalidArgument, match="shorter"):
            pool.sealed([Part(SIZE, copy)])
        with pytest.raises(InvalidArgument, match="checksum"):
            pool.sealed([part_of(held(b"b"))], wrong)
    fd = pushed(pool, held(b"b"))
    assert inode(fd) == first
    assert os.pread(fd, SIZE, 0) == held(b"b")
    os.close(fd)


def test_only_memory_of_the_same_size_is_filled_again(pool: MemoryPool) -> None:
    fd = pushed(pool, held(b"a"))
    first = inode(fd)
    os.close(fd)
    fd = pushed(pool, held(b"b", SIZE + 1))
    assert inode(fd) != first
    os.close(fd)


def test_a_size_that_is_not_pushed_any_more_is_freed_and_others_stay(pool: MemoryPool) -> None:
    before = opened()
    os.close(pushed(pool, held(b"a")))
    used = pushed(pool, held(b"b", SIZE + 1))
    idle_ns = time.monotonic_ns()
    fd = pushed(pool, held(b"c"))
    first = inode(fd)
    os.close(fd)
    assert pool.expire(idle_ns + KEPT_NS)
    assert os.pread(used, SIZE + 1, 0) == held(b"b", SIZE + 1), "what is in use stays as it is"
    os.close(used)
    fd = pushed(pool, held(b"d"))
    assert inode(fd) == first
    os.close(fd)
    assert not pool.expire(time.monotonic_ns() + 2 * KEPT_NS)
    assert opened() == before
    fd = pushed(pool, held(b"e"))
    assert inode(fd) != first
    os.close(fd)


def test_no_more_memories_are_kept_than_a_worker_may(pool: MemoryPool) -> None:
    before = opened()
    fds = [pushed(pool, held(bytes([number]))) for number in range(3 * MOST_RETURNING)]
    assert opened() - before == len(fds) + 2 * MOST_RETURNING
    for number, fd in enumerate(fds):
        assert os.pread(fd, SIZE, 0) == held(bytes([number]))
        os.close(fd)


@pytest.mark.parametrize("call", ["flock", "open", "fcntl"])
def test_where_the_kernel_does_not_tell_memory_is_sealed_for_ever(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    module, real = (os, os.open) if call == "open" else (fcntl, getattr(fcntl, call))

    def failing(*arguments: object) -> object:
        if call == "fcntl" and not int(arguments[2] if len(arguments) > 2 else 0) & F_SEAL_FUTURE_WRITE:  # type: ignore[call-overload]
            return real(*arguments)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    before = opened()
    with monkeypatch.context() as patched:
        patched.setattr(module, call, failing)
        assert not kernel_tells()
        pool = MemoryPool()
    fd = pushed(pool, held(b"a"))
    assert is_sealed(fd)
    assert os.pread(fd, SIZE, 0) == held(b"a")
    os.close(fd)
    assert not pool.expire(time.monotonic_ns())
    assert opened() == before


def test_a_kernel_that_ignores_the_seal_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real, before = fcntl.fcntl, opened()

    def ignoring(fd: int, command: int, seals: int = 0) -> int:
        kept = 0 if command == fcntl.F_ADD_SEALS and seals & F_SEAL_FUTURE_WRITE else seals
        return real(fd, command, kept)

    monkeypatch.setattr(fcntl, "fcntl", ignoring)
    assert not kernel_tells()
    assert opened() == before


def test_a_kernel_that_cannot_populate_is_none_the_worse(pool: MemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_memory, "_madvise", lambda *_: -1)
    for turn in range(3):
        fd = pushed(pool, held(bytes([turn])))
        assert os.pread(fd, SIZE, 0) == held(bytes([turn]))
        os.close(fd)


def test_a_process_without_descriptors_is_told_so(pool: MemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        with pytest.raises(Unavailable, match="no file can be opened for pushed parameters"):
            pool.sealed([part_of(held(b"a"))])


def test_memory_that_somebody_else_can_write_to_is_refused_and_freed(
    pool: MemoryPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory with a second writable mapping, such as that of a child which a model's code forked, cannot be sealed."""
    before = opened()
    others: list[mmap.mmap] = []
    usual = os.memfd_create

    def memfd_create(name: str, flags: int) -> int:
        fd = usual(name, flags)
        os.truncate(fd, 5)
        others.append(mmap.mmap(fd, 5))
        return fd

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    with pytest.raises(Unavailable, match="5 bytes of parameters cannot be sealed"):
        pool.sealed([part_of(b"small")])
    others.pop().close()
    assert opened() == before


def test_what_is_left_over_goes_although_its_size_is_pushed_all_the_time(pool: MemoryPool) -> None:
    before = opened()
    for fd in [pushed(pool, held(b"a")) for _ in range(MOST_RETURNING)]:
        os.close(fd)
    newest, number = -1, 0
    for number in range(4):
        former, newest = newest, pushed(pool, held(bytes([number])))
        if former >= 0:
            os.close(former)
        assert pool.expire(time.monotonic_ns())
    # Two that are used in turn, and the descriptor of the newest.
    assert opened() <= before + 2 * 2 + 1
    assert os.pread(newest, 1, 0) == bytes([number])
    os.close(newest)


def test_free_memory_of_other_sizes_makes_room(pool: MemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = opened()
    os.close(pushed(pool, held(b"a")))
    used = pushed(pool, held(b"b", SIZE + 1))
    pwrite = os.pwrite

    def writing(fd: int, content: memoryview, at: int) -> int:
        if opened() > before + 2 * 2 + 1 + 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, content, at)

    os.close(pushed(pool, held(b"c", SIZE + 2)))
    monkeypatch.setattr(os, "pwrite", writing)
    fd = pushed(pool, held(b"d", SIZE + 3))
    monkeypatch.undo()
    assert os.pread(fd, SIZE + 4, 0) == held(b"d", SIZE + 3)
    assert os.pread(used, SIZE + 2, 0) == held(b"b", SIZE + 1)
    os.close(fd)
    os.close(used)


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("pudmcx"), st.integers(0, 7)), max_size=40))
def test_nothing_that_is_used_ever_changes(steps: list[tuple[str, int]]) -> None:
    """Whatever is pushed, duplicated, mapped, sliced and dropped in between."""
    before, pool = opened(), MemoryPool()
    fds: list[tuple[int, int]] = []
    arrays: list[tuple[Array, int]] = []
    for number, (step, which) in enumerate(steps):
        if step == "p":
            fds.append((pushed(pool, held(bytes([number]), SIZE + which % 2)), number))
        elif step == "u":
            with pytest.raises(InvalidArgument):
                pool.sealed([Part(SIZE + which % 2, _refusing)])
        elif step == "x":
            pool.expire(time.monotonic_ns() + which * KEPT_NS // 4)
        elif step == "c" and arrays:
            del arrays[which % len(arrays)]
        elif fds:
            fd, content = fds[which % len(fds)]
            if step == "d":
                fds.append((os.dup(fd), content))
            elif step == "m":
                arrays.append((np.frombuffer(SealedMemory(fd).view, np.uint8)[::4097], content))
            os.close(fd)
            del fds[which % (len(fds) - (step == "d"))]
        for fd, content in fds:
            assert os.pread(fd, 2, 0) == bytes([content, 1])
        assert all(array[0] == content and (array[1:] == 1).all() for array, content in arrays)
    for fd, _ in fds:
        os.close(fd)
    arrays.clear()
    assert not pool.expire(time.monotonic_ns() + 3 * KEPT_NS)
    assert opened() == before


def _refusing(at: int, target: Array) -> None:
    target[:] = 255
    raise InvalidArgument("not this")
