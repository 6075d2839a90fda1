"""A lane's socket in the client: sends datagrams to one worker, and receives the worker's datagrams.

``send`` never waits. While the socket is full, datagrams are queued in order in ``LaneSocket.backlog``. A thread sends them when
there is room: perhaps the program waits for nothing on this lane. A thread that waits until this queue is empty must receive
datagrams meanwhile. Otherwise the client and the worker could wait for each other.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import socket
import struct
import time
from collections import deque
from typing import Any

from tensord_client.common.pending import WaitEnded
from tensord_client.errors import Unavailable
from tensord_client.native import wire

# Plain integers: the socket module's flags are enums, whose every operation is a Python call.
_SEND = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
#: A flag of ``receive``: it does not wait.
AT_ONCE = int(socket.MSG_DONTWAIT)
#: The first bytes of a datagram with a part of a record, of one with its last part, and of a list of one record (tensord_wire.h).
_PART, _LAST_PART, _ONE = b"\x02", b"\x03", b"\x91"


class LaneEnded(Exception):
    """The worker's end of a lane is closed, so a message could not be sent."""


def time_left(until: float | None) -> int:
    """Returns how many ns are left until ``until``, a time of ``time.monotonic()`` in seconds, or 0 if it is None: no limit.

    Raises WaitEnded if ``until`` has passed.
    """
    if until is None:
        return 0
    left = until - time.monotonic()
    if left <= 0:
        raise WaitEnded
    return max(1, int(left * 1e9))


