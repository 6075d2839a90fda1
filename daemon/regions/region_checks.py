"""Which registrations may be: by their own fields, by the operator's rules, and beside what is there. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from tensord.config.options import Regions
from tensord.daemon.regions import region_quota
from tensord.daemon.regions.region_record import Region, Registration
from tensord.shm.errors import InvalidArgument, Unsupported
from tensord.shm.operations import Peer, RegisterCudaRegion, RegisterSystemRegion

_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,255}")
_LIMIT = (1 << 63) - 1
_HANDLE_SIZE = 64


def check_enabled(options: Regions) -> None:
    """Raises Unsupported: regions are not served at all."""
    if not options.enabled:
        raise Unsupported(
            "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
        )


def check_form(options: Regions, request: Registration) -> None:
    """Whether regions are served at all, and that one could be named so.

    Raises: Unsupported, InvalidArgument.
    """
    check_enabled(options)
    if isinstance(request, RegisterCudaRegion) and len(request.raw_handle) != _HANDLE_SIZE:
        raise InvalidArgument(
            f"failed to register shared memory region: invalid args: a CUDA handle of {len(request.raw_handle)} bytes, "
            f"{_HANDLE_SIZE} are expected"
        )
    if not _NAME.fullmatch(request.name):
        raise InvalidArgument("a region's name has 1 to 255 characters, none of them a control character")


def check_fields(options: Regions, request: Registration) -> None:
    """Raises InvalidArgument: its size, offset or key cannot be, or is not allowed."""
    name = request.name
    offset = request.offset if isinstance(request, RegisterSystemRegion) else 0
    if request.byte_size < 1 or offset < 0:
        raise InvalidArgument(
            f"failed to register shared memory region '{name}': invalid args: byte_size {request.byte_size} must be at least 1, "
            f"offset {offset} at least 0"
        )
    if request.byte_size + offset > _LIMIT:
        raise InvalidArgument(
            f"Integer overflow detected: byte_size ({request.byte_size}) + offset ({offset}) exceeds maximum "
            f"value ({_LIMIT}) for region '{name}'"
        )
    prefixes = options.key_prefixes
    key = request.key if isinstance(request, RegisterSystemRegion) else ""
    if prefixes and key and not key.lstrip("/").startswith(prefixes):
        raise InvalidArgument(
            f"failed to register shared memory region '{name}': keys must begin like one of {list(prefixes)}, "
            f"'{key[:220]}' does not"
        )


def check_quota(options: Regions, request: Registration, peer: Peer, there: Iterable[Region]) -> None:
    """Raises InvalidArgument, Unavailable: too large, or too much together with what is there."""
    sizes = [(region.peer, region.request.byte_size) for region in there]
    region_quota.check(options, request.name, request.byte_size, peer, sizes)


def repeats(region: Region, request: Registration, peer: Peer, sealed: int) -> bool:
    """Whether a registration asks once more for what is there: of the same owner and the same memory.

    A client that was restarted does: its memory has the same key, and may be another object by now.

    Args:
      sealed: the memfd that came with it, which must be the one that is there; -1: none.
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
