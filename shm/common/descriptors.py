"""Finds the file descriptors that came with a message on a Unix socket (SCM_RIGHTS)."""

from __future__ import annotations

import array
import socket
from collections.abc import Iterable


def descriptors_in(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """Returns the file descriptors that came with a message. ``ancillary`` is the ancillary data of ``recvmsg``."""
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return list(fds)