class LaneSocket:
    """The client's socket of a lane, and a queue of datagrams that the socket had no room for."""

    def __init__(self, sock: socket.socket, spin_ns: int) -> None:
        """Takes ownership of a connected socket. ``spin_ns``: how long a receive polls before it sleeps. 0 means not at all."""
        sock.setblocking(True)
        self.sock = sock
        #: Held by the thread that sends.
        self.lock = wire.Lock()
        #: True: the worker receives nothing more; datagrams that it sent may still be unread.
        self.closing = False
        #: Datagrams that the socket would not take, each with a descriptor or -1, and the requests in it.
        self.backlog: deque[tuple[bytes, int, tuple[int, ...]]] = deque()
        #: True: a thread sends them, which uses the socket's descriptor.
        self._has_sender = False
        self._closed = False
        #: Where a datagram is received.
        self.received = bytearray(wire.MAX_DATAGRAM + 1)
        #: Held by the thread or event loop that receives; it says when that polls before it sleeps.
        self.reading = wire.Lock(spin_ns)
        #: Event loops that read the socket; each is added under ``lock``, in its thread.
        self.loops: dict[Any, None] = {}

    # ------------------------------------------------------------------------------------------------------ sending

    def send(self, datagram: bytes, fd: int = -1, ids: tuple[int, ...] = ()) -> None:
        """Sends a datagram, or queues it in ``backlog`` if the socket is full. The caller must hold ``self.lock``.

        Args:
          fd: a file descriptor to send with the datagram, or -1 for none. The caller may close it as soon as ``send`` returns.
          ids: the ids of the requests that count as unsent as long as the datagram is in ``backlog``.

        Raises: LaneEnded: the worker has closed its end of the lane. The datagram is in ``backlog`` then.  Unavailable: the
          socket is full, and this process has no descriptor to keep ``fd`` by. Nothing is sent or queued then.
        """
        try:
            if not self.backlog and self.send_at_once(datagram, fd):
                return
        except LaneEnded:
            # So that the end of the lane finds what has not left.
            self.backlog.append((datagram, -1, ids))
            raise
        try:
            kept = os.dup(fd) if fd >= 0 else -1
        except OSError as error:
            raise Unavailable(f"no descriptor is left in this process: {error.strerror}") from error
        self.backlog.append((datagram, kept, ids))
        if not self._has_sender:
            with contextlib.suppress(RuntimeError):  # there is no thread for it: whoever waits sends it
                _thread.start_new_thread(self._send_when_room, ())
                self._has_sender = True

    def send_record(self, record: bytes, ids: tuple[int, ...] = ()) -> None:
        """Sends an encoded record in as many datagrams as it needs. ``ids`` and errors are those of ``send``."""
        if len(record) <= wire.ROOM:
            self.send(wire.datagram((record,)), -1, ids)
            return
        content = memoryview(_ONE + record)
        *before, last = (content[at : at + wire.ROOM] for at in range(0, len(content), wire.ROOM))
        for part in before:
            self.send(_PART + part)
        self.send(_LAST_PART + last, -1, ids)

    def send_at_once(self, datagram: bytes | bytearray, fd: int = -1) -> bool:
        """Sends a datagram without waiting. Returns False, and queues nothing, if the socket is full.

        ``fd`` is a file descriptor to send with the datagram, or -1. Raises LaneEnded if the worker has closed its end.
        """
        try:
            if fd < 0:
                self.sock.send(datagram, _SEND)
            else:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
                self.sock.sendmsg([datagram], rights, _SEND)
        except BlockingIOError:
            return False
        except OSError as error:
            self.closing = True
            raise LaneEnded from error
        return True

    def _send_when_room(self) -> None:
        poll = select.poll()
        poll.register(self.sock, select.POLLOUT)
        left = True
        while left:
            poll.poll()
            with self.lock:
                left = self._has_sender = self._send_backlog()
        self._close_unused()

    def _send_backlog(self) -> bool:
        """Sends queued datagrams as long as there is room. Returns whether some are left. The caller has ``lock``."""
        with contextlib.suppress(LaneEnded):
            while self.backlog:
                datagram, fd, _ = self.backlog[0]
                if not self.send_at_once(datagram, fd):
                    return True
                self.backlog.popleft()
                if fd >= 0:
                    os.close(fd)
        return False

    def take_unsent(self) -> set[int]:
        """Empties ``backlog`` and returns the ids of its requests, which were not sent. The caller has ``lock``."""
        unsent = {request_id for _, _, ids in self.backlog for request_id in ids}
        for _, fd, _ in self.backlog:
            if fd >= 0:
                os.close(fd)
        self.backlog.clear()
        return unsent

    # ---------------------------------------------------------------------------------------------------- receiving

    def wait_for_room(self, until: float | None) -> bool:
        """Waits until the socket can send or receive, at most until ``until``. If the socket can send, sends queued datagrams.

        Returns True if the caller must now receive a datagram, else False. ``until`` is a time of ``time.monotonic()`` in
        seconds, or None for no limit. Raises WaitEnded if ``until`` had passed before the call.
        """
        left_ns = time_left(until)
        poll = select.poll()
        poll.register(self.sock, select.POLLIN | select.POLLOUT)
        found = 0
        for _, event in poll.poll(left_ns / 1e6 if left_ns else None):
            found |= event
        if found & select.POLLOUT:
            with self.lock:
                self._send_backlog()
        return bool(found & ~select.POLLOUT)

    # ---------------------------------------------------------------------------------------------------------- end

    def shut_down(self) -> None:
        """Shuts the socket down, so that ``receive`` returns in other threads. The descriptor stays open until ``close``."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket once no event loop watches it and no thread sends on it. Does not wait for that."""
        self.shut_down()
        self._closed = True
        for loop in list(self.loops):
            try:
                loop.call_soon_threadsafe(self.leave, loop)
            except RuntimeError:  # closed
                self.loops.pop(loop, None)
        self._close_unused()

    def leave(self, loop: Any) -> None:
        """Has an event loop read the socket no longer. Call it in the loop's thread."""
        if loop in self.loops:
            # In this order: the socket is closed when no loop is left.
            loop.remove_reader(self.sock.fileno())
            del self.loops[loop]
        self._close_unused()

    def _close_unused(self) -> None:
        with self.lock:
            if self._closed and not (self.loops or self._has_sender):
                self.sock.close()

    def __del__(self) -> None:
        self.take_unsent()

    def forget(self) -> None:
        """Closes a child process's copy of the socket after a fork."""
        self.closing = True
        self.lock, self.reading = wire.Lock(), wire.Lock()
        # The event loops are the parent's.
        self.loops.clear()
        self.sock.close()
