"""Sends and receives the records of a control channel on an asyncio loop, and matches the replies to calls with the calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from tensord.shm import descriptors
from tensord.shm.channel import Channel, ChannelClosed, DescriptorsLost
from tensord.shm.control_records import ControlCall, Reply
from tensord.shm.errors import InvalidArgument, ServingError, Unavailable
from tensord.shm.operations import ANONYMOUS, Operation, Peer
from tensord.shm.record import Record

_log = logging.getLogger(__name__)
#: Datagrams received per wake-up, so that one busy peer cannot starve the loop.
_BATCH = 64
#: The most calls that wait for answers; a client that floods the control endpoints is refused, not queued.
_LIMIT = 1024


class ControlChannel:
    """Sends and receives records on the control channel between the supervisor and a child process."""

    def __init__(
        self, channel: Channel, on_record: Callable[[Any, list[int]], None], on_close: Callable[[], None]
    ) -> None:
        """Stores the callbacks.

        Args:
          on_record: called with each record and its file descriptors, which it must close.
          on_close: called once, when the other process has closed the channel or sent invalid data, but not after ``close``.
        """
        self._channel = channel
        self._on_record = on_record
        self._on_close = on_close
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flushing = False
        self._writing = False
        self._closed = False

    def start(self) -> None:
        """Begins to receive records, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.fileno(), self._readable)

    def send(self, record: Record, *fds: int) -> None:
        """Queues a record for the other process, with duplicates of the file descriptors. Does nothing on a closed channel."""
        if self._closed:
            return
        self._channel.put(record, *fds)
        if not self._flushing and not self._writing and self._loop is not None:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Closes the channel. Records that are still queued are dropped. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            self._loop.remove_reader(self._channel.fileno())
            if self._writing:
                self._loop.remove_writer(self._channel.fileno())
        self._channel.close()

    @property
    def waiting(self) -> int:
        """Returns how many datagrams of records are queued because the socket's buffer is full."""
        return 0 if self._closed else self._channel.waiting

    def finish(self) -> None:
        """Receives the last records of a process that has died, and closes the channel."""
        if not self._closed:
            self._readable()
        self.close()

    def _flush(self) -> None:
        self._flushing = False
        if self._closed or self._loop is None:
            return
        done = self._channel.flush()
        if done and self._writing:
            self._writing = False
            self._loop.remove_writer(self._channel.fileno())
        elif not done and not self._writing:
            self._writing = True
            self._loop.add_writer(self._channel.fileno(), self._flush)

    def _readable(self) -> None:
        try:
            for _ in range(_BATCH):
                received = self._received()
                if received is None:
                    return
                records, fds = received
                for record in records:
                    self._on_record(record, fds)
                    fds = []
                    if self._closed:
                        return
        except ChannelClosed:
            self._lost()
        except InvalidArgument as error:
            _log.error("closing a control channel: %s", error.message)
            self._lost()

    def _received(self) -> tuple[list[Any], list[int]] | None:
        try:
            return self._channel.receive()
        except DescriptorsLost as lost:
            # A call is refused. Whoever handles another record does without its descriptors.
            calls = [record for record in lost.records if isinstance(record, ControlCall)]
            for call in calls:
                self.send(Reply.refusing(call.call_id, descriptors.none_left("a process of the server")))
            return [] if calls else lost.records, []

    def _lost(self) -> None:
        self.close()
        self._on_close()

    def __repr__(self) -> str:
        return f"<ControlChannel {self._channel!r}{' closed' if self._closed else ''}>"


class ControlCalls:
    """Calls operations of the process at the other end of a control channel, and matches replies to calls."""

    def __init__(self, send: Callable[..., None]) -> None:
        """Stores ``send(record, *fds)``, which sends a record with file descriptors on the channel."""
        self._send = send
        self._waiting: dict[int, asyncio.Future[tuple[Reply, list[int]]]] = {}
        self._last = 0

    async def call(self, operation: Operation, *fds: int, peer: Peer = ANONYMOUS) -> tuple[bytes, list[int]]:
        """Calls an operation. Returns its result, and the file descriptors that came with it, which the caller must close.

        ``fds``: descriptors that are sent with the call. ``peer``: the client for whom a front calls.
        Raises the ServingError with which the other process replied. Raises Unavailable if no file descriptor is free.
        """
        self._last += 1
        number = self._last
        waiter = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            with descriptors.needed("a call of another process"):
                self._send(ControlCall(number, operation, peer), *fds)
            reply, received = await waiter
        finally:
            del self._waiting[number]
        if reply.code:
            descriptors.close(received)
        reply.check()
        return reply.result, received

    async def ask(self, operation: Operation, peer: Peer = ANONYMOUS, end: int = -1) -> bytes:
        """Calls an operation of the supervisor for a client, and returns the result, which is JSON or empty.

        Args:
          peer: the client.
          end: a file descriptor that is sent with the call and that the caller must close, or -1. For a push, it is the memory
          with the parameters. For the registration of a region, it becomes readable when the region is to be unregistered.
        Raises Unavailable if too many calls wait for replies. Raises the ServingError with which the supervisor replied.
        """
        if len(self._waiting) >= _LIMIT:
            raise Unavailable(f"{len(self._waiting)} control requests are waiting, at most {_LIMIT} are allowed")
        result, _ = await self.call(operation, *([end] if end >= 0 else []), peer=peer)
        return result

    def answered(self, reply: Reply, fds: list[int]) -> None:
        """Gives a reply and its descriptors to the call that waits for it. Closes the descriptors if the call was cancelled."""
        waiter = self._waiting.get(reply.call_id)
        if waiter is None or waiter.done():
            descriptors.close(fds)
        else:
            waiter.set_result((reply, fds))

    def fail(self, error: ServingError) -> None:
        """Makes every call that waits for a reply raise ``error``, because the other process is gone."""
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)
