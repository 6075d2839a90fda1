"""Tests that the places of outputs are known before anything is written, and that a program which writes there harms nobody."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.config.model_config import parse_pbtxt
from tensord.shm.arena import ALIGNMENT, Arena, Lease
from tensord.shm.cuda_regions import CudaRegion
from tensord.shm.errors import Internal, InvalidArgument
from tensord.shm.messages import RegionSlice, RequestedOutput
from tensord.shm.regions import Region, SnapshotRegion, open_object
from tensord.workers.dispatch.answers import find_places
from tensord.workers.processor import output_memory
from tensord.workers.processor.output_memory import OutputMemory
from tensord.workers.processor.processor import HostExecutable, Processor
from tensord.workers.programs.executable import Wanted
from tensord.workers.programs.placement import CompiledProgram, Placement
from tensord.workers.regions.places import Places
from tensord.workers.regions.region_table import AnyRegion
from tensord.workers.requests.request import Request
from tensord.workers.tensors.signature import Signature, signature
from tests.generated import examples
from tests.records import Tensor, WholeRequest
from tests.workers.made_requests import request_of
from tests.workers.parameters.made_sets import loaded
from tests.workers.processor.test_output_memory import Lying
from tests.workers.worker_loop import DEVICE

MIB = 1 << 20
LARGE = 1 << 16
INLINE = 64
SIGNATURE: Signature = signature(
    parse_pbtxt(
        """name: "m"
        input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
        output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }""",
        "m",
    ),
    {},
    {},
)


class ALane:
    """The parts of a submitter that are used: its arena."""

    def __init__(self, byte_size: int = MIB) -> None:
        self.lane = self
        self.owner = None
        self.arena = Arena(byte_size, byte_size, 0)

    def loan(self, byte_size: int) -> Lease | None:
        return self.arena.loan(byte_size)

    def announce(self, segment: int) -> None:
        """Does nothing, because nobody maps it."""

    @property
    def leases(self) -> int:
        return self.arena.statistics()["leases"]


@pytest.fixture
def lane() -> Iterator[ALane]:
    made = ALane()
    yield made
    made.arena.close()


class Objects:
    """Two shared memory objects of a client: several regions are registered from the first, one from the second."""

    BYTE_SIZE = MIB

    def __init__(self) -> None:
        self.names = [f"tensord-test-places-{os.getpid()}-{uuid.uuid4().hex}" for _ in range(2)]
        for name in self.names:
            (Path("/dev/shm") / name).write_bytes(bytes(self.BYTE_SIZE))
        one, other = self.names
        #: With where each begins in which object.
        self.regions: dict[str, AnyRegion] = {
            "whole": self._region(Region, "whole", one, 0),
            "behind": self._region(Region, "behind", one, 8192),
            "snapshot": self._region(SnapshotRegion, "snapshot", one, 4096),
            "other": self._region(Region, "other", other, 0),
        }
        self.places = {"whole": (0, 0), "behind": (0, 8192), "snapshot": (0, 4096), "other": (1, 0)}

    def _region(self, kind: Any, name: str, key: str, offset: int) -> AnyRegion:
        region: AnyRegion = kind(name, open_object(name, key), offset, self.BYTE_SIZE - offset)
        return region

    def close(self) -> None:
        for region in self.regions.values():
            region.close()
        for name in self.names:
            (Path("/dev/shm") / name).unlink()


@pytest.fixture(scope="module")
def objects(leaves_nothing: None) -> Iterator[Objects]:
    made = Objects()
    yield made
    made.close()


def request_for(
    lane: ALane,
    outputs: Mapping[str, RegionSlice | None] | None = None,
    inputs: tuple[RegionSlice, ...] = (),
    regions: Mapping[str, AnyRegion] | None = None,
) -> Request:
    wanted = {name: RequestedOutput(name, region) for name, region in (outputs or {}).items()}
    request = request_of({}, outputs=wanted, submitter=lane)
    tensors = [Tensor(f"x{number}", "UINT8", (place.byte_size,), place) for number, place in enumerate(inputs)]
    request.prepared = WholeRequest(1, "m", 0, tuple(tensors)).prepared
    used = [*inputs, *[place for place in (outputs or {}).values() if place is not None]]
    request.regions = [(regions or {})[place.region] for place in used]
    return request


@pytest.fixture(scope="module")
def programs(leaves_nothing: None) -> dict[bool, Any]:
    """Returns two compiled programs: True -> a plain one, False -> one that is not."""
    assert DEVICE.platform == "cpu"
    x = jax.ShapeDtypeStruct((4,), np.float32)
    return {
        True: jax.jit(lambda _, inputs: {"y": inputs["x"] * 2}).lower({}, {"x": x}).compile(),
        False: jax.jit(lambda _, inputs: {"y": jax.numpy.sort(inputs["x"])}).lower({}, {"x": x}).compile(),
    }


def executable_of(program: Any, sizes: Mapping[str, int], unknown: tuple[str, ...] = ()) -> HostExecutable:
    """Returns an executable that knows how all its outputs are allocated, except those in ``unknown``."""
    made: Any = {name: Lying(size, 4096 * number) for number, (name, size) in enumerate(sizes.items(), 1)}
    allocations = [
        (made[name].nbytes, made[name].__array_interface__["data"][0]) for name in sizes if name not in unknown
    ]
    executable = HostExecutable(
        Wanted(1, ((4,),)), SIGNATURE, CompiledProgram(program, Placement(loaded({}))), Processor()
    )
    executable.memory_of_outputs = OutputMemory(made, allocations)
    return executable


def found(request: Request, sizes: Mapping[str, int]) -> Places:
    places = find_places(request, sizes, INLINE)
    assert places is not None
    return places


# ------------------------------------------------------------------------------------------------------------ to find


def test_small_ones_go_into_the_record_until_it_is_full(lane: ALane) -> None:
    sizes = {"empty": 0, "large": INLINE + 1} | {f"y{number}": INLINE // 8 for number in range(9)}
    places = found(request_for(lane), sizes)
    in_arena = {name: place for name in sizes if (place := places.in_arena(name)) is not None}
    assert list(in_arena) == ["large", "y8"]
    assert in_arena["y8"].offset - in_arena["large"].offset == 2 * ALIGNMENT
    assert in_arena["y8"].byte_size == INLINE // 8
    assert lane.leases == 1
    places.release()
    assert lane.leases == 0


@given(st.lists(st.integers(0, 3 * INLINE), max_size=20))
def test_whatever_the_sizes_no_two_places_meet(sizes: list[int]) -> None:
    lane = ALane(1 << 16)
    named = {f"y{number}": size for number, size in enumerate(sizes)}
    places = found(request_for(lane), named)
    used: dict[int, str] = {}
    inline = 0
    for name, size in named.items():
        place, memory = places.in_arena(name), places.memory(name)
        if place is None:
            assert memory is None
            inline += size
            continue
        assert memory is not None
        assert (place.offset % ALIGNMENT, len(memory), place.byte_size) == (0, size, size)
        memory[:] = bytes([7] * size)
        for at in range(place.offset, place.offset + size):
            assert used.setdefault(at, name) == name
        assert lane.arena.segments[place.segment].view[place.offset : place.offset + size] == memory
        memory[:] = bytes(size)
        memory.release()
    assert inline <= INLINE
    assert lane.leases == (len(used) > 0)
    places.release()
    assert lane.leases == 0
    lane.arena.close()


def test_a_full_arena(lane: ALane) -> None:
    held = [found(request_for(lane), {"y": MIB // 4}) for _ in range(4)]
    assert find_places(request_for(lane), {"y": MIB // 4}, INLINE) is None
    assert lane.leases == 4
    # What needs no room there finds its place all the same.
    assert found(request_for(lane), {"y": INLINE}).lease is None
    held.pop().release()
    held.append(found(request_for(lane), {"y": MIB // 4}))
    with pytest.raises(InvalidArgument, match="cannot fit"):
        find_places(request_for(lane), {"y": 2 * MIB}, INLINE)
    assert lane.leases == 4
    for places in held:
        places.release()
    assert lane.leases == 0


def test_all_regions_fit_or_nothing_is_taken(lane: ALane, objects: Objects) -> None:
    short = request_for(
        lane, {"a": None, "y": RegionSlice("whole", 0, 99), "z": RegionSlice("other", 0, 9)}, (), objects.regions
    )
    with pytest.raises(Internal, match=r"output 'z' \(9 bytes\) should be at least 10 bytes"):
        find_places(short, {"a": LARGE, "y": 99, "z": 10}, INLINE)
    for place in (RegionSlice("other", MIB - 9, 10), RegionSlice("other", -1, 10), RegionSlice("other", MIB, 10)):
        beyond = request_for(lane, {"a": None, "z": place}, (), objects.regions)
        with pytest.raises(InvalidArgument, match="'other'"):
            find_places(beyond, {"a": LARGE, "z": 10}, INLINE)
    assert lane.leases == 0


def test_what_a_region_takes_needs_no_other_room(lane: ALane, objects: Objects) -> None:
    wanted = {
        "y": RegionSlice("whole", 64, LARGE),
        "z": RegionSlice("snapshot", 0, LARGE),
        "empty": RegionSlice("other", MIB, 0),
    }
    request = request_for(lane, wanted, (), objects.regions)
    places = found(request, {"y": LARGE - 8, "z": LARGE, "empty": 0})
    assert places.lease is None
    memory = places.memory("y")
    assert memory is not None
    assert len(memory) == LARGE - 8
    memory[:4] = b"here"
    assert objects.regions["whole"].read(64, 4) == b"here"
    assert places.memory("z") is None
    memory[:4] = bytes(4)
    places.release()


def test_the_region_that_was_checked_and_no_other_of_its_name(lane: ALane, objects: Objects) -> None:
    """By the time a request runs its region may be unregistered, and another one have its name."""
    request = request_for(lane, {"y": RegionSlice("whole", 0, LARGE)}, (), objects.regions)
    table = {"whole": objects.regions["other"]}
    assert found(request, {"y": LARGE}).in_regions["y"][1] is objects.regions["whole"]
    assert table["whole"] not in request.regions


# ----------------------------------------------------------------------------------------------------------- to offer


def offered(request: Request, executable: HostExecutable, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns which outputs the program may write by itself: name -> bytes; all offers are withdrawn."""
    places = found(request, sizes)
    executable.offer(places)
    made = {name: len(memory) for name, memory in places.offered.items()}
    for name, address in places.addresses.items():
        assert address % ALIGNMENT == 0
        memory = places.memory(name)
        assert memory is not None
        assert address == output_memory.address_of(memory)
        del memory
    places.release()
    executable.settle(places)
    assert places.offered == {}
    assert not made or executable.memory_of_outputs is None or executable.memory_of_outputs.offerable
    return made


