"""A front's sockets to its clients, which take some of what is sent, or nothing, where they are full."""

from __future__ import annotations

import random
import socket
from typing import Any

from tests.simulation.scheduler import Death, Scheduler

#: The scheduler whose fronts run.
scheduler_of_fronts: list[Scheduler] = []


class Cut:
    """A front's socket to a client, which takes some of what is sent, or nothing, where it is full."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        process: Any = scheduler_of_fronts[0].current
        # Each draws for itself: a front may write to its clients in any order.
        self._full, self._chance = scheduler_of_fronts[0].full, random.Random(scheduler_of_fronts[0].chance.random())
        self._process = process
        if hasattr(process, "accepted"):
            process.accepted.append(self)

    def _room(self, size: int) -> int:
        if self._process is not None and self._process.dies:
            raise Death
        if self._chance.random() >= self._full:
            return size
        count = self._chance.choice((0, 1, self._chance.randrange(size + 1)))
        if not count:
            raise BlockingIOError
        return count

    def send(self, content: Any, flags: int = 0) -> int:
        return super().send(memoryview(content)[: self._room(len(content))], flags)  # type: ignore[misc, no-any-return]

    def sendmsg(self, pieces: Any, ancillary: Any = (), flags: int = 0) -> int:
        content = b"".join(pieces)
        return super().send(content[: self._room(len(content))], flags)  # type: ignore[misc, no-any-return]


class AcceptedSocket(Cut, socket.SocketType):  # type: ignore[misc]
    """As the acceptor makes it."""


class OpenedSocket(Cut, socket.socket):  # type: ignore[misc]
    """As the event loop takes it."""
