"""Memory in safetensors' layout: read as if an enemy had written it, written as others read it."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.shm.arena import ALIGNMENT
from tensord.shm.arrays import Array, address_of
from tensord.shm.datatypes import MAX_ELEMENTS
from tensord.shm.errors import InvalidArgument
from tensord.workers.parameters import layout
from tensord.workers.parameters.layout import leaf_of
from tensord.workers.parameters.sealed_memory import PIECE, SealedMemory
from tests.generated import examples
from tests.workers.parameters.made_sets import layout_bytes, noise, sealed

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
    found = layout.read(memoryview(content), "these")
    layout.check_truth(found, "these")
    return found


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
        (
            header({"x": {**ONE, "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}}),
            f"leaf 'x': {1 << 124} elements given, at most {MAX_ELEMENTS} are allowed",
        ),
        (header({"__metadata__": dict.fromkeys(map(str, range(1001)), "")}), "metadata has 1001 entries, at most 1000"),
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


def test_bounds_and_types_of_what_is_written() -> None:
    with pytest.raises(
        InvalidArgument, match=r"these would have 128 bytes, workers.max_parameter_byte_size allows 127"
    ):
        layout.laid_out([leaf_of("w", np.zeros(16, np.float32))], 127, "these")
    with pytest.raises(InvalidArgument, match="leaf 'w' has elements of object"):
        layout.laid_out([leaf_of("w", np.full(16, None))], 1 << 20, "these")


def test_leaves_of_any_order_and_size() -> None:
    """Also those that do not lie in one piece, and a header that needs spaces."""
    leaves: dict[str, Array] = {
        "turned": np.arange(3 * PIECE // 4, dtype=np.int32).reshape(-1, 4).T,
        "odd": np.arange(5, dtype=np.int8),
        "large": np.frombuffer(noise(2 * PIECE + 4), np.float32),
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
