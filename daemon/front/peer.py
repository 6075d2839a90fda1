"""Identifies the client of a connection by what the kernel says; nothing that the client itself claims is used.

unix socket   pid, uid, gid and groups at the time of connecting, and a descriptor of the client's process (pidfd)
TCP           the address, which says nothing about who the client is
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
from collections.abc import Iterator

from tensord.shm import descriptors
from tensord.shm.errors import Unavailable
from tensord.shm.operations import ANONYMOUS, Peer

_CREDENTIALS = struct.Struct("iII")
#: asm-generic/socket.h; the socket module has no names for them. SO_PEERPIDFD is there since Linux 6.5.
_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77
_MAX_GROUPS = 1024


@contextlib.contextmanager
def _opened(fd: int) -> Iterator[socket.socket]:
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()


def peer_of(fd: int) -> Peer:
    """Returns who the client on the socket ``fd`` is, or ANONYMOUS if the client has disconnected."""
    try:
        with _opened(fd) as sock:
            if sock.family != socket.AF_UNIX:
                name = sock.getpeername()
                return Peer("tcp", f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "")
            found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, gid = _CREDENTIALS.unpack(found)
            return Peer("unix", "", pid, uid, gid, _groups(sock))
    except (OSError, ValueError):  # as of -1
        return ANONYMOUS


def owner_of(connection: socket.SocketType, address: object) -> str:
    """Returns the name of the client of a connection (``Peer.owner``): a host, or a Unix user.

    ``address``: the address of the client, as ``accept`` returned it.
    """
    return f"tcp {address[0]}" if isinstance(address, tuple) else peer_of(connection.fileno()).owner


def _groups(sock: socket.socket) -> tuple[int, ...]:
    try:
        found = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_GROUPS * 4)
    except OSError:  # more than that: then only the first counts
        return ()
    return struct.unpack(f"{len(found) // 4}I", found)


class ConnectionEnd:
    """Tells any process, by a file descriptor, that one client connection has been closed.

    The descriptor is the reading end of a pipe. The front closes the writing end together with the connection, or the kernel
    does if the front dies.
    """

    __slots__ = ("_closed", "_reader", "_writer")

    def __init__(self) -> None:
        self._reader = self._writer = -1
        self._closed = False

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """Yields a file descriptor that becomes readable when the client's connection ends. The ``with`` block's end closes it.

        Raises Unavailable if the process can open no further descriptor.
        """
        try:
            if self._reader < 0:
                self._reader, self._writer = os.pipe2(os.O_CLOEXEC)
            reader = os.dup(self._reader)
        except OSError as error:
            raise _unwatched("connection", error) from error
        if self._closed:
            self._release()
        try:
            yield reader
        finally:
            os.close(reader)

    def close(self) -> None:
        """Makes the descriptors from ``self.descriptor()`` readable, which means that the client's connection has ended."""
        self._closed = True
        self._release()

    def _release(self) -> None:
        if self._reader >= 0:
            os.close(self._reader)
            os.close(self._writer)
            self._reader = self._writer = -1

    def __repr__(self) -> str:
        return f"<ConnectionEnd {'past' if self._closed else 'to come'}>"


@contextlib.contextmanager
def end_of(fd: int, connection: ConnectionEnd, reclaim: str) -> Iterator[int]:
    """Yields a descriptor that becomes readable when the regions of a client are to be removed.

    The descriptor is open in the ``with`` block only. Yields -1 if ``reclaim`` is "never" or the socket is not a Unix one.
    Args:
      fd: the descriptor of the client's connection.
      connection: tells when that connection ends.
      reclaim: when to remove the regions: "never", "owner" (when the client's process ends) or "connection" (when the
      connection ends). "owner" means "connection" if the kernel cannot watch the process.
    Raises Unavailable if no descriptors are left.
    """
    if reclaim == "never" or peer_of(fd).kind != "unix":
        yield -1
        return
    with contextlib.ExitStack() as stack:
        end = stack.enter_context(process_of(fd)) if reclaim == "owner" else -1
        yield end if end >= 0 else stack.enter_context(connection.descriptor())


@contextlib.contextmanager
def process_of(fd: int) -> Iterator[int]:
    """Yields a pidfd of the process of the client on the socket ``fd``. The pidfd is open in the ``with`` block only.

    Yields -1 if ``fd`` is no Unix socket, or if the process is unknown. Raises Unavailable if no descriptors are left.
    """
    process = _pidfd(fd)
    try:
        yield process
    finally:
        if process >= 0:
            os.close(process)


def _pidfd(fd: int) -> int:
    try:
        with _opened(fd) as sock:
            if sock.family != socket.AF_UNIX:
                return -1
            try:
                (process,) = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))
            except OSError:
                return _pidfd_by_number(sock)
    except ValueError:  # as of -1
        return -1
    except OSError as error:
        if descriptors.lacked(error) or error.errno == errno.ENOMEM:
            raise _unwatched("client's process", error) from error
        return -1
    os.set_inheritable(process, False)
    return int(process)


def _unwatched(what: str, error: OSError) -> Unavailable:
    return Unavailable(f"the {what} cannot be watched now: {os.strerror(error.errno or 0)}")


def _pidfd_by_number(sock: socket.socket) -> int:
    (number, _, _) = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    process = os.pidfd_open(number)
    poll = select.poll()
    poll.register(sock, select.POLLHUP)
    if poll.poll(0):  # the peer is gone, and the number may be another process's
        os.close(process)
        raise ConnectionResetError
    return process
