"""Finds the folder of a daemon's sockets if the configuration gives no path for a socket.

    as a service      $RUNTIME_DIRECTORY, which systemd makes: /run/tensord
    otherwise         the user's folder: $XDG_RUNTIME_DIR/tensord or, if that cannot be used, /tmp/tensord-UID

tensorctl searches the user's folder first, then the service's folder. A user's folder is used only if it belongs to the user
and no other user has access to it. A second daemon of a user has its process id in the file name of its control socket.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

SERVICE = Path("/run/tensord")
TEMPORARY = Path("/tmp")
#: The name of the operator's socket in its folder.
CONTROL_SOCKET = "control.sock"


def of_service(environment: Mapping[str, str], variable: str = "RUNTIME_DIRECTORY") -> Path | None:
    """Returns the folder that systemd made for this process's sockets, or None if systemd made no folder.

    ``variable``: "STATE_DIRECTORY" for the folder that systemd keeps for this process's data.
    """
    first = environment.get(variable, "").split(":")[0]
    return Path(first) if first else None


def own(environment: Mapping[str, str]) -> Path:
    """Returns the user's folder for sockets, which is created if needed.

    It is $XDG_RUNTIME_DIR/tensord or, if that cannot be used, /tmp/tensord-UID. Raises OSError if neither can be used safely.
    """
    *first, last = _owns(environment)
    for path in first:
        with contextlib.suppress(OSError):
            return _made(path)
    return _made(last)


def _made(path: Path) -> Path:
    path.mkdir(mode=0o700, exist_ok=True)
    _check(path)
    return path


def searched(environment: Mapping[str, str]) -> list[Path]:
    """Returns the folders in which tensorctl looks for sockets."""
    service = of_service(environment)
    return [*([service] if service else ()), *(path for path in _owns(environment) if not _bad(path)), SERVICE]


def further(name: str, pid: int) -> str:
    """Inserts ``pid`` into a socket's file name: control.sock becomes control-4711.sock."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}-{pid}{dot}{suffix}"


def sockets(folder: Path, name: str) -> list[Path]:
    """Returns ``folder / name`` and each existing path with a process id in this name, such as control-4711.sock."""
    return [folder / name, *sorted(folder.glob(further(name, 0).replace("0", "[0-9]*")))]


def _owns(environment: Mapping[str, str]) -> list[Path]:
    # Two, because a shell may lack the daemon's XDG_RUNTIME_DIR.
    temporary = TEMPORARY / f"tensord-{os.geteuid()}"
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    return [Path(runtime, "tensord"), temporary] if runtime else [temporary]


def _check(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(0, f"'{path}' is not a folder of this user alone")


def _bad(path: Path) -> bool:
    try:
        _check(path)
    except OSError:
        return True
    return False
