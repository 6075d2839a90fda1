"""Tests where outputs go: into the record, into one lease, into the client's region; all or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import posix_ipc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.config.model_config import parse_pbtxt
from tensord.shm.arena import Arena
from tensord.shm.arrays import Array, array
from tensord.shm.cuda_regions import CudaRegion
from tensord.shm.errors import Internal, InvalidArgument
from tensord.shm.messages import AnswerRecord, PreparedAnswer, RegionSlice, RequestedOutput, Slice
from tensord.shm.prepared import Numbers
from tensord.shm.regions import Region
from tensord.workers.dispatch.answers import complete, complete_planned, plan_answer
from tensord.workers.programs.grouped_calls import Packing, layout_of_rows
from tensord.workers.requests.preparation import AnswerPlan
from tensord.workers.requests.request import Request
from tensord.workers.tensors.output_layout import BatchOutputs, layout_of, uncut
from tensord.workers.tensors.signature import Signature, signature
from tests.generated import examples
from tests.records import WholeAnswer, whole_answer
from tests.workers.made_requests import ALane, request_of

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


@pytest.fixture
def lane() -> Iterator[ALane]:
    arena = Arena(1 << 16, 1 << 16, 0)
    yield ALane(arena)
    arena.close()


def answer(
    lane: ALane, result: dict[str, Any], *outputs: RequestedOutput, regions: list[Region] | None = None
) -> WholeAnswer | None:
    version = SimpleNamespace(version=5, signature=SIGNATURE)
    request: Request = request_of({}, 1, None, {output.name: output for output in outputs}, version, lane)
    request.regions = regions or []
    made = complete(request, result, 64)
    return None if made is None else whole_of(made)


def whole_of(made: AnswerRecord) -> WholeAnswer:
    assert isinstance(made.prepared, PreparedAnswer)
    return whole_answer(made.prepared, made)


def read(lane: ALane, completion: WholeAnswer) -> dict[str, list[Any]]:
    found = {}
    for tensor in completion.outputs:
        place = tensor.place
        assert not isinstance(place, RegionSlice)
        if isinstance(place, Slice):
            content = lane.arena.segments[place.segment].view[place.offset : place.offset + place.byte_size]
            assert place.offset % 64 == 0
        else:
            content = memoryview(place)
        found[tensor.name] = array(content, tensor.datatype, tensor.shape).tolist()
    return found


@settings(deadline=None, max_examples=examples(50))
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
    assert [type(tensor.place) for tensor in completion.outputs] == [bytes, Slice]
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
    region = Region("r", made.fd, 0, 4096)
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


# -------------------------------------------------------------------------------------------------------------- planned

PLAIN: Signature = signature(
    parse_pbtxt(
        """name: "m" max_batch_size: 8
        output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
        output { name: "n" data_type: TYPE_INT8 dims: [ -1 ] }
        output { name: "z" data_type: TYPE_FP32 dims: [ 1 ] }""",
        "m",
    ),
    {},
    {},
)
VERSION = SimpleNamespace(version=5, signature=PLAIN)
SHM = 4096


@pytest.fixture(scope="module")
def region() -> Iterator[Region]:
    name = f"/tensord-test-planned-{os.getpid()}"
    made = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=SHM)
    region = Region("r", made.fd, 0, SHM)
    yield region
    region.close()
    posix_ipc.unlink_shared_memory(name)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[tuple[BatchOutputs, dict[str, Array]]], int, int]:
    """Draws two runs of one program whose outputs have the same layout, each with its outputs as arrays.

    Returns them with their number of rows, and the most rows that a request has.
    """
    rows, packed = draw(st.integers(1, 5)), draw(st.booleans())
    sizes = {"y": draw(st.integers(0, 3)), "n": draw(st.integers(0, 9)), "z": 1}
    names = draw(st.permutations(sorted(sizes)))[: draw(st.integers(1, 3))]
    dtypes: dict[str, Any] = {name: np.dtype(np.int8 if name == "n" else np.float32) for name in sizes}
    arrays = [
        {
            name: np.frombuffer(
                draw(st.binary(min_size=rows * sizes[name] * dtypes[name].itemsize, max_size=1024))[
                    : rows * sizes[name] * dtypes[name].itemsize
                ],
                dtypes[name],
            ).reshape(rows, sizes[name])
            for name in names
        }
        for _ in range(2)
    ]
    if packed:
        packing = Packing([(name, (sizes[name],), dtypes[name]) for name in names])
        layout = layout_of_rows(PLAIN, packing)
        stacks = [
            [
                np.concatenate([each[part.name] for part in packing.parts if part.row == number], axis=1)
                for number in range(len(packing.rows))
            ]
            for each in arrays
        ]
    else:
        layout, stacks = layout_of(PLAIN, arrays[0], True), [list(each.values()) for each in arrays]
    made = [uncut(layout, each) for each in stacks]
    # A request of a packed run has one row of it.
    return [(each, of) for each, of in zip(made, arrays, strict=True) if each is not None], rows, 1 if packed else rows


@settings(deadline=None, max_examples=examples(200))
@given(run=runs(), data=st.data())
def test_a_planned_answer_is_the_one_that_is_placed(
    region: Region, run: tuple[list[tuple[BatchOutputs, dict[str, Array]]], int, int], data: st.DataObject
) -> None:
    """For any rows of any later run: the same tensors, the same bytes in regions, the same count of what was copied."""
    made, total, most = run
    rows = data.draw(st.integers(1, most))
    held = [name for name, *_ in made[0][0].layout.outputs]
    wanted = [
        RequestedOutput(name, data.draw(st.sampled_from([None, RegionSlice("r", 300 * at, 300)])))
        for at, name in enumerate(data.draw(st.lists(st.sampled_from(held), unique=True)))
    ]

    def request() -> Request:
        fresh = request_of(
            {}, rows, version=VERSION, outputs={output.name: output for output in wanted}, request_id=data.draw(IDS)
        )
        fresh.regions = [region] if any(output.region is not None for output in wanted) else []
        return fresh

    plan = planned(request(), made[0][0])
    assert plan.numbered is not None
    for run_, arrays in made:
        row = data.draw(st.integers(0, total - rows))
        whole, short = request(), request()
        region.view(0, SHM)[:] = bytes(SHM)
        placed = complete(whole, {name: array[row : row + rows] for name, array in arrays.items()}, 1 << 20)
        assert placed is not None
        expected = whole_of(placed)
        written = bytes(region.view(0, SHM))
        region.view(0, SHM)[:] = bytes(SHM)
        formed = complete_planned(plan, short, run_, row)
        assert formed is not None
        assert formed.prepared == plan.numbered.number
        assert formed.request_id == short.request_id
        given_ = whole_answer(plan.numbered.prepared, formed)
        assert (given_.version, given_.outputs, given_.lease) == (expected.version, expected.outputs, None)
        assert bytes(region.view(0, SHM)) == written
        assert short.copied_byte_size == whole.copied_byte_size


def planned(request: Request, made: BatchOutputs) -> AnswerPlan:
    """Plans the answer to such a request from outputs with this layout, and gives its prepared part a number."""
    plan = plan_answer(request, made.layout, 1 << 20)
    assert plan is not None
    assert isinstance(plan.said, PreparedAnswer)
    return plan.number(Numbers[PreparedAnswer]().number(plan.said))


IDS = st.integers(1, 99)


def planned_into(place: RegionSlice, *regions: Any) -> tuple[Request, AnswerRecord | None]:
    """Plans an answer whose output goes to that place, for a request that uses those regions."""
    y = np.arange(4, dtype=np.float32).reshape(1, 4)
    made = uncut(layout_of(PLAIN, {"y": y}, True), [y])
    assert made is not None
    request = request_of({}, 1, version=VERSION, outputs={"y": RequestedOutput("y", place)})
    request.regions = list(regions)
    return request, complete_planned(planned(request, made), request, made, 0)


def test_a_region_that_is_a_gpu_s_now_is_not_written_by_a_plan(region: Region) -> None:
    """It was registered again meanwhile, under the same name, or is that of an input."""
    gpu: Any = CudaRegion.__new__(CudaRegion)  # is asked for nothing but what it is
    gpu.name = "r"
    for regions in ((gpu,), (region, gpu), (gpu, region)):
        region.view(0, SHM)[:] = bytes(SHM)
        request, formed = planned_into(RegionSlice("r", 0, 16), *regions)
        assert formed is None
        assert request.copied_byte_size == 0
        assert bytes(region.view(0, SHM)) == bytes(SHM)
    request, formed = planned_into(RegionSlice("r", 8, 16), region)
    assert formed == AnswerRecord(1, 0, ())
    assert np.frombuffer(region.view(8, 16), np.float32).tolist() == [0, 1, 2, 3]
    assert request.copied_byte_size == 16


def test_a_planned_answer_does_not_leave_its_region(region: Region) -> None:
    """Validation would have refused the request; still nothing is written outside the region."""
    region.view(0, SHM)[:] = bytes(SHM)
    for place in (RegionSlice("r", SHM - 8, 16), RegionSlice("r", -8, 16)):
        with pytest.raises(InvalidArgument):
            planned_into(place, region)
    assert bytes(region.view(0, SHM)) == bytes(SHM)
