"""Accepts connections from listening sockets that all front processes of a protocol share, and spreads them over the fronts.

A new connection wakes every front. A front that has clearly more connections than another front waits for a millisecond. If no
other front accepts the connection in this millisecond, the waiting front accepts it. A front whose old connections have ended
accepts new ones in their place without waiting. See docs/decisions/one-listening-socket.md.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence, Sized

from tensord.daemon.control.shared_counters import FrontCounters
from tensord.daemon.front.peer import owner_of

_log = logging.getLogger(__name__)
#: Seconds for which a connection is left to a front that has fewer. A loop that is not busy needs less.
_PATIENCE = 0.001
#: The most ended connections that are replaced at once.
_MOST_REPLACED = 16
#: Seconds until the next attempt after there was no descriptor or no memory for a connection.
_PAUSE = 0.1
#: Seconds between checks, while closing, whether all accepted connections are open.
_OPENING_POLL_SECONDS = 0.005
#: The most connections accepted while closing: no more can have waited (``tensord.daemon.processes.listening``), and a flood
#: must not delay the end.
_MAX_WAITING = 1024
#: The most connections accepted in one iteration of the loop: many new ones must not starve the old.
_MAX_ROOM = 64
_MAX_ALONE = 15


class Acceptor:
    """Accepts clients' connections on a front's listening sockets, and hands each connection to ``open_``.

    If another front has clearly fewer connections, this front waits for a moment, so that new clients go to the other front.
    Args:
      counters: tell how many connections each front has. ``Acceptor`` only reads these numbers, so ``open_`` must update them.
      open_: is called with the accepted socket and the name of the client (``Peer.owner``).
      opening: a collection of the accepted connections that ``counters`` does not count yet. Only its length is used.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        counters: FrontCounters,
        open_: Callable[[socket.SocketType, str], None],
        opening: Sized = (),
    ) -> None:
        self._listeners = [ListeningSocket(listener) for listener in listeners]
        self._counters = counters
        self._open = open_
        self._opening = opening
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._crowd = AcceptLimit()
        #: The connections that this front had when it last left one to others, with those accepted then.
        self._most = 0
        self._complained = False
        self._closed = False

    def start(self) -> None:
        """Starts to accept connections, for the first time or after a pause."""
        self._counters.serve(True)
        for listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._readable, listener)

    async def close(self, timeout: float) -> None:
        """Accepts the connections that wait, and closes the listening sockets. Does nothing if called again.

        Returns once no client is in its TLS handshake, or ``timeout`` seconds after the listening sockets are closed.
        """
        if self._closed:
            return
        self._counters.serve(False)
        self._pause()
        for _ in range(_MAX_WAITING):
            if not sum(self._take(listener) for listener in self._listeners):
                break
        self._closed = True
        self._pause()
        for listener in self._listeners:
            listener.close()
        deadline = self._loop.time() + timeout
        while self._opening and self._loop.time() < deadline:
            await asyncio.sleep(_OPENING_POLL_SECONDS)

    def _readable(self, listener: ListeningSocket) -> None:
        mine, least = self._counters.own() + len(self._opening), self._counters.least()
        if least is not None and mine > least + (least >> 3) and not self._replaces(mine):
            # Another front has fewer.
            self._pause()
            self._timer = self._loop.call_later(_PATIENCE, self._resume)
            return
        crowd = self._crowd
        room = crowd.room if least is None else min(crowd.room, max(1, least - mine))
        taken = 0
        while taken < room and self._take(listener):
            taken += 1
        crowd.took(taken, room)

    def _replaces(self, connections: int) -> bool:
        if connections < self._most:
            self._most = min(self._most, connections + _MOST_REPLACED)
            return True
        self._most = connections
        return False

    def _pause(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())

    def _resume(self) -> None:
        # No other front has accepted the connection that was left to them: it is taken at once.
        self._timer = None
        self.start()
        for listener in self._listeners:
            if self._timer is None:
                self._take(listener)
        self._most = max(self._most, self._counters.own() + len(self._opening))

    def _take(self, listener: ListeningSocket) -> bool:
        """Accepts a waiting connection. Returns False if none waits, or if the front lacks a descriptor or memory for one."""
        try:
            connection, address = listener.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionError:  # the client has gone again
            return True
        except OSError as error:
            # There are no descriptors or no memory: the client waits, here or for another front.
            if not self._complained:
                _log.error("new connections have to wait: %s", error.strerror)
                self._complained = True
            self._counters.serve(False)
            self._pause()
            self._timer = self._loop.call_later(_PAUSE, self._resume)
            return False
        self._complained = False
        self._open(connection, owner_of(connection, address))
        return True


class AcceptLimit:
    """Decides how many connections a front accepts in one iteration of the event loop. Sans-I/O.

    The limit is 1 at first. Iterations that accept as many connections as the limit allows raise the limit, up to 64. An
    iteration that accepts fewer connections sets the limit to 1.
    """

    __slots__ = ("_alone", "_skips", "room")

    def __init__(self) -> None:
        #: How many connections may be accepted in this iteration.
        self.room = 1
        #: The number of single connections after which a second one is tried for, and how many of these are still to come.
        self._alone = self._skips = 0

    def took(self, taken: int, room: int) -> None:
        """Sets how many connections the next iteration of the event loop may accept.

        ``taken``: how many connections this iteration accepted. ``room``: how many it was allowed to accept.
        """
        if taken < room:
            self.room = 1
            self._alone = min(2 * self._alone + 1, _MAX_ALONE) if taken <= 1 else 0
            self._skips = self._alone
        elif self._skips:
            self._skips -= 1
        else:
            self.room = min(2 * room, _MAX_ROOM)
            if taken > 1:
                self._alone = 0

    def __repr__(self) -> str:
        return f"<AcceptLimit {self.room}>"


class ListeningSocket:
    """Owns a listening socket, and accepts connections without blocking and at little cost."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._family, self._kind, self._proto = int(listener.family), int(listener.type), listener.proto
        listener.setblocking(False)

    def accept(self) -> tuple[socket.SocketType, object]:
        """Accepts a connection. Returns its socket, which is in blocking mode, and the address of its client.

        Raises BlockingIOError if no connection waits. Raises another OSError if the system call fails.
        """
        fd, address = self._listener._accept()  # type: ignore[attr-defined]
        return socket.SocketType(self._family, self._kind, self._proto, fd), address

    def fileno(self) -> int:
        return self._listener.fileno()

    def close(self) -> None:
        self._listener.close()

    def __repr__(self) -> str:
        return f"<ListeningSocket {self._listener!r}>"
