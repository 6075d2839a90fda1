"""Where the outputs of one answer go, found before anything is written.

requested region   the client's memory, after all of them are known to fit
small              inside the record
the rest           one lease in the lane's response arena, each tensor at a multiple of 64
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from tensord.shm.arena import ALIGNMENT, Lease, LeaseKey
from tensord.shm.arrays import address_of
from tensord.shm.cuda_regions import CudaRegion
from tensord.shm.errors import Internal
from tensord.shm.messages import RegionSlice, Slice
from tensord.shm.regions import Region, check_range
from tensord.shm.snapshot_region import SnapshotRegion
from tensord.workers.native import output_memory
from tensord.workers.native.output_memory import OutputMemory
from tensord.workers.regions.region_table import AnyRegion
from tensord.workers.requests.request import Request

#: All inline tensors of an answer together, in units of the limit for one: more would burst the datagram.
_INLINE_TENSORS = 8

#: A range of a file: which one, start, end.
_Range = tuple[tuple[int, int], int, int]


class Program(Protocol):
    """What the outputs come from."""

    @property
    def memory_of_outputs(self) -> OutputMemory | None:
        """What was learned of its allocations; None: nothing."""

    @property
    def plain(self) -> bool:
        """Whether all it does is compute."""


class Places:
    """Belongs to one request; made by ``find``."""

    __slots__ = ("addresses", "in_regions", "lease", "offered", "offsets", "sizes", "written")

    def __init__(
        self,
        sizes: Mapping[str, int],
        in_regions: dict[str, tuple[RegionSlice, AnyRegion]],
        offsets: dict[str, int],
        lease: Lease | None,
    ) -> None:
        #: Output -> bytes, what the places were found for.
        self.sizes = sizes
        self.in_regions = in_regions
        #: Output -> where in the lease it begins.
        self.offsets = offsets
        #: Until ``take_lease``.
        self.lease = lease
        #: Output -> the memory that the program may write to by itself.
        self.offered: dict[str, memoryview] = {}
        #: Output -> where that begins.
        self.addresses: dict[str, int] = {}
        #: The outputs it has written there.
        self.written: Collection[str] = ()

    @classmethod
    def find(cls, request: Request, sizes: Mapping[str, int], inline_byte_size: int) -> Places | None:
        """The places for outputs of those sizes. None: the response arena is full now.

        Raises: Internal: an output does not fit where its client wants it.  InvalidArgument: larger than the whole arena.
        """
        in_regions = _fit(request, sizes)
        inline_left = inline_byte_size * _INLINE_TENSORS
        offsets: dict[str, int] = {}
        needed = 0
        for name, size in sizes.items():
            if name in in_regions:
                continue
            if size <= inline_byte_size and size <= inline_left:
                inline_left -= size
            else:
                offsets[name] = needed
                needed += -(-size // ALIGNMENT) * ALIGNMENT
        lease = request.submitter.lane.loan(needed) if needed else None
        return None if needed and lease is None else cls(sizes, in_regions, offsets, lease)

    def in_arena(self, name: str) -> Slice | None:
        """Where in the response arena an output goes; None: into the record or a region."""
        at = self.offsets.get(name)
        if at is None or self.lease is None:
            return None
        return Slice(self.lease.place.segment, self.lease.place.offset + at, self.sizes[name])

    def memory(self, name: str) -> memoryview | None:
        """The memory of that output, as many bytes as it has; None: in the record, or not mapped.

        Raises InvalidArgument: not wholly inside its region.
        """
        at, size = self.offsets.get(name), self.sizes[name]
        if at is not None and self.lease is not None:
            return self.lease.view[at : at + size]
        place, region = self.in_regions.get(name, (None, None))
        return region.view(place.offset, size) if place is not None and type(region) is Region else None

    def reached(self) -> dict[str, memoryview | tuple[CudaRegion, int]]:
        """Outputs that a GPU can bring to their places by itself, from wherever it has them: memory, or region and offset.

        Raises: as ``memory``.
        """
        found: dict[str, memoryview | tuple[CudaRegion, int]] = {}
        for name, size in self.sizes.items():
            place, region = self.in_regions.get(name, (None, None))
            if not size:
                continue
            if place is not None and isinstance(region, CudaRegion):
                found[name] = region, place.offset
            elif (memory := self.memory(name)) is not None:
                found[name] = memory
        return found

    def offer(self, request: Request, program: Program) -> None:
        """Finds which outputs the program may write to their places by itself: large and aligned ones.

        A region's owner may write to it while the program runs and reads it again, so only a plain one is let there; nor may it
        write where it reads, or two outputs to the same bytes. Regions are the same memory where their files are.
        """
        outputs = program.memory_of_outputs
        if outputs is None:
            return
        used, offerable = self._ranges(request) if self.in_regions else [], outputs.offerable
        for name, size in self.sizes.items():
            memory = self.memory(name) if name in offerable and size >= output_memory.WORTH else None
            address = 0 if memory is None else address_of(memory)
            if memory is None or address % ALIGNMENT:
                continue
            if name in self.in_regions:
                place, region = self.in_regions[name]
                assert isinstance(region, Region)
                # One of those used is its own.
                if not program.plain or _overlapping(_range(region, place.offset, size), used) > 1:
                    continue
            self.offered[name] = memory
            self.addresses[name] = address

    def _ranges(self, request: Request) -> list[_Range]:
        """What of regions that are not a GPU's the request reads, and writes."""
        files = {region.name: region for region in request.regions if not isinstance(region, CudaRegion)}
        read = [tensor.region for tensor in request.prepared.inputs if tensor.region is not None]
        used = [(place.region, place.offset, place.byte_size) for place in read]
        used += [(place.region, place.offset, self.sizes[name]) for name, (place, _) in self.in_regions.items()]
        return [_range(files[name], offset, size) for name, offset, size in used if name in files]

    def take_lease(self) -> LeaseKey | None:
        """The key of the lease, which is the reader's to give back from now on."""
        lease, self.lease = self.lease, None
        return None if lease is None else lease.key

    def release(self) -> None:
        """Nothing was written to them, or what was is void. Idempotent."""
        if self.lease is not None:
            self.lease.release()

    def close(self) -> bool:
        """The answer is announced, or there is none. False: somebody keeps an output that the program wrote to its place."""
        self.release()
        free = [output_memory.given_up(self.addresses[name], memory) for name, memory in self.offered.items()]
        self.offered.clear()
        return all(free)

    def __repr__(self) -> str:
        return f"<Places of {len(self.sizes)} outputs: {len(self.in_regions)} in regions, {len(self.offsets)} in {self.lease}>"


