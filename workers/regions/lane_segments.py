"""Holds the segments that a client announces on its lane. Only requests on this lane can use them.

    the client sends SegmentOpened 3 with a memfd  ──▶ the worker maps the memory as the region "@3" of this lane
    a request on this lane names the region "@3"   ──▶ the request uses the segment 3 of this lane
    the client sends SegmentClosed 3               ──▶ the worker unmaps the segment 3 when the last lease on it has ended

The end of the lane closes its segments. Requests on this lane cannot use a registered region whose name begins with "@".
"""

from __future__ import annotations

import os

from tensord.shm import descriptors, guard
from tensord.shm.arena import ArenaMap
from tensord.shm.control_records import LaneLimits
from tensord.shm.errors import InvalidArgument, ServingError, Unavailable
from tensord.shm.messages import Slice
from tensord.shm.regions import Region
from tensord.workers.regions.region_table import AnyRegion, RegionTable, check_intact

_MARK = "@"
#: Segments whose refusal is remembered.
_MAX_REFUSED = 256


class LaneSegments(ArenaMap):
    """The segments of arenas that a client has announced on its lane."""

    def __init__(self, table: RegionTable, limits: LaneLimits) -> None:
        super().__init__()
        self.limits = limits
        #: Bytes of all that are open.
        self.byte_size = 0
        self._table = table
        self._regions: dict[str, Region] = {}
        #: The reasons why segments were refused, by the name of the region.
        self._reasons: dict[str, str] = {}

    def open(self, segment: int, byte_size: int, fd: int) -> None:
        """Maps the memory ``fd`` as segment number ``segment`` of the client's lane. Takes over the descriptor ``fd``.

        Raises InvalidArgument: ``segment`` is negative or in use, ``byte_size`` is not positive, ``fd`` is no memfd with a
        sealed size of ``byte_size`` bytes and without huge pages, or too many segments of the lane were refused.
        Raises Unavailable: the lane has too many segments or bytes, or the memory cannot be mapped. Later requests that name the
        segment fail with the same error.
        """
        name, limits = f"{_MARK}{segment}", self.limits
        try:
            if segment < 0 or byte_size <= 0 or name in self._regions:
                raise InvalidArgument(f"segment {segment} of {byte_size} bytes is no segment, or is open already")
            if len(self._regions) >= limits.segments:
                raise Unavailable(
                    f"segment {segment} was refused: {len(self._regions)} are open on this lane, at most {limits.segments} may be"
                )
            if self.byte_size + byte_size > limits.segment_byte_size:
                raise Unavailable(
                    f"segment {segment} was refused: with it this lane's segments have {self.byte_size + byte_size} bytes, at "
                    f"most {limits.segment_byte_size} are allowed"
                )
        except ServingError as error:
            os.close(fd)
            if isinstance(error, Unavailable):
                self._note(name, error.message)
            raise
        try:
            self._regions[name] = self._table.open_private(name, fd, byte_size)
        except Unavailable as error:
            self._note(name, f"segment {segment} was refused: {error.message}")
            raise
        self._reasons.pop(name, None)
        self.byte_size += byte_size

    def refuse(self, segment: int) -> None:
        """Makes requests that name a segment fail with Unavailable, because the segment's descriptor was lost."""
        name = f"{_MARK}{segment}"
        if name not in self._reasons:
            self._note(
                name,
                f"segment {segment} was refused: a process of the server had as many files open as it may, {descriptors.limit()}",
            )

    def _note(self, name: str, reason: str) -> None:
        if len(self._reasons) >= _MAX_REFUSED:
            raise InvalidArgument(f"{len(self._reasons)} segments were refused, at most {_MAX_REFUSED} may be")
        self._reasons[name] = reason

    def close_segment(self, segment: int) -> None:
        """Closes a segment, so that no new request uses it. Earlier requests keep it mapped. Ignores an unknown number."""
        name = f"{_MARK}{segment}"
        self._reasons.pop(name, None)
        region = self._regions.pop(name, None)
        if region is not None:
            self._leave(region)

    def find(self, name: str) -> AnyRegion:
        """Returns the region with this name. A name that begins with "@" stands for a segment of this lane.

        Raises Unavailable: the worker refused the segment when the client announced it. Raises InvalidArgument: no segment with
        this name is open, or an earlier access to the region's memory failed, or this worker cannot open the region.
        Raises NotFound: no region has this name. Raises DeviceLost: the GPU failed.
        """
        if not name.startswith(_MARK):
            return self._table.find(name)
        region = self._regions.get(name)
        if region is None:
            if name in self._reasons:
                raise Unavailable(self._reasons[name])
            raise InvalidArgument(f"segment '{name[:32]}' is not open on this lane")
        if guard.any_faults():
            check_intact((region,))
        return region

    def view(self, place: Slice) -> memoryview:
        """Always raises InvalidArgument, because a client may not name a place in an arena. It names a region instead."""
        raise InvalidArgument(
            f"{place.byte_size} bytes are said to lie in an arena; a client's tensors are in its records or in regions"
        )

    def close(self) -> None:
        for region in self._regions.values():
            self._leave(region)
        self._regions.clear()

    def _leave(self, region: Region) -> None:
        self.byte_size -= region.byte_size
        self._table.leave_private(region)

    def __repr__(self) -> str:
        return f"<LaneSegments {sorted(self._regions)}, {self.byte_size} bytes>"
