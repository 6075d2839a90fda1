"""Checks a region's registration against the operator's rules and the regions that exist. Does no I/O."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from tensord.config.options import RegionsOptions
from tensord.daemon.regions.region_record import RegisteredRegion, Registration
from tensord.shm.errors import InvalidArgument, Unavailable, Unsupported
from tensord.shm.operations import Peer, RegisterCudaRegion, RegisterSystemRegion
from tensord.shm.regions import refused

_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,255}")
_LIMIT = (1 << 63) - 1
_HANDLE_SIZE = 64


def check_enabled(options: RegionsOptions) -> None:
    """Raises Unsupported if the options allow no regions."""
    if not options.enabled:
        raise Unsupported(
            "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
        )


def check_form(options: RegionsOptions, request: Registration) -> None:
    """Checks the name and the CUDA handle of a region that a client registers.

    Raises Unsupported if ``options`` allow no regions. Raises InvalidArgument if the name or the handle is malformed.
    """
    check_enabled(options)
    if isinstance(request, RegisterCudaRegion) and len(request.raw_handle) != _HANDLE_SIZE:
        raise InvalidArgument(
            f"failed to register shared memory region: invalid args: a CUDA handle of {len(request.raw_handle)} bytes, "
            f"{_HANDLE_SIZE} are expected"
        )
    if not _NAME.fullmatch(request.name):
        raise InvalidArgument("a region's name has 1 to 255 characters, none of them a control character")


def check_fields(options: RegionsOptions, request: Registration) -> None:
    """Raises InvalidArgument if the size, offset or key of a region that a client registers is invalid or not allowed."""
    name = request.name
    offset = request.offset if isinstance(request, RegisterSystemRegion) else 0
    if request.byte_size < 1 or offset < 0:
        raise refused(
            name, f"invalid args: byte_size {request.byte_size} must be at least 1, offset {offset} at least 0"
        )
    if request.byte_size + offset > _LIMIT:
        raise InvalidArgument(
            f"Integer overflow detected: byte_size ({request.byte_size}) + offset ({offset}) exceeds maximum "
            f"value ({_LIMIT}) for region '{name}'"
        )
    prefixes = options.key_prefixes
    key = request.key if isinstance(request, RegisterSystemRegion) else ""
    if prefixes and key and not key.lstrip("/").startswith(prefixes):
        raise refused(name, f"keys must begin like one of {list(prefixes)}, '{key[:220]}' does not")


def repeats(region: RegisteredRegion, request: Registration, peer: Peer, sealed: int) -> bool:
    """Returns whether ``request`` registers the memory of the existing ``region`` again, for the same user or TCP host.

    POSIX shared memory without a memfd is the same memory if key, offset and size are equal.
    ``peer``: the client that sent ``request``. ``sealed``: the memfd that the client sent, or -1 if the client sent no memfd.
    """
    there = region.request
    if peer.owner != region.peer.owner or request.byte_size != there.byte_size:
        return False
    if isinstance(request, RegisterCudaRegion):
        return isinstance(there, RegisterCudaRegion) and (request.raw_handle, request.device_id) == (
            there.raw_handle,
            there.device_id,
        )
    if not isinstance(there, RegisterSystemRegion) or request.offset != there.offset:
        return False
    if sealed >= 0 or there.access == "sealed":
        return sealed >= 0 and region.fd >= 0 and os.path.sameopenfile(sealed, region.fd)
    return request.key.lstrip("/") == there.key.lstrip("/")


def check_bounds(
    options: RegionsOptions, name: str, byte_size: int, peer: Peer, registered: Iterable[tuple[Peer, int]]
) -> None:
    """Checks whether the limits in ``options`` allow a new region ``name`` of ``byte_size`` bytes.

    ``peer``: the client that registers the new region. ``registered``: the client and the bytes of each existing region.
    Raises InvalidArgument if the new region is larger than one region may be. Raises Unavailable if there would be too many
    regions or too many bytes, either in all regions together or in the regions of the user or TCP host of ``peer``.
    """
    if byte_size > options.max_byte_size:
        raise refused(name, f"{byte_size} bytes, at most {options.max_byte_size} are allowed")
    count = total = own_count = own_total = 0
    for owner, size in registered:
        count += 1
        total += size
        if owner.owner == peer.owner:
            own_count += 1
            own_total += size
    bounds = (
        (count, options.max_count, "regions are registered"),
        (own_count, options.max_owner_count, "regions are registered by this client's user or host"),
    )
    for found, limit, what in bounds:
        if found >= limit:
            raise refused(name, f"{found} {what}, at most {limit} are allowed", Unavailable)
    bounds = (
        (total, options.max_total_byte_size, "of all regions"),
        (own_total, options.max_owner_byte_size, "of this client's user or host"),
    )
    for found, limit, what in bounds:
        if found + byte_size > limit:
            raise refused(name, f"{byte_size} bytes beside {found} {what}, at most {limit} are allowed", Unavailable)
