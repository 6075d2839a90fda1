"""Calls of a front process to the supervisor, about the whole daemon and not about one inference request."""

from __future__ import annotations

import asyncio

from tensord.daemon.control.channel import ControlChannel
from tensord.shm.control_records import ControlCall, Reply
from tensord.shm.errors import Unavailable, from_code
from tensord.shm.operations import ANONYMOUS, Operation, Peer

#: The most calls that wait for answers; a client that floods the control endpoints is refused, not queued.
_LIMIT = 1024


class ControlCalls:
    """Sends a front's calls to the supervisor over the control channel, and matches the replies to them by number."""

    def __init__(self, connection: ControlChannel) -> None:
        self._connection = connection
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._last = 0

    async def ask(self, operation: Operation, peer: Peer = ANONYMOUS, end: int = -1) -> bytes:
        """Calls an operation of the supervisor and returns its result, which is JSON or empty.

        Args:
          peer: the client on whose behalf the front calls, where that matters.
          end: a file descriptor that is sent along, and that the caller must close: it becomes readable when a region is to be
            unregistered, or it is the memory of pushed parameters; -1: none.

        Raises Unavailable: too many calls are waiting for replies; or the ServingError with which the supervisor replied.
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
        """Gives the supervisor's reply to the call that waits for it; drops the reply if that call was cancelled."""
        waiter = self._waiting.get(reply.call_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)
