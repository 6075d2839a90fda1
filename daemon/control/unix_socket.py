"""Binds the supervisor's Unix sockets in the file system: its own, and those on which fronts listen."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from tensord.daemon.control import runtime_directory


def path(configured: str, name: str, environment: Mapping[str, str]) -> Path | None:
    """Returns the configured path of a socket, else ``name`` in systemd's runtime directory; None: there is neither."""
    if configured:
        return Path(configured)
    folder = runtime_directory.of_service(environment)
    return None if folder is None else folder / name


def bind(path: Path, kind: int, mode: int) -> socket.socket:
    """Binds a Unix socket, which does not listen yet, to a path whose file has this mode from the start.

    Raises OSError: the path cannot be bound.
    """
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
    """Removes the path of a socket on which no process listens, as a killed daemon leaves it; no other file.

    It never waits: a process that listens and accepts nothing has a full backlog, in which a connection would wait for ever.
    """
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except BlockingIOError:
            pass  # its backlog is full: a process listens
