"""How much may be registered: counts and bytes, all together and per owner. Pure.

An owner is who asked, not whose object it is (``Peer.owner``): a user on unix sockets, a host on TCP.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensord.config.options import Regions
from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.shm.operations import Peer


def check(options: Regions, name: str, byte_size: int, peer: Peer, registered: Iterable[tuple[Peer, int]]) -> None:
    """Whether one more region of that size is within every bound.

    Args:
      registered: who registered each region that is there, and its size.
    Raises: InvalidArgument: too large by itself.  Unavailable: together with what is there; both numbers are named.
    """
    if byte_size > options.max_byte_size:
        raise InvalidArgument(
            f"failed to register shared memory region '{name}': "
            f"{byte_size} bytes, at most {options.max_byte_size} are allowed"
        )
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
            raise Unavailable(
                f"failed to register shared memory region '{name}': {found} {what}, at most {limit} are allowed"
            )
    bounds = (
        (total, options.max_total_byte_size, "of all regions"),
        (own_total, options.max_owner_byte_size, "of this client's user or host"),
    )
    for found, limit, what in bounds:
        if found + byte_size > limit:
            raise Unavailable(
                f"failed to register shared memory region '{name}': {byte_size} bytes beside {found} {what}, "
                f"at most {limit} are allowed"
            )
