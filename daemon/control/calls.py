"""Calls of a front to the supervisor, which concern the whole daemon and not one request."""

from __future__ import annotations

import asyncio

from tensord.daemon.control.channel import ControlChannel
from tensord.shm.control_records import ControlCall, Reply
from tensord.shm.errors import Unavailable, from_code
from tensord.shm.operations import ANONYMOUS, Operation, Peer

#: The most calls that wait for answers; a client that floods the control endpoints is refused, not queued.
_LIMIT = 1024


class ControlCalls:
    """Sends calls over the control connection, and matches the answers by number."""

    def __init__(self, connection: ControlChannel) -> None:
        self._connection = connection
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._last = 0

    async def ask(self, operation: Operation, peer: Peer = ANONYMOUS, end: int = -1) -> bytes:
        """Calls an operation and returns the result, JSON or empty.

        Args:
          peer: for whom, where that matters.
          end: a descriptor that goes along and stays the caller's: it becomes readable when a region is to go, or is the
            memory of parameters; -1: none.
        Raises: the ServingError the supervisor answered with, or Unavailable: too many questions.
        """
        if len(self._waiting) >= _LIMIT:
            raise Unavailable(f"{len(self._waiting)} control requests are waiting, at most {_LIMIT} are allowed")
        self._last += 1
        number = self._last
        waiter: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiter
        self._connection.send(ControlCall(number, operation, peer), *([end] if end >= 0 else []))
        try:
            reply = await waiter
        finally:
            del self._waiting[number]
        if reply.code:
            raise from_code(reply.code, reply.message)
        return reply.result

    def answered(self, reply: Reply) -> None:
        """Handles a reply; it is dropped if nobody waits for it any more."""
        waiter = self._waiting.get(reply.call_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)
