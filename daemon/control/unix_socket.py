"""Binds the supervisor's Unix sockets in the file system: its own, and those on which fronts listen."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from tensord.daemon.control import runtime_directory


def path(configured: str, name: str, environment: Mapping[str, str]) -> Path | None:
    """Returns the path ``configured``. If this is "", returns the path of the file ``name`` in the folder RUNTIME_DIRECTORY.

    systemd sets RUNTIME_DIRECTORY in ``environment``. Returns None if ``configured`` is "" and RUNTIME_DIRECTORY is not set.
    """
    if configured:
        return Path(configured)
    folder = runtime_directory.of_service(environment)
    return None if folder is None else folder / name


def bind(path: Path, kind: int, mode: int) -> socket.socket:
    """Binds a Unix socket to a path, with the file mode ``mode`` from the start. The socket does not listen yet.

    ``kind``: the type of the socket, such as SOCK_STREAM. Raises OSError if the path cannot be bound.
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
    """Removes a Unix socket's path if no process listens on it. Never waits.

    ``kind``: the type of the socket, such as SOCK_STREAM.
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
