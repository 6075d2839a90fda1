"""Taking connections from the listening sockets that all fronts of a protocol share, so that each gets its part.

A new connection wakes every front. One that has clearly more connections than another leaves it to that one for a moment; if
it still waits then, the other is busy, hung or dead, and the connection is taken after all. So connections are shared out evenly
while all are well, and no front's trouble keeps a client waiting. In the place of one that has ended one is taken at once: where
each request has a connection of its own, nobody waits for a better share. See docs/decisions/one-listening-socket.md.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence, Sized

from tensord.daemon.control.tally import Seat
from tensord.daemon.front.peer import owner_of

_log = logging.getLogger(__name__)
#: How long a connection is left to a front that has fewer, in seconds. A loop that turns needs less.
_PATIENCE = 0.001
#: Of those that have ended, so many are still made up for.
_MOST_REPLACED = 16
#: Until the next attempt after there was no descriptor or no memory for a connection, in seconds.
_PAUSE = 0.1
#: How often it is looked whether all that was taken is open, at the end.
_OPENING_POLL_SECONDS = 0.005
#: Taken at the end at most: no more can have waited (``tensord.daemon.processes.listening``), and a flood must not put the end
#: off.
_MAX_WAITING = 1024
#: Taken in one turn of the loop at most: a crowd of new connections must not starve the old.
_MAX_ROOM = 64
_MAX_ALONE = 15


class Acceptor:
    """Owns this process's descriptors of the listening sockets.

    Args:
      open_: takes a connection and whose it is, as ``Peer.owner`` tells it; its protocol counts it in ``seat`` until it is lost.
      opening: what of that is under way, and not yet counted.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        seat: Seat,
        open_: Callable[[socket.SocketType, str], None],
        opening: Sized = (),
    ) -> None:
        self._listeners = [ListeningSocket(listener) for listener in listeners]
        self._seat = seat
        self._open = open_
        self._opening = opening
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._crowd = Crowd()
        #: Connections that this front had when it last left one to others, with what it took then.
        self._most = 0
        self._complained = False
        self._closed = False

    def start(self) -> None:
        """Takes connections from now on."""
        self._go_on()

    async def close(self, timeout: float) -> None:
        """Takes what has connected already, then no more; returns when all of that is open, or after ``timeout`` seconds."""
        if self._closed:
            return
        self._seat.serve(False)
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

    @property
    def leaves_it(self) -> bool:
        """Whether new connections are left to others at this moment."""
        return self._timer is not None

    def _readable(self, listener: ListeningSocket) -> None:
        mine, least = self._seat.own() + len(self._opening), self._seat.least()
        if least is not None and mine > least + (least >> 3) and not self._replaces(mine):
            # Somebody else's.
            self._pause()
            self._timer = self._loop.call_later(_PATIENCE, self._resume)
            return
        crowd = self._crowd
        room = crowd.room if least is None else min(crowd.room, max(1, least - mine))
        taken = 0
        while taken < room and self._take(listener):
            taken += 1
        crowd.took(taken, room)

    def _replaces(self, mine: int) -> bool:
        """Whether a connection may be taken in the place of one that has ended, so that there are no more than there were."""
        if mine < self._most:
            self._most = min(self._most, mine + _MOST_REPLACED)
            return True
        self._most = mine
        return False

    def _pause(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())

    def _go_on(self) -> None:
        self._seat.serve(True)
        for listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._readable, listener)

    def _resume(self) -> None:
        """After a pause: whatever waits was not taken by anybody else."""
        self._timer = None
        self._go_on()
        for listener in self._listeners:
            if self._timer is None:
                self._take(listener)
        self._most = max(self._most, self._seat.own() + len(self._opening))

    def _take(self, listener: ListeningSocket) -> bool:
        """Whether there was a connection to take."""
        try:
            connection, address = listener.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionError:  # the client has gone again
            return True
        except OSError as error:
            # No descriptors, no memory: who connected waits, here or for another front.
            if not self._complained:
                _log.error("new connections have to wait: %s", error.strerror)
                self._complained = True
            self._seat.serve(False)
            self._pause()
            self._timer = self._loop.call_later(_PAUSE, self._resume)
            return False
        self._complained = False
        self._open(connection, owner_of(connection, address))
        return True


class Crowd:
    """Decides how many connections are taken in one turn of the loop; pure.

    After one that came alone a second one is tried for ever more seldom, as long as there is none; of a crowd more are taken with
    each turn.

        alone:   1 | 1, 2? | 1 1 1, 2? | 1 x 7, 2? | ...
        a crowd: 2 | 4 | 8 | ... | 64
    """

    __slots__ = ("_alone", "_skips", "room")

    def __init__(self) -> None:
        #: How many may be taken in this turn.
        self.room = 1
        #: After how many that came alone a second one is tried for, and how many of these are still to come.
        self._alone = self._skips = 0

    def took(self, taken: int, room: int) -> None:
        """So many were there, of as many as were tried for."""
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
        return f"<Crowd, {self.room} are taken>"


class ListeningSocket:
    """Owns a socket that listens, whose ``accept`` does not block, and does not ask anew what is the same for all.

    ``socket.accept`` makes a ``socket.socket``, and whoever is handed one looks up family and kind five times in tables of
    constants, which costs as much as the kernel's part of taking a connection. What it is made of, ``socket.SocketType``, knows
    them as numbers.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._family, self._kind, self._proto = int(listener.family), int(listener.type), listener.proto
        listener.setblocking(False)

    def accept(self) -> tuple[socket.SocketType, object]:
        """A connection, blocking or not, and the address of its client. Raises OSError as ``socket.accept``."""
        fd, address = self._listener._accept()  # type: ignore[attr-defined]
        return socket.SocketType(self._family, self._kind, self._proto, fd), address

    def fileno(self) -> int:
        return self._listener.fileno()

    def close(self) -> None:
        self._listener.close()

    def __repr__(self) -> str:
        return f"<ListeningSocket {self._listener!r}>"
