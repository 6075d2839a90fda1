"""Holds the regions that one worker has open, by name, and checks whose memory may be registered as a region.

New requests do not find a region that was unregistered or replaced. The region is closed when its last lease has ended.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterable

from tensord.config import accounts
from tensord.config.options import RegionsOptions
from tensord.shm import descriptors, guard
from tensord.shm.cuda_regions import CudaRegion, Driver, NoCuda
from tensord.shm.errors import AlreadyExists, InvalidArgument, NotFound
from tensord.shm.operations import Peer, RegisterCudaRegion, RegisterSystemRegion
from tensord.shm.regions import Region, SnapshotRegion, check_sealed, open_object
from tensord.workers.devices.pinned_memory import PinnedMemory

_log = logging.getLogger(__name__)

AnyRegion = Region | SnapshotRegion | CudaRegion
#: Bytes up to which the pages of a lane's region are mapped at once: the loop does nothing else meanwhile.
_POPULATE_PRIVATE = 64 << 20


class RegionTable:
    """Opens, finds and closes the regions of one worker, by name. Only the thread of the worker's loop may use it."""

    def __init__(
        self, policy: RegionPolicy, driver: Driver, gpu: int | None, pinned: PinnedMemory | None = None
    ) -> None:
        """Makes a table without regions. ``pinned``: page-locks regions. If it is None, no region is page-locked.

        ``gpu``: the number of the worker's first GPU among the daemon's GPUs, or None if the worker is bound to no GPU.
        """
        self._pinned = pinned
        self._policy = policy
        self._driver = driver
        self._gpu = gpu
        self._regions: dict[str, AnyRegion] = {}
        #: Memory on other workers' GPUs, which no request has needed here so far.
        self._elsewhere: dict[str, RegisterCudaRegion] = {}
        #: Regions that are unregistered or renewed, and still in use by requests.
        self.leaving: list[AnyRegion] = []
        #: Regions, and the function to call when they are closed.
        self._waiting: list[tuple[list[AnyRegion], Callable[[], None]]] = []
        #: How often anything was added or removed that has a name.
        self.changes = 0
        #: Bytes of all regions that belong to lanes and are not leaving.
        self.private_byte_size = 0

    def register(self, record: RegisterSystemRegion, fd: int | None) -> tuple[Region | SnapshotRegion, str]:
        """Adds a client's POSIX shared memory to the table as a region. Returns the region, and how the worker uses the memory.

        "snapshot": it copies the memory before each use. "sealed": it maps the memory, which the client cannot shrink.
        "guarded": it maps the memory, which the client can shrink.
        ``fd``: a descriptor of the memory, which this method takes over. If ``fd`` is None, this worker opens the memory by
        ``record.key`` and checks whether the client may register the memory. Otherwise ``record.access`` says how to use it.
        Raises AlreadyExists if the region's name is taken and ``record.renews`` is False. Raises InvalidArgument or Internal if
        the memory is refused. Raises Unavailable if the memory cannot be mapped now, or the process has too many open files.
        """
        access = record.access
        try:
            self._check_free(record)
            if fd is None:
                fd = open_object(record.name, record.key)
                found = os.fstat(fd)
                self._policy.check(record, found)
                access = self._policy.access(record, found)
            elif access == "sealed":
                check_sealed(record.name, fd)
            descriptors.check_reserve(fd, f"failed to register shared memory region '{record.name}'")
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise
        # A region with this name is replaced only now, as nothing can fail any more. The same part of one object, of which no
        # page was lost, keeps its mapping.
        held = self._regions.get(record.name)
        if isinstance(held, Region | SnapshotRegion) and _still_holds(held, fd, record):
            os.close(fd)
            return held, access
        kind = SnapshotRegion if access == "snapshot" else Region
        region = kind(record.name, fd, record.offset, record.byte_size)
        self._pin(region)
        self._adopt(region)
        return region, access

    def open_private(self, name: str, fd: int, byte_size: int) -> Region:
        """Maps the memfd ``fd`` as a region that ``find`` does not return. Takes over ``fd``, and closes ``fd`` on any error.

        Raises InvalidArgument: ``fd`` is not a writable memfd with sealed size and without huge pages, or its size is not
        ``byte_size``. Raises Unavailable: the memory cannot be mapped now, or the process has too many open files.
        """
        try:
            check_sealed(name, fd)
            if (found := os.fstat(fd).st_size) != byte_size:
                raise InvalidArgument(f"segment '{name}' has {found} bytes, {byte_size} were announced")
            descriptors.check_reserve(fd, f"segment '{name}' cannot be mapped")
        except BaseException:
            os.close(fd)
            raise
        region = Region(name, fd, 0, byte_size, _POPULATE_PRIVATE)
        region.private = True
        self._pin(region)
        self.private_byte_size += byte_size
        return region

    def leave_private(self, region: Region) -> None:
        """Closes a region that ``open_private`` returned, as soon as no request uses the region any more.

        The caller must not give the region to a new request.
        """
        self.private_byte_size -= region.byte_size
        self.leaving.append(region)
        self.settle()

    def _pin(self, region: AnyRegion) -> None:
        if self._pinned is not None and isinstance(region, Region) and region.backed:
            self._pinned.pin(region.view(0, region.byte_size), "a region", region.hold)

    def register_cuda(self, record: RegisterCudaRegion) -> None:
        """Adds a client's GPU memory to the table. Memory on a GPU other than the worker's is opened when a request needs it.

        Raises AlreadyExists: the name is taken. Raises InvalidArgument: the memory cannot be opened. Raises DeviceLost: the GPU
        failed.
        """
        self._check_free(record)
        if record.near:
            self._adopt(self._opened(record))
            return
        self._elsewhere[record.name] = record
        self._replace(record.name)

    def _opened(self, record: RegisterCudaRegion) -> CudaRegion:
        own = self._gpu
        try:
            # A GPU worker sees its own devices only, and has a context of the first; the driver finds others by the handle.
            context = self._driver.context(record.device_id if own is None else 0)
        except NoCuda as error:
            _log.warning("CUDA region '%s' is refused: %s", record.name, error)
            if not record.near:
                raise InvalidArgument(
                    f"shared memory region '{record.name}' is on GPU {record.device_id}, which the model's worker cannot use"
                ) from error
            # What Triton answers on a host without a GPU, whatever is wrong.
            raise InvalidArgument("failed to register shared memory region: invalid args") from error
        elsewhere = None if own in (None, record.device_id) else (record.device_id, own)
        return CudaRegion(record.name, context, record.raw_handle, record.byte_size, elsewhere)

    def _check_free(self, record: RegisterSystemRegion | RegisterCudaRegion) -> None:
        if (record.name in self._regions or record.name in self._elsewhere) and not record.renews:
            raise AlreadyExists(f"shared memory region '{record.name}' already in manager")

    def _adopt(self, region: AnyRegion) -> None:
        """Adds a region to the table, in place of an earlier one with this name."""
        self._replace(region.name)
        self._regions[region.name] = region

    def _replace(self, name: str) -> None:
        if (renewed := self._regions.pop(name, None)) is not None:
            # Requests that use the earlier region go on using it.
            self.leaving.append(renewed)
        self.changes += 1
        self.settle()

    def find(self, name: str) -> AnyRegion:
        """Returns the region with this name. Raises NotFound: no region has this name. Raises DeviceLost: the GPU failed.

        Raises InvalidArgument: an earlier access to the region's memory failed, or this worker cannot open the region.
        """
        region = self._regions.get(name)
        if region is None:
            return self._find_elsewhere(name)
        if guard.any_faults():
            check_intact((region,))
        return region

    def _find_elsewhere(self, name: str) -> CudaRegion:
        record = self._elsewhere.get(name)
        if record is None:
            raise NotFound(f"Unable to find shared memory region: '{name}'")
        region = self._opened(record)
        del self._elsewhere[name]
        self._adopt(region)
        return region

    def unregister(self, kind: str, name: str) -> int:
        """Removes a region from the table, and closes it once no request uses it.

        Returns how many tensors of requests in flight lie in the region, or in memory that it had before it was renewed.
        ``kind``: "system" or "cuda". A region of the other kind is left as it is.
        """
        wanted = CudaRegion if kind == "cuda" else Region | SnapshotRegion
        if kind == "cuda" and self._elsewhere.pop(name, None) is not None:
            self.changes += 1
        if isinstance(self._regions.get(name), wanted):
            self.leaving.append(self._regions.pop(name))
            self.changes += 1
        used = 0
        for region in self.leaving:
            if region.name == name and isinstance(region, wanted) and not (region.private or region.unregistered):
                region.unregistered = True
                used += region.leases
        self.settle()
        return used

    def when_closed(self, name: str, done: Callable[[], None]) -> None:
        """Calls ``done`` once all regions of this name that were removed or replaced are closed."""
        leaving = [region for region in self.leaving if region.name == name and not region.private]
        self._waiting.append((leaving, done))
        self._call_waiters()

    def uses(self, name: str) -> dict[str, tuple[int, int]]:
        """Counts tensors of requests in flight. Returns region name -> (now, former). ``name``: only this name; "": all names.

        ``now``: tensors in the region that has the name. ``former``: tensors in removed or replaced regions that had the name.
        """
        found = {key: (region.leases, 0) for key, region in self._regions.items() if name in ("", key)}
        for region in self.leaving:
            if name in ("", region.name) and not region.private:
                held, left = found.get(region.name, (0, 0))
                found[region.name] = held, left + region.leases
        return found

    def leases(self) -> dict[str, int]:
        """Returns how many tensors of requests in flight lie in regions, by kind ("system", "cuda").

        Removed regions count, too.
        """
        found = {"system": 0, "cuda": 0}
        for region in (*self._regions.values(), *self.leaving):
            found["cuda" if isinstance(region, CudaRegion) else "system"] += region.leases
        return found

    def settle(self) -> None:
        """Closes removed and replaced regions that no request uses."""
        if not self.leaving:
            return
        for region in [region for region in self.leaving if not region.leases]:
            self.leaving.remove(region)
            self._close(region)
        self._call_waiters()

    def _call_waiters(self) -> None:
        """Calls the functions given to ``when_closed`` whose regions are all closed."""
        for entry in list(self._waiting):
            regions, done = entry
            if not any(region in self.leaving for region in regions):
                self._waiting.remove(entry)
                done()

    def close(self) -> None:
        for region in self._regions.values():
            self._close(region)
        self._regions.clear()

    def _close(self, region: AnyRegion) -> None:
        if self._pinned is not None and isinstance(region, Region):
            self._pinned.unpin(region.view(0, region.byte_size))
        region.close()

    def __repr__(self) -> str:
        return f"<RegionTable {sorted(self._regions)}, {len(self.leaving)} leaving>"


