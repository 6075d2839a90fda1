"""Binds the supervisor's own unix sockets in the file system."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from tensord.daemon.control import runtime_directory


def path(configured: str, name: str, environment: Mapping[str, str]) -> Path | None:
    """Returns the configured path, else that name in systemd's runtime directory, else None."""
    if configured:
        return Path(configured)
    folder = runtime_directory.of_service(environment)
    return None if folder is None else folder / name


def bind(path: Path, kind: int, mode: int) -> socket.socket:
    """Binds a socket (not listening yet) whose file has that mode from its first moment on. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    try:
        remove_stale(path, kind)
        before = os.umask(0o777 & ~mode)
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
    except OSError:
        sock.close()
        raise
    return sock


def remove_stale(path: Path, kind: int) -> None:
    """Removes a socket that nobody listens on, which a killed predecessor left; anything else stays, and bind reports it.

    Raises OSError.
    """
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, kind) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
