"""Where outputs go: into the record, into one lease, into the client's region; all or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import posix_ipc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.model_config import parse_pbtxt
from shm.arena import Arena, Lease
from shm.arrays import array
from shm.errors import Internal, InvalidArgument
from shm.messages import Completion, Inline, RegionSlice, RequestedOutput, Slice
from shm.regions import Region
from tests.workers.requests import request_of
from workers.answers import complete
from workers.models.signature import Signature, signature
from workers.request import Request

SIGNATURE: Signature = signature(
    parse_pbtxt(
        """name: "m"
        output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
        output { name: "z" data_type: TYPE_STRING dims: [ -1 ] }""",
        "m",
    ),
    {},
    {},
)


@dataclass
class ALane:
    """What ``complete`` uses of a submitter."""

    arena: Arena

    @property
    def lane(self) -> ALane:
        return self

    def loan(self, byte_size: int) -> Lease | None:
        return self.arena.loan(byte_size)


@pytest.fixture
def lane() -> Iterator[ALane]:
    arena = Arena(1 << 16, 1 << 16, 0)
    yield ALane(arena)
    arena.close()


def answer(
    lane: ALane, result: dict[str, Any], *outputs: RequestedOutput, regions: list[Region] | None = None
) -> Completion | None:
    request: Request = request_of({}, outputs={output.name: output for output in outputs}, submitter=lane)
    request.regions = regions or []
    return complete(request, result, SIGNATURE, 5, 64)


def read(lane: ALane, completion: Completion) -> dict[str, list[Any]]:
    found = {}
    for tensor in completion.outputs:
        place = tensor.place
        assert not isinstance(place, RegionSlice)
        if isinstance(place, Slice):
            content = lane.arena.segment(place.segment).view[place.offset : place.offset + place.byte_size]
            assert place.offset % 64 == 0
        else:
            content = memoryview(place.content)
        found[tensor.name] = array(content, tensor.datatype, tensor.shape).tolist()
    return found


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 40), max_size=4), st.lists(st.binary(max_size=30), max_size=9))
def test_whatever_the_sizes_the_bytes_arrive(sizes: list[int], words: list[bytes]) -> None:
    arena = Arena(1 << 16, 1 << 16, 0)
    lane = ALane(arena)
    result: dict[str, Any] = {f"y{i}": np.arange(n, dtype=np.float32) for i, n in enumerate(sizes)}
    values = np.empty(len(words), np.object_)
    values[:] = words
    result["z"] = values
    completion = answer(lane, result)
    assert completion is not None
    assert read(lane, completion) == {name: value.tolist() for name, value in result.items()}
    assert (completion.lease is not None) == any(isinstance(t.place, Slice) for t in completion.outputs)
    assert arena.statistics()["leases"] == (completion.lease is not None)
    arena.close()


def test_small_and_large(lane: ALane) -> None:
    completion = answer(lane, {"y": np.zeros(16, np.float32), "z": np.array([b"x" * 61], np.object_)})
    assert completion is not None
    assert [type(tensor.place) for tensor in completion.outputs] == [Inline, Slice]
    assert completion.version == 5


def test_a_view_that_is_not_contiguous(lane: ALane) -> None:
    matrix = np.arange(600, dtype=np.float32).reshape(20, 30)
    completion = answer(lane, {"y": matrix[:, :17], "b": matrix.T.astype(ml_dtypes.bfloat16)})
    assert completion is not None
    assert read(lane, completion)["y"] == matrix[:, :17].tolist()


def test_only_what_is_asked_for_in_the_model_s_order(lane: ALane) -> None:
    result = {"y": np.zeros(1, np.float32), "z": np.array([b"a"], np.object_)}
    completion = answer(lane, result, RequestedOutput("z"), RequestedOutput("y"))
    assert completion is not None
    assert [tensor.name for tensor in completion.outputs] == ["y", "z"]
    completion = answer(lane, result, RequestedOutput("z"))
    assert completion is not None
    assert [tensor.name for tensor in completion.outputs] == ["z"]


def test_full(lane: ALane) -> None:
    y = np.zeros(4000, np.float32)
    held = [answer(lane, {"y": y}) for _ in range(4)]
    assert held[-1] is not None
    assert answer(lane, {"y": y}) is None
    with pytest.raises(InvalidArgument, match="cannot fit"):
        answer(lane, {"y": np.zeros(40_000, np.float32)})


def test_classification(lane: ALane) -> None:
    completion = answer(lane, {"y": np.array([1, 3, 2], np.float32)}, RequestedOutput("y", classification=2))
    assert completion is not None
    (tensor,) = completion.outputs
    assert (tensor.datatype, tensor.shape) == ("BYTES", (2,))
    assert read(lane, completion)["y"] == [b"3.000000:1", b"2.000000:2"]


def test_regions_are_written_all_or_not_at_all(lane: ALane) -> None:
    name = f"/tensord-test-answers-{os.getpid()}"
    made = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=4096)
    region = Region("r", name, made.fd, 0, 4096)
    try:
        result = {"y": np.arange(4, dtype=np.float32), "z": np.array([b"abc"], np.object_)}
        fits, short = RegionSlice("r", 3, 16), RegionSlice("r", 100, 6)
        with pytest.raises(Internal, match=r"'z' \(6 bytes\) should be at least 7 bytes"):
            answer(lane, result, RequestedOutput("y", fits), RequestedOutput("z", short), regions=[region])
        assert bytes(region.view(0, 4096)) == bytes(4096)
        roomy = RegionSlice("r", 100, 50)
        completion = answer(lane, result, RequestedOutput("y", fits), RequestedOutput("z", roomy), regions=[region])
        assert completion is not None
        assert [tensor.place for tensor in completion.outputs] == [fits, roomy]
        assert completion.lease is None
        assert np.frombuffer(region.view(3, 16), np.float32).tolist() == [0, 1, 2, 3]
        assert bytes(region.view(100, 10)) == b"\x03\0\0\0abc\0\0\0"
    finally:
        region.close()
        posix_ipc.unlink_shared_memory(name)
