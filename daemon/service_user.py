"""Runs ``tensord check`` as the user of the installed service, if root calls it, so that it finds what the service will find.

tensord.service with its drop-ins (systemctl show) ─▶ user, groups, working directory, cache, variables ─▶ this process
"""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tensord.config import accounts

T = TypeVar("T")

_UNIT = "tensord.service"
_PROPERTIES = (
    *("LoadState", "User", "Group", "SupplementaryGroups", "WorkingDirectory"),
    *("CacheDirectory", "CacheDirectoryMode", "Environment", "ProtectHome"),
)
#: Where systemd makes the directories of CacheDirectory=.
_CACHES = "/var/cache"
#: Where nothing is to be seen for a service with ProtectHome=.
_HOMES = ("/home/", "/root/", "/run/user/")
#: Variables that name places of the one who asks, which the service does not have.
_OWN_PLACES = ("TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME")
#: Seconds within which systemd answers.
_TIMEOUT = 10.0


class UnknownUser(Exception):
    """Raised if a user does not exist, or cannot run this program; the message is a sentence for the operator."""


@dataclass(frozen=True, slots=True)
class Service:
    """Describes how systemd runs a service: user, groups, directories and environment variables."""

    user: str
    #: The group; "": the user's own.
    group: str = ""
    #: Further groups.
    groups: tuple[str, ...] = ()
    #: Its working directory; "": that of whoever asks.
    folder: str = ""
    #: Its cache directory; "": the user's own.
    cache: str = ""
    #: The mode with which the cache directory is made.
    cache_mode: int = 0o755
    #: Variables that the unit sets.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Whether the service's sandbox hides users' home directories.
    without_homes: bool = False


def installed() -> Service | None:
    """Returns the installed tensord.service as systemd describes it, drop-ins included; None: it, or systemd, is not there."""
    command = ["systemctl", "show", _UNIT, *(f"--property={name}" for name in _PROPERTIES)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parsed(done.stdout) if done.returncode == 0 else None


def parsed(shown: str) -> Service | None:
    """Reads the output of ``systemctl show`` for the service's unit; None: the unit is not installed."""
    found = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    if found.get("LoadState") != "loaded":
        return None
    caches = found.get("CacheDirectory", "").split()
    return Service(
        found.get("User") or "root",
        found.get("Group", ""),
        tuple(found.get("SupplementaryGroups", "").split()),
        # "!" before it: it may be missing.
        found.get("WorkingDirectory", "").removeprefix("!"),
        # ":" and what follows name links to it.
        os.path.join(_CACHES, caches[0].partition(":")[0]) if caches else "",
        int(found.get("CacheDirectoryMode") or "0755", 8),
        dict(each.split("=", 1) for each in shlex.split(found.get("Environment", "")) if "=" in each),
        found.get("ProtectHome") in ("yes", "tmpfs"),
    )


def become(service: Service) -> None:
    """Switches this process, which runs as root, to the service's user, groups, working directory and environment variables.

    Creates the service's cache directory as systemd would, if it is missing. An environment variable that the caller has set is
    kept, except for those that name the caller or the caller's directories, which are replaced or removed.
    Raises: UnknownUser: the user or a group does not exist, or cannot use this Python or the working directory.
    """
    user = _found(lambda name: pwd.getpwuid(accounts.user_id(name)), service.user)
    group = _found(accounts.group_id, service.group) if service.group else user.pw_gid
    others = [_found(accounts.group_id, name) for name in service.groups]
    member = [each.gr_gid for each in grp.getgrall() if user.pw_name in each.gr_mem]
    if service.cache and not os.path.exists(service.cache):
        os.mkdir(service.cache, 0o700)
        os.chown(service.cache, user.pw_uid, group)
        os.chmod(service.cache, service.cache_mode)
    for name in _OWN_PLACES:
        os.environ.pop(name, None)
    for name, value in service.environment.items():
        os.environ.setdefault(name, value)
    os.environ |= {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
    if service.cache:
        os.environ["CACHE_DIRECTORY"] = service.cache
    os.setgroups(sorted({group, *others, *member}))
    os.setresgid(group, group, group)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
    os.umask(0o027)
    folder = user.pw_dir if service.folder == "~" else service.folder
    try:
        os.chdir(folder or os.getcwd())
    except OSError as error:
        raise UnknownUser(
            f"user {user.pw_name} cannot enter the working directory {folder or 'of this call'}: {error.strerror}"
        ) from None
    for needed in map(os.path.realpath, (sys.executable, __file__)):
        if service.without_homes and needed.startswith(_HOMES):
            raise UnknownUser(
                f"{needed} is hidden from {_UNIT} by ProtectHome=: install tensord and its Python elsewhere, or say "
                "ProtectHome=read-only in a drop-in"
            )
        if not os.access(needed, os.R_OK):
            place = Path(needed).parent
            raise UnknownUser(f"user {user.pw_name} cannot use {place}: install tensord and its Python where it can")


def _found(find: Callable[[str], T], name: str) -> T:
    """Looks up a user or a group by name with ``find``. Raises UnknownUser: the host has none of that name."""
    try:
        return find(name)
    except (KeyError, OverflowError):
        raise UnknownUser(f"there is no user or group {name!r} on this host") from None
