"""Registers clients' shared-memory regions by name on the workers. The supervisor keeps their descriptors and maps none.

For a POSIX region, one worker opens the memory by its key and returns a file descriptor, unless the client sent a memfd. The
supervisor sends the descriptor to all other workers, and later to each new worker. So a new worker gets the memory even if the
client has unlinked the key.

For a CUDA region, the workers on the memory's GPU open the memory when the region is registered. Any other worker opens
it when a request on that worker first uses the region. If no worker has a GPU, all workers open it at the registration.

A region is registered on all workers that can use it or on none. Names are unique over all kinds of regions, as in Triton. An
unregistered region is listed until no request uses it, but its name is free at once. If its owner registers a region again, all
workers open its memory again. If a worker cannot open the memory, the region stays as it was.

A region that was registered over a Unix socket can be unregistered by clients of the same user on a Unix socket, and over the
daemon's control socket. A region that was registered over TCP can be unregistered by every client. The option
``regions.reclaim`` can make a user's region end with the process or the connection that registered it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from tensord.config.options import RegionsOptions
from tensord.daemon.control import open_files
from tensord.daemon.regions import region_checks
from tensord.daemon.regions.region_record import EndWatch, RegionState, RegisteredRegion, Registration, is_owner
from tensord.shm import descriptors
from tensord.shm.control_records import RegionPlace
from tensord.shm.device_names import gpu_of
from tensord.shm.errors import AlreadyExists, InvalidArgument, NoDescriptor, NotFound, ServingError, Unavailable
from tensord.shm.operations import (
    AwaitRegion,
    Peer,
    RegionRecords,
    RegionStatus,
    RegisterCudaRegion,
    UnregisterRegion,
)
from tensord.shm.regions import refused

if TYPE_CHECKING:
    from tensord.daemon.processes.child import WorkerProcess
    from tensord.daemon.processes.fronts import Fronts
    from tensord.daemon.processes.worker_pool import WorkerPool

_log = logging.getLogger(__name__)
_KINDS = {"system": "system", "cuda": "CUDA"}


class Chosen(msgspec.Struct):
    """A worker's JSON reply after it opened the POSIX memory of a region. ``access``: how all workers access this memory."""

    access: str


