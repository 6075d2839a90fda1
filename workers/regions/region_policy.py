"""Whose objects may be registered, and how each of them is used. The operator's rules of ``[regions]``, decided once per region.

whose    the daemon's own user's and those shared with its groups; the configured users' and groups'
for whom a client on a unix socket must itself be allowed to read and write the object: the daemon lends nobody its rights
how      snapshot where a rule says so, else guarded where a rule says so, else ``regions.access``; snapshot for want of the guard
"""

from __future__ import annotations

import os
import stat

from tensord.config import accounts
from tensord.config.options import Regions
from tensord.shm import guard
from tensord.shm.errors import InvalidArgument
from tensord.shm.operations import Peer, RegisterSystemRegion


class RegionPolicy:
    """One per worker; the names in the options are known to exist on this host."""

    def __init__(self, options: Regions) -> None:
        self._owners = {os.geteuid(), *map(accounts.user_id, options.owners)}
        self._groups = {os.getegid(), *os.getgroups(), *map(accounts.group_id, options.groups)}
        self._access = options.access
        #: Key prefixes and owners for which each access is chosen, the first that holds.
        self._rules = (
            ("snapshot", options.snapshot_key_prefixes, frozenset(map(accounts.user_id, options.snapshot_owners))),
            ("guarded", options.guarded_key_prefixes, frozenset(map(accounts.user_id, options.guarded_owners))),
        )

    def check(self, request: RegisterSystemRegion, found: os.stat_result) -> None:
        """Raises InvalidArgument: the object is nobody's that may use this server's regions, or not the client's to give."""
        welcome = found.st_uid in self._owners or (_group_may(found) and found.st_gid in self._groups)
        if not welcome:
            raise InvalidArgument(
                f"shared memory region '{request.name}': '{request.key}' belongs to another user and is not shared with the "
                "daemon's group"
            )
        if request.peer.kind == "unix" and not _may_use(request.peer, found):
            raise InvalidArgument(
                f"shared memory region '{request.name}': '{request.key}' is not readable and writable for you"
            )

    def access(self, request: RegisterSystemRegion, found: os.stat_result) -> str:
        """``guarded`` or ``snapshot``."""
        if not guard.available:
            return "snapshot"
        key = request.key.lstrip("/")
        for access, prefixes, owners in self._rules:
            if key.startswith(prefixes) or found.st_uid in owners:
                return access
        return self._access


def _group_may(found: os.stat_result) -> bool:
    group = stat.S_IRGRP | stat.S_IWGRP
    return found.st_mode & group == group


def _may_use(peer: Peer, found: os.stat_result) -> bool:
    """What the kernel would say if the peer opened the object itself."""
    if peer.uid == 0:
        return True
    if peer.uid == found.st_uid:
        wanted = stat.S_IRUSR | stat.S_IWUSR
    elif found.st_gid == peer.gid or found.st_gid in peer.groups:
        wanted = stat.S_IRGRP | stat.S_IWGRP
    else:
        wanted = stat.S_IROTH | stat.S_IWOTH
    return found.st_mode & wanted == wanted