def test_what_was_not_learned_is_not_offered(lane: ALane, programs: dict[bool, Any]) -> None:
    both = {"y": LARGE, "z": LARGE}
    assert offered(request_for(lane), executable_of(programs[True], both, ("y",)), both) == {"z": LARGE}
    executable = executable_of(programs[True], {"y": LARGE})
    assert executable.memory_of_outputs is not None
    executable.memory_of_outputs.refuse()
    assert offered(request_for(lane), executable, {"y": LARGE}) == {}
    executable.memory_of_outputs = None
    assert offered(request_for(lane), executable, {"y": LARGE}) == {}


def test_a_gpu_s_region_is_not_written_by_a_program_of_the_cpu(
    lane: ALane, objects: Objects, programs: dict[bool, Any]
) -> None:
    gpu: Any = CudaRegion.__new__(CudaRegion)  # is asked for nothing but what it is
    gpu.name, gpu.byte_size = "gpu", MIB
    sizes = {"y": LARGE, "z": LARGE}
    wanted = {"y": RegionSlice("gpu", 0, LARGE), "z": RegionSlice("whole", 0, LARGE)}
    request = request_for(lane, wanted, (RegionSlice("gpu", 0, LARGE),), objects.regions | {"gpu": gpu})
    assert offered(request, executable_of(programs[True], sizes), sizes) == {"z": LARGE}


