"""Memory in safetensors' layout: read as if an enemy had written it, written as others read it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.shm.arena import ALIGNMENT
from tensord.shm.arrays import Array, address_of
from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.workers.parameters import layout
from tensord.workers.parameters.layout import NewMemory, Part, SealedMemory, leaf_of, part_of
from tensord.workers.parameters.slices import SLICE
from tests.generated import examples
from tests.workers.parameters.made_sets import layout_bytes, sealed, sealed_bytes

LEAVES: dict[str, Array] = {
    "w": np.arange(32, dtype=np.float32).reshape(4, 8),
    "b": np.array(3, ml_dtypes.bfloat16),
    "none": np.zeros((0, 3), np.int64),
    "flags": np.array([True, False, True]),
    "deep.0.v": np.arange(48, dtype=np.int8),
}


def header(entries: Any, tail: bytes = b"", length: int | None = None) -> bytes:
    """Builds memory with a header of these entries."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + tail


def read(content: bytes) -> dict[str, Array]:
    return layout.read(memoryview(content), "these")


def test_what_is_written_is_read_and_aligned() -> None:
    fd = sealed(LEAVES)
    try:
        memory = SealedMemory(fd)
        found = layout.read(memory.view, "these")
    finally:
        os.close(fd)
    assert found.keys() == LEAVES.keys()
    for name, array in found.items():
        assert array.dtype == LEAVES[name].dtype
        np.testing.assert_array_equal(array, LEAVES[name])
        assert not array.flags.writeable
    assert not address_of(found["w"]) % ALIGNMENT


def test_other_libraries_read_it_and_write_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    plain = {name: array for name, array in LEAVES.items() if array.dtype != ml_dtypes.bfloat16}
    found = safetensors.load(layout_bytes(plain))
    assert {name: array.tolist() for name, array in found.items()} == {
        name: array.tolist() for name, array in plain.items()
    }
    written = read(safetensors.save(plain, {"format": "np"}))
    assert {name: array.tolist() for name, array in written.items()} == {
        name: array.tolist() for name, array in plain.items()
    }


ONE = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes are too few"),
        (b"1234567", "7 bytes are too few"),
        (struct.pack("<Q", 1 << 62), "header would have 4611686018427387904 bytes, at most 0 are possible"),
        (header({"x": ONE}, b"", 1 << 20), "header would have 1048576 bytes"),
        (header(b"not json"), "its header is not that of safetensors' layout"),
        (header(b"[" * 5000), "its header is not that of safetensors' layout"),
        (header(b'{"x":' * 5000), "its header is not that of safetensors' layout"),
        (header(b'{"\xff": 1}'), "its header is not that of safetensors' layout"),
        (header([1]), "its header is not that of safetensors' layout"),
        (header({"x": {**ONE, "more": 1}}, b"ab"), "its header is not that of safetensors' layout"),
        (header({"x": {**ONE, "shape": [-2]}}, b"ab"), "its header is not that of safetensors' layout"),
        (header({"x": {**ONE, "shape": [1 << 63]}}, b"ab"), "its header is not that of safetensors' layout"),
        (header({"x": {**ONE, "shape": [int("9" * 4000)]}}, b"ab"), "its header is not that of safetensors' layout"),
        (header({"x": {**ONE, "data_offsets": [0]}}, b"ab"), "its header is not that of safetensors' layout"),
        (header({"__metadata__": {"a": 1}, "x": ONE}, b"ab"), "its header is not that of safetensors' layout"),
        (header({"x": {**ONE, "dtype": "U7"}}, b"ab"), "leaf 'x' has elements of 'U7'"),
        (header({"x": {**ONE, "shape": [1] * 33}}, b"ab"), "has 33 dimensions, at most 32 are possible"),
        (header({"x": {**ONE, "shape": [1 << 60] * 8}}, b"ab"), "has bytes 0 to 2"),
        (header({"x": {**ONE, "shape": [3]}}, b"ab"), "needs 3"),
        (header({"x": {**ONE, "data_offsets": [1, 3]}}, b"abc"), "has bytes 1 to 3"),
        (header({"x": {**ONE, "data_offsets": [2, 0]}}, b"ab"), "has bytes 2 to 0"),
        (header({"x": ONE, "y": ONE}, b"ab"), "leaf 'y' has bytes 0 to 2"),
        (header({"x": ONE}, b"a"), "leaf 'x' ends at byte"),
        (header({"x": ONE}, b"abc"), "its leaves end at byte"),
        (header({"x": {**ONE, "dtype": "BOOL"}}, b"\x00\x02"), "a truth value that is neither 0 nor 1"),
    ],
)
def test_what_is_wrong_is_said(content: bytes, message: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^these") as raised:
        read(content)
    assert message in raised.value.message
    assert len(raised.value.message) < 1024


@settings(max_examples=examples(100))
@given(st.data())
def test_no_bytes_do_more_than_be_refused(data: st.DataObject) -> None:
    """Right bytes with any byte changed, cut off or added are at most refused."""
    content = bytearray(layout_bytes({"w": np.arange(6, dtype=np.float32), "v": np.ones(3, np.bool_)}))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] + data.draw(st.binary(max_size=4))
    try:
        found = read(bytes(content))
    except InvalidArgument:
        return
    assert sum(array.nbytes for array in found.values()) <= len(content)


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE])
def test_memory_that_may_still_change_is_refused(missing: int) -> None:
    fd = sealed_bytes(b"12345678", (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE) & ~missing)
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