class RegionRegistry:
    """Registers and unregisters clients' regions on every worker that can use them."""

    def __init__(self, options: RegionsOptions, workers: WorkerPool, fronts: Fronts, gpus_each: int = 1) -> None:
        """Stores the arguments. No region is registered yet. ``gpus_each``: how many GPUs each worker has."""
        self._options = options
        self._workers = workers
        self._fronts = fronts
        self._gpus_each = gpus_each
        #: The regions whose names are taken.
        self._regions: dict[str, RegisteredRegion] = {}
        #: The regions that were unregistered while requests used them.
        self._leaving: list[RegisteredRegion] = []
        self._tasks: dict[asyncio.Task[None], None] = {}

    # ------------------------------------------------------------------------------------------------------- register

    async def register(self, request: Registration, peer: Peer, end: int = -1, sealed: int = -1) -> None:
        """Registers a client's region on every worker that can use the region.

        If the client's user or host has registered the same memory under this name before, the workers open the memory again.
        After an error, the registered regions are as before. The caller must close ``end`` and ``sealed``.
        Args:
          peer: the client.
          end: a file descriptor that becomes readable when the region should be unregistered, or -1.
          sealed: a memfd with the memory, whose seals the caller has checked. If it is -1, ``request`` names the memory.
        Raises AlreadyExists if the name belongs to a region with other memory, or to a region of another user or host.
        Raises InvalidArgument if a value in ``request`` is not allowed. Raises Unsupported if the options allow no regions.
        Raises Unavailable if there are too many regions or too many bytes in regions, or if no worker can use the region now.
        Raises ServingError if a worker refuses the region.
        """
        region_checks.check_form(self._options, request)
        while (there := self._regions.get(request.name)) is not None:
            if there.state is RegionState.UNREGISTERING:
                await there.changed.wait()
                continue
            if not region_checks.repeats(there, request, peer, sealed):
                raise AlreadyExists(f"shared memory region '{request.name}' already in manager")
            if there.state is RegionState.REGISTERED:
                await self._renew(there, self._region(request, peer, sealed), end)
                return
            # Another call registers it just now: its outcome decides.
            await there.changed.wait()
        region_checks.check_fields(self._options, request)
        sizes = [(known.peer, known.request.byte_size) for known in self._all]
        region_checks.check_bounds(self._options, request.name, request.byte_size, peer, sizes)
        region = self._region(request, peer, sealed)
        self._regions[request.name] = region
        try:
            self._watch(region, region, end)
            self._check_reserve(region.request, region.fd)
            await self._spread(region)
        except BaseException:
            await self._forget(region)
            raise
        region.state = RegionState.REGISTERED
        if self._placed(region):
            self._fronts.publish(RegionPlace(request.name, region.device))
        region.changed.set()
        if region.watch is not None:
            region.watch.resume()

    def _region(self, request: Registration, peer: Peer, sealed: int) -> RegisteredRegion:
        if isinstance(request, RegisterCudaRegion):
            return RegisteredRegion("cuda", request, peer, time.time(), self._device_of(request))
        request = msgspec.structs.replace(request, peer=peer, access="sealed" if sealed >= 0 else "")
        with descriptors.needed(f"shared memory region '{request.name}'"):
            return RegisteredRegion("system", request, peer, time.time(), fd=os.dup(sealed) if sealed >= 0 else -1)

    async def _renew(self, region: RegisteredRegion, renewal: RegisteredRegion, end: int) -> None:
        name = region.request.name
        region.state = RegionState.RENEWING
        region.changed.clear()
        # It is open until this is over which region's end counts.
        if region.watch is not None:
            region.watch.pause()
        try:
            self._watch(region, renewal, end)
            await self._spread(renewal, renews=True)
        except BaseException:
            renewal.close()
            # Workers that have the new region lack the old one, and those that joined meanwhile have neither.
            region.holders -= renewal.holders
            region.state = RegionState.REGISTERED
            lacking = [worker for worker in self._workers.ready() if worker.incarnation not in region.holders]
            await asyncio.gather(*(self._restore_one(region, worker, renews=True) for worker in lacking))
            raise
        else:
            region.close()
            region.request, region.peer, region.registered_at = renewal.request, renewal.peer, renewal.registered_at
            region.fd, region.watch = renewal.fd, renewal.watch
            # Some of the workers that have it may have died since.
            region.holders = renewal.holders & {worker.incarnation for worker in self._workers.ready()}
            region.state = RegionState.REGISTERED
            _log.info("region '%s' was registered again by its owner", name)
        finally:
            # Another call may change it already, since workers were given the former region back: that call ends its change.
            if region.state is RegionState.REGISTERED:
                if region.watch is not None:
                    region.watch.resume()
                region.changed.set()

    def _watch(self, region: RegisteredRegion, by: RegisteredRegion, end: int) -> None:
        """Has ``by`` watch for the end of ``region``, in a pause until workers have it."""
        if end >= 0:
            with descriptors.needed(f"shared memory region '{region.request.name}'"):
                by.watch = EndWatch(end, lambda: self._reclaim(region))
            by.watch.pause()
            self._check_reserve(region.request, by.watch.fd)

    def _reclaim(self, region: RegisteredRegion) -> None:
        """Begins to unregister a region because the client that registered it has exited or closed its connection."""
        if region.state is RegionState.REGISTERED:
            what = "process" if self._options.reclaim == "owner" else "connection of process"
            _log.info("region '%s' goes: the %s %d has ended", region.request.name, what, region.peer.pid)
            # At once: who is about to register it again waits for this end, which else would undo what he is told.
            region.state = RegionState.UNREGISTERING
            region.changed.clear()
            self._start(self._forget(region))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def _device_of(self, request: RegisterCudaRegion) -> str:
        gpus = {gpu for device in self._workers.devices if (gpu := gpu_of(device))}
        if not gpus:
            return ""
        each = self._gpus_each
        gpu = f"cuda:{request.device_id - request.device_id % each}"
        if gpu not in gpus:
            used = f"the server uses {len(gpus) * each} GPUs, counted from 0"
            raise refused(request.name, f"no worker has GPU {request.device_id}, {used}")
        return gpu

    def _placed(self, region: RegisteredRegion) -> bool:
        return bool(region.device) and len(self._workers.devices) > 1

    async def _spread(self, region: RegisteredRegion, renews: bool = False) -> None:
        while missing := [worker for worker in self._workers.ready() if worker.incarnation not in region.holders]:
            # All others get the descriptor of the first: one object, whatever becomes of the name.
            several = missing if region.fd >= 0 or region.kind == "cuda" else missing[:1]
            results = await asyncio.gather(
                *(self._put(region, worker, renews) for worker in several), return_exceptions=True
            )
            for worker, result in zip(several, results, strict=True):
                if isinstance(result, BaseException) and worker.alive:
                    raise result
        if not any(worker.incarnation in region.holders and region.is_near(worker) for worker in self._workers.ready()):
            of = f" of GPU {region.device.removeprefix('cuda:')}" if region.device else ""
            raise refused(region.request.name, f"no worker{of} is running", Unavailable)

    @classmethod
    async def _put(cls, region: RegisteredRegion, worker: WorkerProcess, renews: bool) -> None:
        request = msgspec.structs.replace(region.request, renews=renews)
        if isinstance(request, RegisterCudaRegion):
            request = msgspec.structs.replace(request, near=region.is_near(worker))
        given = (region.fd,) if region.fd >= 0 else ()
        # From now on: who unregisters the region before the answer is there tells the worker as well.
        region.holders.add(worker.incarnation)
        try:
            answer, fds = await worker.call(request, *given)
        except ServingError:
            region.holders.discard(worker.incarnation)
            raise
        try:
            if region.kind == "system" and not given:
                if not fds:
                    raise refused(region.request.name, descriptors.none_left("the server").message, NoDescriptor)
                region.fd = fds.pop()
                cls._check_reserve(region.request, region.fd)
                chosen = msgspec.json.decode(answer, type=Chosen)
                region.request = msgspec.structs.replace(region.request, access=chosen.access)
        finally:
            descriptors.close(fds)

    @staticmethod
    def _check_reserve(request: Registration, fd: int) -> None:
        descriptors.check_reserve(fd, f"failed to register shared memory region '{request.name}'")

    async def restore(self, worker: WorkerProcess) -> None:
        """Registers all regions on a new worker. A region that the worker refuses is logged."""
        await asyncio.gather(*(self._restore_one(region, worker) for region in list(self._regions.values())))

    async def _restore_one(self, region: RegisteredRegion, worker: WorkerProcess, renews: bool = False) -> None:
        name = region.request.name

        async def put() -> None:
            # A renewal gives it to every worker that is up.
            while region.state is RegionState.RENEWING and worker.incarnation not in region.holders:
                await region.changed.wait()
            # Where it was unregistered, its descriptor's number may be another file's by now.
            if region.state is RegionState.REGISTERED and worker.incarnation not in region.holders:
                await self._put(region, worker, renews)

        try:
            await open_files.awaited(put)
        except ServingError as error:
            # The object shrank, or the owner of GPU memory is gone. Requests that name the region here get a clear error.
            _log.warning("region '%s' could not be registered on %s: %s", name, worker.name, error.message)
            if renews and region.state is RegionState.REGISTERED:
                # What the renewal gave it is not this region.
                await _tell(worker, UnregisterRegion(region.kind, name))

    def worker_left(self, incarnation: int) -> None:
        """Notes that a dead worker has no regions any more. ``incarnation``: the number of the worker process."""
        for region in self._regions.values():
            region.holders.discard(incarnation)

    # ----------------------------------------------------------------------------------------------------- unregister

    async def unregister(self, request: UnregisterRegion, peer: Peer) -> None:
        """Unregisters a region, or all regions of a client, so that no later request can use them.

        Requests that use a region already can finish, and the region is listed until then. A name that is not registered is no
        error. In ``request`` the kind "" means any kind. The name "" means all regions that belong to the client ``peer``.
        Raises Unsupported if regions are not allowed. Raises InvalidArgument if the region belongs to another user.
        """
        region_checks.check_enabled(self._options)
        if request.name:
            region = self._regions.get(request.name)
            if region is not None and region.peer.kind == "unix" and not is_owner(peer, region.peer):
                raise InvalidArgument(f"shared memory region '{request.name}' was registered by another user")
            names = [request.name]
        else:
            names = [name for name, region in self._regions.items() if is_owner(peer, region.peer)]
        await asyncio.gather(*(self._unregister_one(request.kind, name) for name in names))

    async def _unregister_one(self, kind: str, name: str) -> None:
        region = self._regions.get(name)
        if region is None or kind not in ("", region.kind):
            return
        if region.state is RegionState.REGISTERED:
            region.changed.clear()
            await self._forget(region)
            return
        # Another call changes it: wait for the outcome; a registration that succeeds after all is then undone.
        await region.changed.wait()
        await self._unregister_one(kind, name)

    async def _forget(self, region: RegisteredRegion) -> None:
        """Unregisters a region on every worker, and frees its name."""
        name = region.request.name
        region.state = RegionState.UNREGISTERING
        region.close()
        # Also those that do not count as holders: one may have kept what a renewal that failed has given it.
        users = self._workers.ready()
        if self._placed(region):
            self._fronts.publish(RegionPlace(name, ""))
        try:
            used = await asyncio.gather(*(_tell(worker, UnregisterRegion(region.kind, name)) for worker in users))
            users = [worker for worker, count in zip(users, used, strict=True) if count]
        finally:
            del self._regions[name]
            if users:
                self._leaving.append(region)
                self._start(self._await_end(region, users))
            region.changed.set()

    async def _await_end(self, region: RegisteredRegion, users: list[WorkerProcess]) -> None:
        await asyncio.gather(*(_tell(worker, AwaitRegion(region.request.name)) for worker in users))
        self._leaving.remove(region)

    # ---------------------------------------------------------------------------------------------------------- status

    @property
    def _all(self) -> list[RegisteredRegion]:
        """Returns every region. Of one name, those that were unregistered but are in use come first, the oldest before others."""
        return [*self._leaving, *self._regions.values()]

    def status(self, request: RegionStatus) -> bytes:
        """Returns a JSON array of the regions that ``request`` asks for, by kind and name. The name "" means any name.

        Raises NotFound if this kind has no region of this name.
        """
        # Of several regions of one name the newest is listed.
        found = {region.request.name: region for region in self._all if region.state is not RegionState.REGISTERING}
        if request.name:
            region = found.get(request.name)
            if region is None:
                raise NotFound(f"Unable to find {request.kind} shared memory region: '{request.name}'")
            if region.kind != request.kind:
                raise NotFound(
                    f"The region named '{request.name}' is registered as {_KINDS[region.kind]} shared memory, "
                    f"not {_KINDS[request.kind]} shared memory"
                )
            found = {request.name: region}
        return msgspec.json.encode([_described(r.request) for _, r in sorted(found.items()) if r.kind == request.kind])

    def places(self) -> list[RegionPlace]:
        """Returns the records that tell a new front process on which GPUs regions lie."""
        return [
            RegionPlace(name, region.device)
            for name, region in self._regions.items()
            if region.state is RegionState.REGISTERED and self._placed(region)
        ]

    async def records(self, name: str) -> bytes:
        """Returns a JSON array with a description of each region that has this name. ``name`` "" means all regions.

        Raises NotFound if ``name`` is not "" and no region has this name.
        """
        found = [region for region in self._all if name in ("", region.request.name)]
        if name and not found:
            raise NotFound(f"Unable to find shared memory region: '{name}'")
        workers = self._workers.ready()
        held, left = Counter[str](), Counter[str]()
        for answer in await asyncio.gather(*(_ask_use(worker, name) for worker in workers)):
            for key, (now, before) in answer.items():
                held[key] += now
                left[key] += before
        names = {worker.incarnation: worker.name for worker in workers}
        return msgspec.json.encode(
            [
                region.record(
                    [names[i] for i in sorted(region.holders) if i in names],
                    (left if region.state is RegionState.UNREGISTERING else held)[region.request.name],
                )
                for region in sorted(found, key=lambda region: region.request.name)
            ]
        )

    def statistics(self) -> dict[str, dict[str, int]]:
        """Returns for each owner, a user or host, the number of its regions ("count") and of their bytes ("byte_size")."""
        found: dict[str, dict[str, int]] = {}
        for region in self._all:
            entry = found.setdefault(region.peer.owner, {"count": 0, "byte_size": 0})
            entry["count"] += 1
            entry["byte_size"] += region.request.byte_size
        return found

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Returns for each kind, "system" or "cuda", the number of regions and of their bytes."""
        sizes: dict[str, list[int]] = {kind: [] for kind in _KINDS}
        for region in self._all:
            sizes[region.kind].append(region.request.byte_size)
        return {kind: (len(found), sum(found)) for kind, found in sizes.items()}

    def close(self) -> None:
        """Closes the file descriptors of all regions."""
        for task in self._tasks:
            task.cancel()
        for region in self._regions.values():
            region.close()
        self._regions.clear()


async def _tell(worker: WorkerProcess, request: UnregisterRegion | AwaitRegion) -> int:
    try:
        return int(await worker.result_of(request) or 0)
    except ServingError as error:
        if worker.alive:
            _log.warning("region '%s' could not be unregistered on %s: %s", request.name, worker.name, error.message)
        return 0


async def _ask_use(worker: WorkerProcess, name: str) -> dict[str, tuple[int, int]]:
    try:
        answer = await worker.result_of(RegionRecords(name))
    except ServingError:
        return {}
    return msgspec.json.decode(answer, type=dict[str, tuple[int, int]])


def _described(request: Registration) -> dict[str, str | int]:
    # Without the CUDA handle, by which any client could open the memory.
    if isinstance(request, RegisterCudaRegion):
        return {"name": request.name, "device_id": request.device_id, "byte_size": request.byte_size}
    return {"name": request.name, "key": request.key, "offset": request.offset, "byte_size": request.byte_size}
