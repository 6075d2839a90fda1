"""Says where each output of a request is written. ``workers/dispatch/answers.py`` chooses this before anything is written.

If the client requested a region for an output, the output is written into this region. Otherwise, if the answer's record has
room for the output, the output is written into the record. All other outputs are written into the response arena of the lane
over which the request came. In the arena, each output begins at a multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tensord.shm.arena import Lease, LeaseKey
from tensord.shm.cuda_regions import CudaRegion
from tensord.shm.messages import RegionSlice, Slice
from tensord.shm.regions import Region
from tensord.workers.regions.region_table import AnyRegion


@dataclass(slots=True, eq=False, repr=False)
class Places:
    """Says where each output of a request is written: into the answer's record, the response arena, or a region."""

    #: Output -> bytes, what the places were found for.
    sizes: Mapping[str, int]
    in_regions: dict[str, tuple[RegionSlice, AnyRegion]]
    #: Output -> where in the lease it begins.
    offsets: dict[str, int]
    #: The lease of the region or block, until ``take_lease`` hands it over.
    lease: Lease | None
    #: Where the request's inputs are that lie in regions, if outputs go to regions: the region, offset and bytes of each.
    read: Sequence[tuple[AnyRegion, int, int]] = ()
    #: Output -> the memory that the program may write to by itself.
    offered: dict[str, memoryview] = field(default_factory=dict)
    #: Output -> where that begins.
    addresses: dict[str, int] = field(default_factory=dict)
    #: The outputs it has written there.
    written: Collection[str] = ()

    def in_arena(self, name: str) -> Slice | None:
        """Returns where the output ``name`` lies in the response arena; None: it goes into the answer's record or a region."""
        at = self.offsets.get(name)
        if at is None or self.lease is None:
            return None
        return Slice(self.lease.place.segment, self.lease.place.offset + at, self.sizes[name])

    def memory(self, name: str) -> memoryview | None:
        """Returns the host memory to which the output ``name`` is written.

        None: the output goes into the record of the answer, to a GPU, or to a region that is written by system calls.
        Raises InvalidArgument: the output would not lie wholly inside its region.
        """
        at, size = self.offsets.get(name), self.sizes[name]
        if at is not None and self.lease is not None:
            return self.lease.view[at : at + size]
        place, region = self.in_regions.get(name, (None, None))
        return region.view(place.offset, size) if place is not None and type(region) is Region else None

    def reached(self) -> dict[str, memoryview | tuple[CudaRegion, int]]:
        """Returns output name -> memory to which a GPU can write it: host memory, or a CUDA region and an offset in bytes."""
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
        """Hands the lease on the answer's memory over to the submitter. Returns the key with which the submitter ends the lease.

        Returns None if the answer has no lease, or if an earlier call has handed the lease over.
        """
        lease, self.lease = self.lease, None
        return None if lease is None else lease.key

    def release(self) -> None:
        """Ends the lease on the memory that the request's outputs are written to. A second call does nothing."""
        if self.lease is not None:
            self.lease.release()

    def __repr__(self) -> str:
        return f"<Places of {len(self.sizes)} outputs: {len(self.in_regions)} in regions, {len(self.offsets)} in {self.lease}>"
