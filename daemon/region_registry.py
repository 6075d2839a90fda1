"""Client regions by name: which are registered, and on which workers. The supervisor holds the descriptor and maps nothing.

    system      first worker opens the object by its key ─▶ its descriptor comes back ─▶ the other workers get that descriptor
                a worker is replaced: it gets every descriptor again; the client may have unlinked the object long ago
    CUDA        every worker of that GPU opens the handle itself; CPU workers all do, and copy through the host

A region is registered on all workers that can use it or on none. One namespace for every kind of region, as in Triton.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from config.options import Regions
from shm.errors import AlreadyExists, Internal, InvalidArgument, NotFound, ServingError, Unavailable, Unsupported
from shm.messages import (
    Operation,
    RegionPlace,
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

Registration = RegisterSystemRegion | RegisterCudaRegion


class RegionHolder(Protocol):
    """What the registry needs of a worker (``daemon.child.Worker``)."""

    name: str
    incarnation: int
    device: str

    @property
    def alive(self) -> bool: ...

    async def call(self, operation: Operation, *fds: int) -> tuple[bytes, list[int]]: ...


class RegionState(enum.Enum):
    """Where a region is in its life; only a registered one is listed."""

    #: Workers are being told.
    REGISTERING = "registering"
    #: All workers have it.
    REGISTERED = "registered"
    #: Workers finish the requests that use it.
    UNREGISTERING = "unregistering"


@dataclass(slots=True, eq=False)
class Region:
    """One registration."""

    kind: str
    request: Registration
    #: The only device whose workers can use it; "": any.
    device: str = ""
    state: RegionState = RegionState.REGISTERING
    #: A system region's object, kept for workers that come later; owned here.
    fd: int = -1
    #: Incarnations of the workers that have it.
    holders: set[int] = field(default_factory=set)
    #: Set at the end of each change of state.
    changed: asyncio.Event = field(default_factory=asyncio.Event)


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

    # ------------------------------------------------------------------------------------------------------- register

    async def register(self, request: Registration) -> None:
        """Registers on every worker that can use the region.

        Raises: InvalidArgument, AlreadyExists, Unsupported, Unavailable, or what a worker answered; nothing stays registered.
        """
        self._check(request)
        if isinstance(request, RegisterCudaRegion):
            region = Region("cuda", request, self._device_of(request))
        else:
            region = Region("system", request)
        self._regions[request.name] = region
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

    def _check(self, request: Registration) -> None:
        name, limit = request.name, self._options.max_byte_size
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
        if request.byte_size > limit:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': {request.byte_size} bytes, at most {limit} are allowed"
            )
        if len(self._regions) >= self._options.max_count:
            raise Unavailable(
                f"failed to register shared memory region '{name}': "
                f"{len(self._regions)} regions are registered, at most {self._options.max_count} are allowed"
            )

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
            _, fds = await worker.call(region.request)
            if len(fds) != (region.kind == "system"):
                _close(fds)
                raise Internal(f"failed to register shared memory region '{region.request.name}'")
            region.fd = fds.pop() if fds else -1
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

    async def unregister(self, request: UnregisterRegion) -> None:
        """Returns once no request uses the region any more; a name that is not registered as that kind is no error."""
        names = [request.name] if request.name else list(self._regions)
        await asyncio.gather(*(self._unregister_one(request.kind, name) for name in names))

    async def _unregister_one(self, kind: str, name: str) -> None:
        region = self._regions.get(name)
        if region is None or region.kind != kind:
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

    def close(self) -> None:
        """Gives the descriptors back."""
        for region in self._regions.values():
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
