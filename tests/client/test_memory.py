"""Memory that a client shares with workers: where arrays lie, and what becomes of their room."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tensord_client.errors import InvalidArgument, Unavailable
from tensord_client.memory import Memory


@pytest.fixture
def memory() -> Iterator[Memory]:
    with contextlib.closing(Memory()) as memory:
        yield memory


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(5, "f4"), ((), "i8"), ((0, 3), "u1"), ((3, 5, 7), "f2"), ([2, 2], ">i4"), ((1 << 20), np.bool_), (9, "S5")],
)
def test_arrays_are_what_numpy_makes(memory: Memory, shape: object, dtype: object) -> None:
    made, expected = memory.empty(shape, dtype), np.empty(shape, dtype)  # type: ignore[arg-type, call-overload]
    assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
    assert made.flags.c_contiguous
    assert made.flags.writeable
    assert made.__array_interface__["data"][0] % 64 == 0


def test_bfloat16(memory: Memory) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    made = memory.empty((2, 3), ml_dtypes.bfloat16)
    made[:] = 1.5
    assert made.dtype == ml_dtypes.bfloat16
    assert memory.locate(made) == (0, 0, 12)


def test_segments_cannot_change_their_size(memory: Memory) -> None:
    memory.empty(1, "u1")
    (segment,) = memory.segments.values()
    seals = fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(segment.fd, 0)


def test_an_array_is_found_where_it_lies() -> None:
    memory, other = Memory(), Memory()
    array = memory.empty((4, 6), "f4")
    segment, offset, size = memory.locate(array)  # type: ignore[misc]
    assert size == 96
    assert memory.locate(array[1:3]) == (segment, offset + 24, 48)
    assert memory.locate(array.reshape(-1)[5:]) == (segment, offset + 20, 76)
    assert memory.locate(array[:, 1:]) is None
    assert memory.locate(array.T) is None
    assert memory.locate(array.copy()) is None
    assert memory.locate(other.empty(4, "f4")) is None
    memory.close()
    other.close()


def test_room_comes_back_with_the_last_view(memory: Memory) -> None:
    memory.limit(1, 256 << 10)
    array = memory.empty(200 << 10, "u1")
    view = array[100:200].view("i4")
    del array
    with pytest.raises(
        Unavailable, match="204800 bytes does not fit: 1 segments of 262144 bytes are used, at most 1 of 262144"
    ):
        memory.empty(200 << 10, "u1")
    view[:] = 3
    del view
    memory.empty(200 << 10, "u1")


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    memory = Memory()
    memory.limit(4, 1 << 20)
    with pytest.raises(InvalidArgument, match="2097152 bytes, at most 1048576"):
        memory.empty(2 << 20, "u1")
    memory.close()
    with pytest.raises(Unavailable):
        memory.empty(1, "u1")


def test_what_nobody_uses_goes_back_to_the_host(memory: Memory) -> None:
    """A few free segments are kept; the others are closed, which lanes notice, so that they tell the workers."""
    before = memory.closures[0]
    arrays = [memory.empty(48 << 20, "u1") for _ in range(4)]
    assert memory.byte_size >= 192 << 20
    del arrays
    memory._collect()
    assert memory.byte_size <= 64 << 20
    assert memory.closures[0] is not before


def test_arrays_of_many_threads_never_overlap(memory: Memory) -> None:
    """Each array is filled with its own number, and still has it when it goes."""
    wrong: list[object] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        held: list[tuple[int, np.ndarray]] = []
        for number in range(400):
            array = memory.empty(rng.randrange(1, 20000), "i4")
            array[:] = seed * 1000 + number
            held.append((seed * 1000 + number, array))
            if len(held) > 8:
                expected, gone = held.pop(rng.randrange(len(held)))
                if not (gone == expected).all():
                    wrong.append(expected)
        wrong.extend(expected for expected, array in held if not (array == expected).all())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    gc.collect()
    memory._collect()
    assert all(segment.is_unused for segment in memory.segments.values())
