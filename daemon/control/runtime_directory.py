"""The folder of a daemon's sockets if no configuration names one: one rule for the daemon and for tensorctl.

    as a service      $RUNTIME_DIRECTORY, which systemd makes: /run/tensord
    otherwise         $XDG_RUNTIME_DIR/tensord, else /tmp/tensord-UID: the user's own, nobody else may look into it

tensorctl looks into the user's own first, then into the service's. A further daemon of the same user has the number of its
process in the name of its control socket. A folder of ours that somebody else could have made, or can write into, is not used by
either.
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


def of_service(environment: Mapping[str, str]) -> Path | None:
    """Returns the folder that systemd made for this process; None: it is no service."""
    first = environment.get("RUNTIME_DIRECTORY", "").split(":")[0]
    return Path(first) if first else None


def own(environment: Mapping[str, str]) -> Path:
    """Returns the user's folder, creating it if needed. Raises OSError: it cannot be made, or it is not the user's alone."""
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
    """Returns the folders in which tensorctl looks, in order: that of this service, those of the user, that of the service."""
    service = of_service(environment)
    return [*([service] if service else ()), *(path for path in _owns(environment) if not _bad(path)), SERVICE]


def further(name: str, pid: int) -> str:
    """Names the socket of a further daemon of a user: ``control-4711.sock``."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}-{pid}{dot}{suffix}"


def sockets(folder: Path, name: str) -> list[Path]:
    """Returns the socket of that name in a folder, and those of further daemons that are there."""
    return [folder / name, *sorted(folder.glob(further(name, 0).replace("0", "[0-9]*")))]


def _owns(environment: Mapping[str, str]) -> list[Path]:
    """Returns the user's possible folders.

    A shell may lack the variable that the daemon was started with, so both are searched.
    """
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
