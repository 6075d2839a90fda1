"""The client regions this worker has mapped, by name. The supervisor owns the names; here are the mappings and their leases.

registered ──unregister──▶ leaving: no new request finds it ──last lease ends──▶ unmapped, and the waiting call is answered
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shm.errors import AlreadyExists, InvalidArgument, NotFound
from shm.messages import RegisterSystemRegion
from shm.regions import Region, open_object


class RegionTable:
    """One per worker; belongs to its loop."""

    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}
        #: Regions whose requests are not done, with whom to tell.
        self._leaving: list[tuple[list[Region], Callable[[], None]]] = []

    def register(self, record: RegisterSystemRegion, fd: int | None) -> Region:
        """Maps a region: of the descriptor another worker opened, or of the object with that key.

        Raises: AlreadyExists: the name is taken.  InvalidArgument, Internal: as ``shm.regions`` says.
        """
        if record.name in self._regions:
            raise AlreadyExists(f"shared memory region '{record.name}' already in manager")
        if fd is None:
            fd = open_object(record.name, record.key)
        region = Region(record.name, record.key, fd, record.offset, record.byte_size)
        self._regions[record.name] = region
        return region

    def find(self, name: str) -> Region:
        """Raises NotFound; InvalidArgument: it lost its memory during an earlier request."""
        try:
            region = self._regions[name]
        except KeyError:
            raise NotFound(f"Unable to find shared memory region: '{name}'") from None
        check_intact((region,))
        return region

    def unregister(self, name: str, done: Callable[[], None]) -> None:
        """Forgets a region, or all with "", at once; unmaps it, then calls ``done``, when no request uses it any more."""
        names = [name] if name else list(self._regions)
        leaving = [self._regions.pop(name) for name in names if name in self._regions]
        self._leaving.append((leaving, done))
        self.settle()

    def settle(self) -> None:
        """Unmaps what is no longer used. Cheap when nothing is leaving; called once a turn."""
        if not self._leaving:
            return
        waiting = []
        for regions, done in self._leaving:
            if any(region.leases for region in regions):
                waiting.append((regions, done))
                continue
            for region in regions:
                region.close()
            done()
        self._leaving = waiting

    def close(self) -> None:
        """Unmaps everything."""
        for region in self._regions.values():
            region.close()
        self._regions.clear()

    def __repr__(self) -> str:
        return f"<RegionTable {sorted(self._regions)}, {len(self._leaving)} calls waiting>"


def check_intact(regions: Iterable[Region]) -> None:
    """Raises InvalidArgument: pages of a region were missing when they were touched, so zeros stand there since."""
    for region in regions:
        if region.faults:
            raise InvalidArgument(
                f"shared memory region '{region.name}' lost its memory: its object was truncated, or the host had none left for "
                "it; unregister the region and register it again"
            )