places_in_regions = st.builds(
    RegionSlice,
    st.sampled_from(["whole", "behind", "snapshot", "other"]),
    st.one_of(
        st.integers(0, 40).map(lambda n: 4096 * n),
        st.tuples(st.integers(0, 40), st.integers(-2, 2)).map(lambda at: max(0, 4096 * at[0] + 64 * at[1])),
        st.integers(0, 1 << 17),
    ),
    st.sampled_from([1, 4096, LARGE - 64, LARGE, LARGE + 4, 2 * LARGE, 3 * LARGE + 64]),
)


@pytest.fixture(scope="module")
def lane_of_all(leaves_nothing: None) -> Iterator[ALane]:
    made = ALane()
    yield made
    made.arena.close()


@settings(max_examples=examples(300))
@given(inputs=st.lists(places_in_regions, max_size=2), outputs=st.lists(places_in_regions, min_size=1, max_size=3))
def test_nothing_is_written_early_that_anything_else_of_the_request_uses(
    lane_of_all: ALane,
    objects: Objects,
    programs: dict[bool, Any],
    inputs: list[RegionSlice],
    outputs: list[RegionSlice],
) -> None:
    """However its tensors lie in regions, and these in objects: it is as if every byte were looked at."""
    users = np.zeros((2, Objects.BYTE_SIZE), np.uint8)

    def bytes_of(place: RegionSlice) -> np.ndarray[Any, Any]:
        file, start = objects.places[place.region]
        return users[file, start + place.offset : start + place.offset + place.byte_size]

    for place in (*inputs, *outputs):
        bytes_of(place)[:] += 1
    wanted = {f"y{number}": place for number, place in enumerate(outputs)}
    sizes = {name: place.byte_size for name, place in wanted.items()}
    expected = {
        name: place.byte_size
        for name, place in wanted.items()
        if place.region != "snapshot"
        and place.offset % ALIGNMENT == 0
        and place.byte_size >= LARGE
        and (bytes_of(place) == 1).all()
    }
    request = request_for(lane_of_all, wanted, tuple(inputs), objects.regions)
    assert offered(request, executable_of(programs[True], sizes), sizes) == expected


# ------------------------------------------------------------------------------------------------------------- to end
