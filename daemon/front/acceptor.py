"""Taking connections from the listening sockets that all fronts of a protocol share, so that each gets its part.

A new connection wakes every front. One that has clearly more connections than another leaves it to that one for a moment; if
it still waits then, the other is busy, hung or dead, and the connection is taken after all. So connections are shared out evenly
while all are well, and no front's trouble keeps a client waiting: docs/decisions/one-listening-socket.md.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from daemon.control.tally import Seat

_log = logging.getLogger(__name__)
#: How long a connection is left to a front that has fewer, in seconds. A loop that turns needs less.
_PATIENCE = 0.001
#: Until the next attempt after there was no descriptor or no memory for a connection, in seconds.
_PAUSE = 0.1
#: Connections taken in one turn of the loop, so that a crowd of new ones cannot starve the old.
_BATCH = 64
#: How often it is looked whether all that was taken is open, at the end.
_OPENING_POLL_SECONDS = 0.005
#: Taken at the end at most: no more can have waited (``daemon.processes.listening``), and a flood must not put the end off.
_MAX_WAITING = 1024


class Acceptor:
    """Owns this process's descriptors of the listening sockets.

    ``make`` gives each connection its protocol, which counts it in ``seat`` when it is made and when it is lost.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        seat: Seat,
        make: Callable[[], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listeners = tuple(listeners)
        self._seat = seat
        self._make = make
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        #: Taken, and not yet among those that the seat counts.
        self._opening: set[Coroutine[Any, Any, object]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._complained = False
        self._closed = False

    def start(self) -> None:
        """Takes connections from now on."""
        for listener in self._listeners:
            listener.setblocking(False)
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

    def _readable(self, listener: socket.socket) -> None:
        mine, least = self._seat.own() + len(self._opening), self._seat.least()
        if least is None:
            room = _BATCH
        elif mine <= least + (least >> 3):
            room = max(1, least - mine)
        else:
            # Somebody else's.
            self._pause()
            self._timer = self._loop.call_later(_PATIENCE, self._resume)
            return
        for _ in range(min(room, _BATCH)):
            if not self._take(listener):
                return

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

    def _take(self, listener: socket.socket) -> bool:
        """Whether there was a connection to take."""
        try:
            connection, _ = listener.accept()
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
        connection.setblocking(False)
        opening = self._loop.connect_accepted_socket(self._make, connection, ssl=self._tls)
        self._opening.add(opening)
        self._go_on_opening(opening, connection)
        return True

    def _go_on_opening(self, opening: Coroutine[Any, Any, object], connection: socket.socket, _: object = None) -> None:
        """A step of it, to the next future that it waits for: a task would be a twentieth of what a connection costs."""
        try:
            future: asyncio.Future[object] = opening.send(None)
            future.add_done_callback(functools.partial(self._go_on_opening, opening, connection))
            return
        except StopIteration:
            self._opening.discard(opening)
            return
        except (OSError, ssl.SSLError):
            pass  # a client that breaks off its handshake is its own affair
        except Exception:
            _log.exception("a connection could not be opened")
        self._opening.discard(opening)
        connection.close()
