"""Defines what the daemon stores of a registered region, such as the region's state and the client that registered it."""

from __future__ import annotations

import asyncio
import datetime
import enum
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensord.shm.device_names import gpu_of
from tensord.shm.operations import Peer, RegisterCudaRegion, RegisterSystemRegion

if TYPE_CHECKING:
    from tensord.daemon.processes.child import WorkerProcess


Registration = RegisterSystemRegion | RegisterCudaRegion


class RegionState(enum.Enum):
    """The states that a region can have."""

    #: Workers are registering it. It is not listed yet.
    REGISTERING = "registering"
    #: All workers have it.
    REGISTERED = "registered"
    #: Its owner registers it again, and each worker has the former region or the new one.
    RENEWING = "renewing"
    #: No later request finds it; workers finish those that use it.
    UNREGISTERING = "unregistering"


@dataclass(slots=True, eq=False)
class RegisteredRegion:
    """A region that a client has registered."""

    kind: str
    request: Registration
    #: The client that registered it.
    peer: Peer
    #: When it was registered, in seconds of the epoch: for people.
    registered_at: float
    #: The first GPU of the workers on whose device it is; "": any worker is as near.
    device: str = ""
    state: RegionState = RegionState.REGISTERING
    #: The object of a system region, kept for workers that come later; owned here.
    fd: int = -1
    #: Incarnations of the workers that have it, or were asked to take it.
    holders: set[int] = field(default_factory=set)
    #: Tells when it is to be unregistered by itself; None: never.
    watch: EndWatch | None = None
    #: Set at the end of each change of state.
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def is_near(self, worker: WorkerProcess) -> bool:
        """Returns False if the region's memory is on a GPU that only other workers use. Otherwise returns True."""
        return self.device in ("", gpu_of(worker.device))

    def close(self) -> None:
        """Closes the file descriptors of the region. May be called again."""
        if self.watch is not None:
            self.watch.close()
            self.watch = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def record(self, workers: list[str], leases: int) -> dict[str, Any]:
        """Returns what operators see of the region, as values for JSON.

        ``workers``: the names of the workers that map the region. ``leases``: how many tensors use it now.
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
    """Returns whether a region that the client ``owner`` registered also belongs to the client ``peer``.

    A region from a Unix socket belongs to all clients of the same user on a Unix socket. A region from TCP belongs to all
    clients on TCP. Every region also belongs to the clients on the daemon's control socket.
    """
    return peer.kind == "operator" or (peer.kind == owner.kind and (peer.kind == "tcp" or peer.uid == owner.uid))


class EndWatch:
    """Calls ``ended`` once, when the file descriptor ``end`` becomes readable. The caller may close ``end`` at any time.

    The constructor raises OSError if no file descriptor is free for a duplicate of ``end``.
    """

    def __init__(self, end: int, ended: Callable[[], None]) -> None:
        #: The duplicate of ``end``; -1 once closed.
        self.fd = os.dup(end)
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.fd, self._readable)

    def _readable(self) -> None:
        self.close()
        self._ended()

    def pause(self) -> None:
        """Stops watching the constructor's file descriptor. ``ended`` is not called until ``resume`` is called."""
        if self.fd >= 0:
            self._loop.remove_reader(self.fd)

    def resume(self) -> None:
        """Ends a ``pause``: calls the constructor's ``ended`` as soon as the constructor's file descriptor is readable."""
        if self.fd >= 0:
            self._loop.add_reader(self.fd, self._readable)

    def close(self) -> None:
        """Stops watching the file descriptor that the constructor got. May be called again."""
        if self.fd >= 0:
            self._loop.remove_reader(self.fd)
            os.close(self.fd)
            self.fd = -1
