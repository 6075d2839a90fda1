"""Chooses where each output of an answer is written to, before anything is written.

requested region   the client's memory, after all of them are known to fit
small              inside the record
the rest           one lease in the lane's response arena, each tensor at a multiple of 64
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tensord.shm.arena import ALIGNMENT, Lease, LeaseKey
from tensord.shm.cuda_regions import CudaRegion
from tensord.shm.errors import Internal
from tensord.shm.messages import RegionSlice, Slice
from tensord.shm.regions import Region, check_range
from tensord.workers.regions.region_table import AnyRegion
from tensord.workers.requests.request import Request

#: All inline tensors of an answer together, in units of the limit for one: more would burst the datagram.
_INLINE_TENSORS = 8


@dataclass(slots=True, eq=False, repr=False)
class Places:
    """Where each output of a request is written: to the answer's record, the response arena, or a region."""

    #: Output -> bytes, what the places were found for.
    sizes: Mapping[str, int]
    in_regions: dict[str, tuple[RegionSlice, AnyRegion]]
    #: Output -> where in the lease it begins.
    offsets: dict[str, int]
    #: Until ``take_lease``.
    lease: Lease | None
    #: Output -> the memory that the program may write to by itself.
    offered: dict[str, memoryview] = field(default_factory=dict)
    #: Output -> where that begins.
    addresses: dict[str, int] = field(default_factory=dict)
    #: The outputs it has written there.
    written: Collection[str] = ()

    @classmethod
    def find(cls, request: Request, sizes: Mapping[str, int], inline_byte_size: int) -> Places | None:
        """Chooses places for outputs of these sizes in bytes, and reserves memory of the response arena if needed.

        None: the arena is full now.

        Args:
          inline_byte_size: the most bytes of an output that goes into the answer's record.
        Raises: Internal: an output does not fit into the region that the client wants it in.  InvalidArgument: the outputs are
        larger than the whole arena.
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
        """Returns an output's place in the response arena; None: it goes into the record or a region."""
        at = self.offsets.get(name)
        if at is None or self.lease is None:
            return None
        return Slice(self.lease.place.segment, self.lease.place.offset + at, self.sizes[name])

    def memory(self, name: str) -> memoryview | None:
        """Returns the memory that an output is written to.

        None: it goes into the record, GPU memory or a snapshot region (one that is not mapped).

        Raises InvalidArgument: the place is not wholly inside its region.
        """
        at, size = self.offsets.get(name), self.sizes[name]
        if at is not None and self.lease is not None:
            return self.lease.view[at : at + size]
        place, region = self.in_regions.get(name, (None, None))
        return region.view(place.offset, size) if place is not None and type(region) is Region else None

    def reached(self) -> dict[str, memoryview | tuple[CudaRegion, int]]:
        """Returns the places to which a GPU can copy outputs by itself, by output name: host memory, or CUDA region and offset.

        Raises InvalidArgument: a place is not wholly inside its region.
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

    def take_lease(self) -> LeaseKey | None:
        """Passes the lease on to the submitter, who gives it back later by its key.

        Returns the key, which the answer must name; None: there is no lease.
        """
        lease, self.lease = self.lease, None
        return None if lease is None else lease.key

    def release(self) -> None:
        """Frees the reserved memory of the response arena, because no output was written to it. Idempotent."""
        if self.lease is not None:
            self.lease.release()

    def __repr__(self) -> str:
        return f"<Places of {len(self.sizes)} outputs: {len(self.in_regions)} in regions, {len(self.offsets)} in {self.lease}>"


def _fit(request: Request, sizes: Mapping[str, int]) -> dict[str, tuple[RegionSlice, AnyRegion]]:
    """Returns, for each output that goes to a region, its place there and the region (by output name); checks that all fit.

    Raises: Internal: an output is larger than its place.  InvalidArgument: a place is not inside its region.
    """
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
        region = request.leased(wanted.region.region)
        if size:
            check_range(wanted.region.offset, size, region.byte_size, region.name)
        places[name] = (wanted.region, region)
    return places