def _still_holds(region: Region | SnapshotRegion, fd: int, record: RegisterSystemRegion) -> bool:
    """Returns whether ``region`` is the part of the file ``fd`` that ``record`` names.

    Returns False if the file has become too small for this part, or if an access to the memory of ``region`` has failed.
    """
    found = os.fstat(fd)
    return (
        region.file == (found.st_dev, found.st_ino)
        and (region.offset, region.byte_size) == (record.offset, record.byte_size)
        and record.offset + record.byte_size <= found.st_size
        and not region.faults
    )


def check_intact(regions: Iterable[AnyRegion]) -> None:
    """Raises InvalidArgument if an access to the memory of one of these regions has failed, such as after a truncation."""
    if not guard.any_faults():
        return
    for region in regions:
        if region.faults:
            raise InvalidArgument(
                f"shared memory region '{region.name}' lost its memory: its object was truncated, or the host had none left for "
                "it; unregister the region and register it again"
            )


class RegionPolicy:
    """Decides whose shared memory may be registered as a region, and whether workers map or copy the memory."""

    # Whose: objects of the daemon's own user, objects shared with its groups, and objects of the configured users and groups.
    # For whom: a client on a unix socket must itself be allowed to read and write the object, because the daemon lends nobody
    # its rights. How: "snapshot" or "guarded" where a rule says so, else ``regions.access``; always "snapshot" if there is no
    # guard. The names in the options are known to exist on this host.
    def __init__(self, options: RegionsOptions) -> None:
        self._owners = {os.geteuid(), *map(accounts.user_id, options.owners)}
        self._groups = {os.getegid(), *os.getgroups(), *map(accounts.group_id, options.groups)}
        self._access = options.access
        #: (access, key prefixes, owners that it is chosen for); the first that matches is taken.
        self._rules = (
            ("snapshot", options.snapshot_key_prefixes, frozenset(map(accounts.user_id, options.snapshot_owners))),
            ("guarded", options.guarded_key_prefixes, frozenset(map(accounts.user_id, options.guarded_owners))),
        )

    def check(self, request: RegisterSystemRegion, status: os.stat_result) -> None:
        """Raises InvalidArgument if the client may not register the memory. ``status``: the memory's owner, group and mode."""
        welcome = status.st_uid in self._owners or (_group_may(status) and status.st_gid in self._groups)
        if not welcome:
            raise InvalidArgument(
                f"shared memory region '{request.name}': '{request.key}' belongs to another user and is not shared with the "
                "daemon's group"
            )
        if request.peer.kind == "unix" and not _may_use(request.peer, status):
            raise InvalidArgument(
                f"shared memory region '{request.name}': '{request.key}' is not readable and writable for you"
            )

    def access(self, request: RegisterSystemRegion, status: os.stat_result) -> str:
        """Returns "guarded" if the worker may map a client's memory, or "snapshot" if it must copy the memory at each use.

        The configured rules decide by the POSIX name of the memory (``request.key``) and its owner (``status``). It is always
        "snapshot" if ``tensord.shm.guard`` is not available.
        """
        if not guard.available:
            return "snapshot"
        key = request.key.lstrip("/")
        for access, prefixes, owners in self._rules:
            if key.startswith(prefixes) or status.st_uid in owners:
                return access
        return self._access


def _group_may(status: os.stat_result) -> bool:
    group = stat.S_IRGRP | stat.S_IWGRP
    return status.st_mode & group == group


def _may_use(peer: Peer, status: os.stat_result) -> bool:
    if peer.uid == 0:
        return True
    if peer.uid == status.st_uid:
        wanted = stat.S_IRUSR | stat.S_IWUSR
    elif status.st_gid == peer.gid or status.st_gid in peer.groups:
        wanted = stat.S_IRGRP | stat.S_IWGRP
    else:
        wanted = stat.S_IROTH | stat.S_IWOTH
    return status.st_mode & wanted == wanted
