"""Lists the registered regions for clients, operators and metrics. Only reads.

A region that was unregistered while requests used it is listed until the last of these requests has ended, because its memory is
in use till then. If its name has a new region already, clients see the new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from tensord.daemon.regions.region_record import RegionState, RegisteredRegion, Registration
from tensord.shm import descriptors
from tensord.shm.errors import NotFound, ServingError
from tensord.shm.operations import RegionRecords, RegionStatus, RegisterCudaRegion

if TYPE_CHECKING:
    from tensord.daemon.processes.child import WorkerProcess

_KINDS = {"system": "system", "cuda": "CUDA"}


def status(
    regions: Mapping[str, RegisteredRegion], leaving: Iterable[RegisteredRegion], request: RegionStatus
) -> bytes:
    """Returns a JSON array of the regions of the request's kind ("system" or "cuda"), or of only the region that it names.

    ``regions``: by name. ``leaving``: regions that were unregistered and are still used by requests.

    Raises NotFound: no region has the name, or it is of the other kind.
    """
    found = {region.request.name: region for region in leaving}
    found |= {name: region for name, region in regions.items() if region.state is not RegionState.REGISTERING}
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


def _described(request: Registration) -> dict[str, str | int]:
    """Returns a region's fields as clients see them. A CUDA handle is left out: it would let any client open the memory."""
    if isinstance(request, RegisterCudaRegion):
        return {"name": request.name, "device_id": request.device_id, "byte_size": request.byte_size}
    return {"name": request.name, "key": request.key, "offset": request.offset, "byte_size": request.byte_size}


async def records(
    regions: Mapping[str, RegisteredRegion],
    leaving: Sequence[RegisteredRegion],
    workers: Sequence[WorkerProcess],
    name: str,
) -> bytes:
    """Returns a JSON array with all that is known of the named region, or of all regions ("").

    ``regions``: by name. ``leaving``: regions that were unregistered and are still used by requests.

    Raises NotFound: no region has the name.
    """
    found = [region for region in (*regions.values(), *leaving) if name in ("", region.request.name)]
    if name and not found:
        raise NotFound(f"Unable to find shared memory region: '{name}'")
    held: dict[str, int] = {}
    left: dict[str, int] = {}
    for answer in await asyncio.gather(*(_ask_use(worker, name) for worker in workers)):
        for key, (now, before) in answer.items():
            held[key] = held.get(key, 0) + now
            left[key] = left.get(key, 0) + before
    names = {worker.incarnation: worker.name for worker in workers}
    return msgspec.json.encode(
        [
            region.record(
                [names[i] for i in sorted(region.holders) if i in names],
                (left if region.state is RegionState.UNREGISTERING else held).get(region.request.name, 0),
            )
            for region in sorted(found, key=lambda region: region.request.name)
        ]
    )


async def _ask_use(worker: WorkerProcess, name: str) -> dict[str, tuple[int, int]]:
    """Asks a worker how many tensors of requests are in region ``name``, or in every region (""). Empty: the worker is gone.

    Returns, by name: tensors in the region that has the name now, and tensors in unregistered regions that had it.
    """
    try:
        answer, fds = await worker.call(RegionRecords(name))
    except ServingError:
        return {}
    descriptors.close(fds)
    return msgspec.json.decode(answer, type=dict[str, tuple[int, int]])


def by_owner(regions: Iterable[RegisteredRegion]) -> dict[str, dict[str, int]]:
    """Returns, for each owner (a user or host), the number ("count") and the bytes ("byte_size") of its regions."""
    found: dict[str, dict[str, int]] = {}
    for region in regions:
        entry = found.setdefault(region.peer.owner, {"count": 0, "byte_size": 0})
        entry["count"] += 1
        entry["byte_size"] += region.request.byte_size
    return found


def by_kind(regions: Iterable[RegisteredRegion]) -> dict[str, tuple[int, int]]:
    """Returns the number and the bytes of all regions of each kind, "system" or "cuda"."""
    sizes: dict[str, list[int]] = {kind: [] for kind in _KINDS}
    for region in regions:
        sizes[region.kind].append(region.request.byte_size)
    return {kind: (len(found), sum(found)) for kind, found in sizes.items()}
