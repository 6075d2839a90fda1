"""The client regions this worker has open, by name. The supervisor owns the names; here are the mappings and their leases.

registered ──unregister──▶ leaving: no new request finds it ──last lease ends──▶ closed, and the waiting call is answered
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable

from shm import guard
from shm.cuda_regions import CudaRegion, Driver, NoCuda
from shm.errors import AlreadyExists, InvalidArgument, NotFound
from shm.messages import RegisterCudaRegion, RegisterSystemRegion
from shm.regions import Region, check_sealed, open_object
from shm.snapshot_region import SnapshotRegion
from workers.pinned_memory import PinnedMemory
from workers.region_policy import RegionPolicy

_log = logging.getLogger(__name__)

AnyRegion = Region | SnapshotRegion | CudaRegion


class RegionTable:
    """One per worker; belongs to its loop."""

    def __init__(
        self, policy: RegionPolicy, driver: Driver, gpu: int | None, pinned: PinnedMemory | None = None
    ) -> None:
        """``gpu``: the worker's, as the daemon counts; None: a CPU worker, which opens regions of any GPU it can see."""
        self._pinned = pinned
        self._policy = policy
        self._driver = driver
        self._gpu = gpu
        self._regions: dict[str, AnyRegion] = {}
        #: Regions whose requests are not done, with whom to tell.
        self._leaving: list[tuple[list[AnyRegion], Callable[[], None]]] = []
        #: How often anything was added or removed.
        self.changes = 0

    def register(self, record: RegisterSystemRegion, fd: int | None) -> tuple[Region | SnapshotRegion, str]:
        """Takes up a region: of a descriptor that was checked by another worker or is sealed, or of the object with that key.

        Returns: the region and its access, "guarded", "snapshot" or "sealed".
        Raises: AlreadyExists: the name is taken.  InvalidArgument, Internal: as ``shm.regions`` and the policy say.
        """
        access = record.access
        try:
            self._check_free(record.name)
            if fd is None:
                fd = open_object(record.name, record.key)
                found = os.fstat(fd)
                self._policy.check(record, found)
                access = self._policy.access(record, found)
            elif access == "sealed":
                check_sealed(record.name, fd)
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise
        kind = SnapshotRegion if access == "snapshot" else Region
        region = kind(record.name, record.key, fd, record.offset, record.byte_size)
        if self._pinned is not None and isinstance(region, Region) and region.backed:
            self._pinned.pin(region.view(0, region.byte_size), "a region")
        self._regions[record.name] = region
        self.changes += 1
        return region, access

    def register_cuda(self, record: RegisterCudaRegion) -> None:
        """Opens a client's GPU memory.

        Raises: AlreadyExists: the name is taken.  InvalidArgument: no such GPU here, or the handle does not open.  DeviceLost.
        """
        self._check_free(record.name)
        if self._gpu is not None and record.device_id != self._gpu:
            raise InvalidArgument(
                f"failed to register shared memory region '{record.name}': it is on GPU {record.device_id}, "
                f"this worker has GPU {self._gpu}"
            )
        try:
            # A GPU worker sees one device only.
            context = self._driver.context(record.device_id if self._gpu is None else 0)
        except NoCuda as error:
            _log.warning("CUDA region '%s' is refused: %s", record.name, error)
            # What Triton answers on a host without a GPU, whatever is wrong.
            raise InvalidArgument("failed to register shared memory region: invalid args") from error
        self._regions[record.name] = CudaRegion(record.name, context, record.raw_handle, record.byte_size)
        self.changes += 1

    def _check_free(self, name: str) -> None:
        if name in self._regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")

    def find(self, name: str) -> AnyRegion:
        """Raises NotFound; InvalidArgument: it lost its memory during an earlier request."""
        try:
            region = self._regions[name]
        except KeyError:
            raise NotFound(f"Unable to find shared memory region: '{name}'") from None
        if guard.any_faults():
            check_intact((region,))
        return region

    def unregister(self, kind: str, name: str, done: Callable[[], None]) -> None:
        """Forgets a region, or all of a kind with "", at once; then closes it and calls ``done`` when no request uses it."""
        wanted = CudaRegion if kind == "cuda" else Region | SnapshotRegion
        names = [name] if name else list(self._regions)
        leaving = [self._regions.pop(name) for name in names if isinstance(self._regions.get(name), wanted)]
        self._leaving.append((leaving, done))
        self.changes += 1
        self.settle()

    def uses(self, name: str) -> dict[str, int]:
        """Region, the named or every one (""), with the number of tensors of requests in it."""
        return {key: region.leases for key, region in self._regions.items() if name in ("", key)}

    def leases(self) -> dict[str, int]:
        """Kind of region -> tensors of requests that are in such regions now, also in those that are leaving."""
        found = {"system": 0, "cuda": 0}
        leaving = (region for regions, _ in self._leaving for region in regions)
        for region in (*self._regions.values(), *leaving):
            found["cuda" if isinstance(region, CudaRegion) else "system"] += region.leases
        return found

    def settle(self) -> None:
        """Closes what is no longer used. Cheap when nothing is leaving; called once a turn."""
        if not self._leaving:
            return
        waiting = []
        for regions, done in self._leaving:
            if any(region.leases for region in regions):
                waiting.append((regions, done))
                continue
            for region in regions:
                self._close(region)
            done()
        self._leaving = waiting

    def close(self) -> None:
        """Closes everything."""
        for region in self._regions.values():
            self._close(region)
        self._regions.clear()

    def _close(self, region: AnyRegion) -> None:
        if self._pinned is not None and isinstance(region, Region):
            self._pinned.unpin(region.view(0, region.byte_size))
        region.close()

    def __repr__(self) -> str:
        return f"<RegionTable {sorted(self._regions)}, {len(self._leaving)} calls waiting>"


def check_intact(regions: Iterable[AnyRegion]) -> None:
    """Raises InvalidArgument: pages of a region were missing when they were touched, so zeros stand there since."""
    if not guard.any_faults():
        return
    for region in regions:
        if region.faults:
            raise InvalidArgument(
                f"shared memory region '{region.name}' lost its memory: its object was truncated, or the host had none left for "
                "it; unregister the region and register it again"
            )
