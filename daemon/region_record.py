"""One registration of a client's memory: what was asked, by whom, and where it is in its life."""

from __future__ import annotations

import asyncio
import datetime
import enum
from dataclasses import dataclass, field
from typing import Any

from daemon.end_watch import EndWatch
from shm.messages import Peer, RegisterCudaRegion, RegisterSystemRegion

Registration = RegisterSystemRegion | RegisterCudaRegion


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
    #: Who registered it.
    peer: Peer
    #: When, in seconds of the epoch: for people.
    registered_at: float
    #: The only device whose workers can use it; "": any.
    device: str = ""
    state: RegionState = RegionState.REGISTERING
    #: A system region's object, kept for workers that come later; owned here.
    fd: int = -1
    #: Incarnations of the workers that have it.
    holders: set[int] = field(default_factory=set)
    #: Tells when it is to go by itself; None: never.
    watch: EndWatch | None = None
    #: Set at the end of each change of state.
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def record(self, workers: list[str], leases: int) -> dict[str, Any]:
        """Everything known of it, for operators.

        Args:
          workers: the names of those that have it.
          leases: how many tensors of requests are in it now.
        """
        request, peer = self.request, self.peer
        system = request if isinstance(request, RegisterSystemRegion) else None
        registered = datetime.datetime.fromtimestamp(self.registered_at, datetime.UTC)
        return {
            "name": request.name,
            "kind": self.kind,
            "key": system.key if system else "",
            "offset": system.offset if system else 0,
            "byte_size": request.byte_size,
            "state": self.state.value,
            "access": system.access if system else self.kind,
            "owner": peer.owner,
            "pid": peer.pid,
            "address": peer.address,
            "registered": registered.isoformat(timespec="seconds"),
            "workers": workers,
            "leases": leases,
        }


def is_owner(peer: Peer, owner: Peer) -> bool:
    """Whether what ``owner`` registered is the peer's as well: a user's own, anybody's on TCP, and everything the operator's."""
    return peer.kind == "operator" or (peer.kind == owner.kind and (peer.kind == "tcp" or peer.uid == owner.uid))
