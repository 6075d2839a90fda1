"""Client regions by name: which are registered, and on which workers. The supervisor holds the descriptor and maps nothing.

    system      first worker opens the object by its key ─▶ its descriptor comes back ─▶ the other workers get that descriptor
                a worker is replaced: it gets every descriptor again; the client may have unlinked the object long ago
    CUDA        every worker of that GPU opens the handle itself; CPU workers all do, and copy through the host

A region is registered on all workers that can use it or on none. One namespace for every kind of region, as in Triton.

Whose a region is: what a user registered over a unix socket is that user's, and only the user and the operator can unregister it.
What came over TCP is everybody's, as in Triton. Where ``regions.reclaim`` says so, a user's region goes with the process or the
connection behind it, as soon as no request uses it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from config.options import Regions
from daemon import region_quota
from daemon.end_watch import EndWatch
from daemon.region_record import Region, RegionState, Registration, is_owner
from shm.errors import AlreadyExists, Internal, InvalidArgument, NotFound, ServingError, Unavailable, Unsupported
from shm.messages import (
    Operation,
    Peer,
    RegionPlace,
    RegionRecords,
    RegionStatus,
    RegisterCudaRegion,
    RegisterSystemRegion,
    UnregisterRegion,
)

_log = logging.getLogger(__name__)
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,255}")
_LIMIT = (1 << 63) - 1
_KINDS = {"system": "system", "cuda": "CUDA"}
_HANDLE_SIZE = 64


class Chosen(msgspec.Struct):
    """What the first worker says of an object it has opened."""

    access: str


class RegionHolder(Protocol):
    """What the registry needs of a worker (``daemon.child.Worker``)."""

    name: str
    incarnation: int
    device: str

    @property
    def alive(self) -> bool: ...

    async def call(self, operation: Operation, *fds: int) -> tuple[bytes, list[int]]: ...


class RegionRegistry:
    """``workers()`` are those that are ready for calls now; ``devices()`` all that a worker is meant for."""

    def __init__(
        self,
        options: Regions,
        workers: Callable[[], Iterable[RegionHolder]],
        devices: Callable[[], Sequence[str]],
        publish: Callable[[RegionPlace], None],
    ) -> None:
        """``publish`` tells the fronts, in order, before the registration is answered."""
        self._options = options
        self._workers = workers
        self._devices = devices
        self._publish = publish
        self._regions: dict[str, Region] = {}
        self._reclaims: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------------------------- register

    async def register(self, request: Registration, peer: Peer, end: int = -1, sealed: int = -1) -> None:
        """Registers on every worker that can use the region.

        Args:
          peer: who asks.
          end: becomes readable when the region is to go by itself (``daemon.peer.end_of``); -1: never.
          sealed: a memfd whose seals were checked, to be used instead of the object of that key; -1: none.
        The descriptors stay the caller's.
        Raises: InvalidArgument, AlreadyExists, Unsupported, Unavailable, or what a worker answered; nothing stays registered.
        """
        self._check(request, peer)
        if isinstance(request, RegisterCudaRegion):
            region = Region("cuda", request, peer, time.time(), self._device_of(request))
        else:
            request = msgspec.structs.replace(request, peer=peer, access="sealed" if sealed >= 0 else "")
            region = Region("system", request, peer, time.time())
        self._regions[request.name] = region
        if sealed >= 0:
            region.fd = os.dup(sealed)
        try:
            await self._spread(region)
        except BaseException:
            region.state = RegionState.UNREGISTERING
            await self._forget(region)
            raise
        region.state = RegionState.REGISTERED
        if self._placed(region):
            self._publish(RegionPlace(request.name, region.device))
        region.changed.set()
        if end >= 0:
            region.watch = EndWatch(end, lambda: self._reclaim(region))

    def _reclaim(self, region: Region) -> None:
        """Its owner is gone, by ``regions.reclaim``."""
        if region.state is RegionState.REGISTERED:
            what = "process" if self._options.reclaim == "owner" else "connection of process"
            _log.info("region '%s' goes: the %s %d has ended", region.request.name, what, region.peer.pid)
            task = asyncio.get_running_loop().create_task(self._unregister_one(region.kind, region.request.name))
            self._reclaims.add(task)
            task.add_done_callback(self._reclaims.discard)

    def _device_of(self, request: RegisterCudaRegion) -> str:
        """Raises InvalidArgument: no worker has that GPU."""
        gpus = [device for device in self._devices() if device.startswith("cuda:")]
        if not gpus:
            return ""
        device = f"cuda:{request.device_id}"
        if device not in gpus:
            raise InvalidArgument(
                f"failed to register shared memory region '{request.name}': no worker has GPU {request.device_id}, "
                f"the server uses {len(gpus)} GPUs, counted from 0"
            )
        return device

    def _placed(self, region: Region) -> bool:
        """Whether a request that names it cannot go to just any worker."""
        return bool(region.device) and len(self._devices()) > 1

    def _able(self, region: Region) -> list[RegionHolder]:
        return [worker for worker in self._workers() if region.device in ("", worker.device)]

    def _check(self, request: Registration, peer: Peer) -> None:
        name = request.name
        offset = request.offset if isinstance(request, RegisterSystemRegion) else 0
        if not self._options.enabled:
            raise Unsupported(
                "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
            )
        if isinstance(request, RegisterCudaRegion) and len(request.raw_handle) != _HANDLE_SIZE:
            raise InvalidArgument("failed to register shared memory region: invalid args")
        if not _NAME.fullmatch(name):
            raise InvalidArgument("a region's name has 1 to 255 characters, none of them a control character")
        if name in self._regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        if request.byte_size < 1 or offset < 0:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': byte_size {request.byte_size} must be at least 1, "
                f"offset {offset} at least 0"
            )
        if request.byte_size + offset > _LIMIT:
            raise InvalidArgument(
                f"Integer overflow detected: byte_size ({request.byte_size}) + offset ({offset}) exceeds maximum "
                f"value ({_LIMIT}) for region '{name}'"
            )
        prefixes = self._options.key_prefixes
        key = request.key if isinstance(request, RegisterSystemRegion) else ""
        if prefixes and key and not key.lstrip("/").startswith(prefixes):
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': keys must begin like one of {list(prefixes)}, "
                f"'{key[:220]}' does not"
            )
        there = [(region.peer, region.request.byte_size) for region in self._regions.values()]
        region_quota.check(self._options, name, request.byte_size, peer, there)

    async def _spread(self, region: Region) -> None:
        """Until every worker that can use it has it, also those that came meanwhile."""
        while missing := [worker for worker in self._able(region) if worker.incarnation not in region.holders]:
            # The descriptor of the first is what all others get: one object, whatever becomes of the name.
            several = missing if region.fd >= 0 or region.kind == "cuda" else missing[:1]
            results = await asyncio.gather(*(self._put(region, worker) for worker in several), return_exceptions=True)
            for worker, result in zip(several, results, strict=True):
                if isinstance(result, BaseException) and worker.alive:
                    raise result
        if not region.holders:
            of = f" of GPU {region.device.removeprefix('cuda:')}" if region.device else ""
            raise Unavailable(
                f"failed to register shared memory region '{region.request.name}': no worker{of} is running"
            )

    @staticmethod
    async def _put(region: Region, worker: RegionHolder) -> None:
        if region.fd >= 0:
            _, fds = await worker.call(region.request, region.fd)
        else:
            answer, fds = await worker.call(region.request)
            if len(fds) != (region.kind == "system"):
                _close(fds)
                raise Internal(f"failed to register shared memory region '{region.request.name}'")
            if isinstance(region.request, RegisterSystemRegion):
                region.fd = fds.pop()
                chosen = msgspec.json.decode(answer, type=Chosen)
                region.request = msgspec.structs.replace(region.request, access=chosen.access)
        _close(fds)
        if worker.alive:  # else it died with the answer on its way, and was struck off already
            region.holders.add(worker.incarnation)

    async def restore(self, worker: RegionHolder) -> None:
        """Gives a new worker every registered region, before it gets requests."""
        regions = [
            region
            for region in self._regions.values()
            if region.state is RegionState.REGISTERED and region.device in ("", worker.device)
        ]
        await asyncio.gather(*(self._restore_one(region, worker) for region in regions))

    async def _restore_one(self, region: Region, worker: RegionHolder) -> None:
        if region.state is not RegionState.REGISTERED:
            return  # unregistered since; its descriptor's number may be another file's by now
        name = region.request.name
        try:
            await self._put(region, worker)
        except ServingError as error:
            # The object shrank, or the owner of GPU memory is gone. Requests that name the region here get a clear error.
            _log.warning("region '%s' could not be registered on %s: %s", name, worker.name, error.message)
            return
        if region.state is not RegionState.REGISTERED:
            await _tell(worker, UnregisterRegion(region.kind, name))

    def worker_left(self, incarnation: int) -> None:
        """That worker's mappings died with it."""
        for region in self._regions.values():
            region.holders.discard(incarnation)

    # ----------------------------------------------------------------------------------------------------- unregister

    async def unregister(self, request: UnregisterRegion, peer: Peer) -> None:
        """Returns once no request uses the region any more; a name that is not registered as that kind ("": any) is no error.

        "" is all that are the peer's: a user's own, the operator's all, and for TCP all that came that way.
        Raises: InvalidArgument: the named one is another user's.
        """
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
            region.state = RegionState.UNREGISTERING
            region.changed.clear()
            await self._forget(region)
            return
        # Somebody else is at it: wait for the outcome; a registration that succeeds after all is then undone.
        await region.changed.wait()
        await self._unregister_one(kind, name)

    async def _forget(self, region: Region) -> None:
        if region.watch is not None:
            region.watch.close()
        holders = [worker for worker in self._workers() if worker.incarnation in region.holders]
        if self._placed(region):
            self._publish(RegionPlace(region.request.name, ""))
        try:
            await asyncio.gather(
                *(_tell(worker, UnregisterRegion(region.kind, region.request.name)) for worker in holders)
            )
        finally:
            del self._regions[region.request.name]
            if region.fd >= 0:
                os.close(region.fd)
                region.fd = -1
            region.changed.set()

    # ---------------------------------------------------------------------------------------------------------- status

    def status(self, request: RegionStatus) -> bytes:
        """JSON array of the regions of a kind, or of the named one. Raises NotFound: there is none, or it is of another kind."""
        listed = {name: r for name, r in sorted(self._regions.items()) if r.state is RegionState.REGISTERED}
        if request.name:
            region = listed.get(request.name)
            if region is None:
                raise NotFound(f"Unable to find {request.kind} shared memory region: '{request.name}'")
            if region.kind != request.kind:
                raise NotFound(
                    f"The region named '{request.name}' is registered as {_KINDS[region.kind]} shared memory, "
                    f"not {_KINDS[request.kind]} shared memory"
                )
            listed = {request.name: region}
        return msgspec.json.encode([_described(r.request) for r in listed.values() if r.kind == request.kind])

    def places(self) -> list[RegionPlace]:
        """What a new front must know."""
        return [
            RegionPlace(name, region.device)
            for name, region in self._regions.items()
            if region.state is RegionState.REGISTERED and self._placed(region)
        ]

    async def records(self, name: str) -> bytes:
        """JSON array with everything known of the named region, or of all (""). Raises NotFound."""
        if name and name not in self._regions:
            raise NotFound(f"Unable to find shared memory region: '{name}'")
        workers = {worker.incarnation: worker for worker in self._workers()}
        used: dict[str, int] = {}
        for answer in await asyncio.gather(*(_ask_use(worker, name) for worker in workers.values())):
            for region_name, count in answer.items():
                used[region_name] = used.get(region_name, 0) + count
        return msgspec.json.encode(
            [
                region.record([workers[i].name for i in sorted(region.holders) if i in workers], used.get(key, 0))
                for key, region in sorted(self._regions.items())
                if name in ("", key)
            ]
        )

    def statistics(self) -> dict[str, dict[str, int]]:
        """Owner -> number and bytes of its regions."""
        found: dict[str, dict[str, int]] = {}
        for region in self._regions.values():
            entry = found.setdefault(region.peer.owner, {"count": 0, "byte_size": 0})
            entry["count"] += 1
            entry["byte_size"] += region.request.byte_size
        return found

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Kind, "system" or "cuda" -> number and bytes of all such regions."""
        sizes: dict[str, list[int]] = {kind: [] for kind in _KINDS}
        for region in self._regions.values():
            sizes[region.kind].append(region.request.byte_size)
        return {kind: (len(found), sum(found)) for kind, found in sizes.items()}

    def close(self) -> None:
        """Gives the descriptors back."""
        for task in self._reclaims:
            task.cancel()
        for region in self._regions.values():
            if region.watch is not None:
                region.watch.close()
            if region.fd >= 0:
                os.close(region.fd)
        self._regions.clear()

    def check_invariants(self) -> None:
        """Raises AssertionError; for tests, between operations."""
        present = {worker.incarnation for worker in self._workers()}
        for region in self._regions.values():
            assert region.state is RegionState.REGISTERED
            assert (region.fd >= 0) is (region.kind == "system")
            assert region.holders <= present


def _described(request: Registration) -> dict[str, str | int]:
    """As status lists it. A handle is not told: whoever knows it can open the memory."""
    if isinstance(request, RegisterCudaRegion):
        return {"name": request.name, "device_id": request.device_id, "byte_size": request.byte_size}
    return {"name": request.name, "key": request.key, "offset": request.offset, "byte_size": request.byte_size}


async def _ask_use(worker: RegionHolder, name: str) -> dict[str, int]:
    """Region -> how many tensors of requests are in it now. A worker that is gone has none."""
    try:
        answer, fds = await worker.call(RegionRecords(name))
    except ServingError:
        return {}
    _close(fds)
    return msgspec.json.decode(answer, type=dict[str, int])


async def _tell(worker: RegionHolder, request: UnregisterRegion) -> None:
    """Best effort: a worker that is gone has nothing mapped."""
    try:
        _, fds = await worker.call(request)
        _close(fds)
    except ServingError as error:
        if worker.alive:
            _log.warning("region '%s' could not be unregistered on %s: %s", request.name, worker.name, error.message)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
