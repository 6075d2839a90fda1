"""Has a simulated process run out of descriptors: whatever takes one may fail, and those that are sent to it are dropped.

The descriptors of all simulated processes are this one's. So a process does not have as many as it may: it draws, each time that
it takes one, whether there is none.
"""

from __future__ import annotations

import array
import builtins
import contextlib
import errno
import io
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tensord.shm.common.descriptors import descriptors_in
from tests.simulation.scheduler import Scheduler


@contextlib.contextmanager
def in_place(scheduler: Scheduler) -> Iterator[None]:
    """Has whatever takes descriptors fail in a process that lacks them, as long as the block runs."""

    def refuse() -> None:
        if scheduler.lacks():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def taking(take: Callable[..., Any]) -> Callable[..., Any]:
        def taken(*words: Any, **named: Any) -> Any:
            refuse()
            return take(*words, **named)

        return taken

    mapped, received, received_into = mmap.mmap, socket.socket.recvmsg, socket.socket.recvmsg_into

    def mapping(fd: int, *words: Any, **named: Any) -> mmap.mmap:
        if fd >= 0:
            refuse()  # it duplicates the descriptor
        return mapped(fd, *words, **named)

    def given(content: Any, ancillary: list[tuple[int, int, bytes]], flags: int, address: Any) -> Any:
        fds = descriptors_in(ancillary)
        kept = next((number for number in range(len(fds)) if scheduler.lacks()), len(fds))
        if kept < len(fds):
            for fd in fds[kept:]:
                os.close(fd)
            rights = array.array("i", fds[:kept]).tobytes()
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if kept else []
            flags |= socket.MSG_CTRUNC
        return content, ancillary, flags, address

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (os, "dup", taking(os.dup)),
            (os, "memfd_create", taking(os.memfd_create)),
            (os, "pipe2", taking(os.pipe2)),
            (os, "pidfd_open", taking(os.pidfd_open)),
            (os, "listdir", taking(os.listdir)),
            (os, "scandir", taking(os.scandir)),
            (io, "open", taking(io.open)),
            (builtins, "open", taking(builtins.open)),
            (socket, "socketpair", taking(socket.socketpair)),
            (socket.socket, "accept", taking(socket.socket.accept)),
            (socket.socket, "recvmsg", lambda *words: given(*received(*words))),
            (socket.socket, "recvmsg_into", lambda *words: given(*received_into(*words))),
            (mmap, "mmap", mapping),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