def _range(region: Region | SnapshotRegion, offset: int, byte_size: int) -> _Range:
    start = region.offset + offset
    return region.file, start, start + byte_size


def _overlapping(one: _Range, others: list[_Range]) -> int:
    file, start, end = one
    return sum([file == other and start < other_end and begin < end for other, begin, other_end in others])


def _fit(request: Request, sizes: Mapping[str, int]) -> dict[str, tuple[RegionSlice, AnyRegion]]:
    """Where outputs go that a region was named for, all checked before any is written."""
    places: dict[str, tuple[RegionSlice, AnyRegion]] = {}
    for name, wanted in request.outputs.items():
        if wanted.region is None or name not in sizes:
            continue
        size = sizes[name]
        if size > wanted.region.byte_size:
            raise Internal(
                f"shared memory size specified with the request for output '{name}' ({wanted.region.byte_size} bytes) "
                f"should be at least {size} bytes to hold the results"
            )
        region = leased(request, wanted.region.region)
        if size:
            check_range(wanted.region.offset, size, region.byte_size, region.name)
        places[name] = (wanted.region, region)
    return places


def leased(request: Request, name: str) -> AnyRegion:
    """The very region that was checked: by now its name may be free, or stand for another one."""
    for region in request.regions:
        if region.name == name:
            return region
    raise AssertionError(f"no lease on region '{name}'")