def test_bounds_and_types_of_what_is_written() -> None:
    with pytest.raises(
        InvalidArgument, match=r"these would have 128 bytes, workers.max_parameter_byte_size allows 127"
    ):
        layout.laid_out([leaf_of("w", np.zeros(16, np.float32))], 127, "these")
    with pytest.raises(InvalidArgument, match="leaf 'w' has elements of object"):
        layout.laid_out([leaf_of("w", np.full(16, None))], 1 << 20, "these")


# ------------------------------------------------------------------------------------------------------ several threads


@pytest.fixture(params=[1, 4, 16])
def processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many processors this process seems to have; half of them, and at most eight, fill memory, or else one thread."""
    count: int = request.param
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))
    return count


def filled(parts: list[Part]) -> bytes:
    """Returns the content of memory that is filled with these parts and sealed."""
    fd = NewMemory(parts).sealed()
    try:
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
        return os.pread(fd, os.fstat(fd).st_size + 1, 0)
    finally:
        os.close(fd)


def noise(byte_size: int) -> bytes:
    return np.random.default_rng(byte_size).bytes(byte_size)


@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [SLICE],
        [SLICE + 1],
        [0, 3, 0, 4095, SLICE - 1, 0, 1, 0],
        [8, 56, 0, 3 * SLICE + 5, 2, 7 * SLICE, 1],
        [SLICE // 3] * 40,
    ],
)
def test_threads_fill_memory_with_all_parts_in_their_order(processors: int, sizes: list[int]) -> None:
    parts = [noise(size) for size in sizes]
    assert filled([part_of(part) for part in parts]) == b"".join(parts)


def test_no_more_threads_than_processors_allow_and_none_is_left(processors: int) -> None:
    seen: set[int] = set()
    before = set(threading.enumerate())

    def copy(at: int, target: Array) -> None:
        seen.add(threading.get_ident())
        target[:] = 7

    assert filled([Part(32 * SLICE, copy)]) == b"\7" * (32 * SLICE)
    assert 1 <= len(seen) <= max(1, min(8, processors // 2))
    if processors < 6:
        assert seen == {threading.get_ident()}
    assert set(threading.enumerate()) == before


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("failing", [0, 5 * SLICE, 31 * SLICE])
def test_an_error_in_one_slice_is_the_error_of_all(processors: int, failing: int) -> None:
    before = opened(), set(threading.enumerate())

    def copy(at: int, target: Array) -> None:
        if at == failing:
            raise InvalidArgument(f"not from {at}")

    with pytest.raises(InvalidArgument, match=f"not from {failing}"):
        NewMemory([Part(32 * SLICE, copy)])
    assert (opened(), set(threading.enumerate())) == before


def test_memory_that_ends_is_an_error_and_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without pages behind its end fails as one does for whose pages the host has no memory."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    before = opened()

    def copy(at: int, target: Array) -> None:
        os.truncate(next(int(each) for each in os.listdir("/proc/self/fd") if _is_new_memory(each)), SLICE)

    with pytest.raises(Unavailable, match=rf"the host has no {4 * SLICE} bytes of memory for parameters"):
        NewMemory([Part(4 * SLICE, copy)])
    assert opened() == before


def test_memory_that_ends_while_one_thread_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    before, pwrite = opened(), os.pwrite

    def writing(fd: int, content: memoryview, at: int) -> int:
        if at >= SLICE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, content, at)

    monkeypatch.setattr(os, "pwrite", writing)
    with pytest.raises(Unavailable, match=rf"the host has no {4 * SLICE} bytes of memory for parameters"):
        NewMemory([part_of(noise(4 * SLICE))])
    assert opened() == before


def _is_new_memory(fd: str) -> bool:
    try:
        return "tensord-parameters" in os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return False


def test_a_kernel_that_cannot_populate_is_none_the_worse(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_populate", lambda content: errno.EINVAL)
    content = noise(5 * SLICE + 3)
    assert filled([part_of(content)]) == content


def test_memory_that_the_process_may_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=r"the host has no 9223372036854771712 bytes of memory for parameters"):
        NewMemory([Part((1 << 63) - 4096, _never)])


def _never(at: int, target: Array) -> None:
    raise AssertionError("nothing is copied where there is no memory")


def test_leaves_of_any_order_and_size(processors: int) -> None:
    """Also those that do not lie in one piece, and a header that needs spaces."""
    leaves: dict[str, Array] = {
        "turned": np.arange(3 * SLICE // 4, dtype=np.int32).reshape(-1, 4).T,
        "odd": np.arange(5, dtype=np.int8),
        "large": np.frombuffer(noise(2 * SLICE + 4), np.float32),
        **{f"leaf{number}": np.full(number, number, np.float16) for number in range(300)},
    }
    fd = sealed(leaves)
    try:
        found = layout.read(SealedMemory(fd).view, "these")
    finally:
        os.close(fd)
    assert found.keys() == leaves.keys()
    for name, array in leaves.items():
        np.testing.assert_array_equal(found[name], array)
