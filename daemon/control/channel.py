"""Exchanges records between the supervisor process and its child processes, and matches each reply to a call with this call."""

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
          on_record: called with each record and its file descriptors. The callback must close the descriptors.
          on_close: called once if the peer process closes the channel or sends invalid data, but not after ``close``.
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
        """Queues a record to the process at the other end, with duplicates of ``fds``. Does nothing on a closed channel."""
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
        """Returns about how many records are queued and not sent yet, or 0 if the channel is closed."""
        return 0 if self._closed else self._channel.waiting

    def finish(self) -> None:
        """Receives the last records of the peer process, which is dead, calls ``on_record`` for each, and closes this."""
        while not self._closed and self._readable():
            pass
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

    def _readable(self) -> bool:
        """Receives records. Returns whether more may wait."""
        try:
            for _ in range(_BATCH):
                received = self._received()
                if received is None:
                    return False
                records, fds = received
                for record in records:
                    self._on_record(record, fds)
                    fds = []
                    if self._closed:
                        return False
            return True
        except ChannelClosed:
            self._lost()
        except InvalidArgument as error:
            _log.error("closing a control channel: %s", error.message)
            self._lost()
        return False

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
    """The calls that one process makes to another process, and their replies. One of the two processes is the supervisor."""

    def __init__(self, send: Callable[..., None]) -> None:
        """Stores ``send``. A call ``send(record, *fds)`` sends a record and file descriptors to another process."""
        self._send = send
        self._waiting: dict[int, asyncio.Future[tuple[Reply, list[int]]]] = {}
        self._last = 0

    async def call(self, operation: Operation, *fds: int, peer: Peer = ANONYMOUS) -> tuple[bytes, list[int]]:
        """Calls an operation of the process at the other end of the control channel. Returns the result and file descriptors.

        The caller must close these descriptors. ``fds``: descriptors to send. ``peer``: the client for whom a front calls.
        Raises the ServingError with which the called process replied, or that ``fail`` got. Raises Unavailable if no file
        descriptor is free.
        """
        self._last += 1
        number = self._last
        waiter = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            with descriptors.needed("a call of another process"):
                self._send(ControlCall(number, operation, peer), *fds)
            reply, received = await waiter
        except asyncio.CancelledError:
            if waiter.done() and not (waiter.cancelled() or waiter.exception()):
                descriptors.close(waiter.result()[1])  # the reply came, and nobody has it any more
            raise
        finally:
            del self._waiting[number]
        if reply.code:
            descriptors.close(received)
        reply.check()
        return reply.result, received

    async def ask(self, operation: Operation, peer: Peer = ANONYMOUS, fd: int = -1) -> bytes:
        """Calls an operation of the supervisor for a client, and returns the result, which is JSON or empty.

        Args:
          peer: the client.
          fd: a file descriptor to send with the call, which the caller must close, or -1 for none. A push sends the memory with
          the parameters. To register a region, send a descriptor that becomes readable when the region is to be unregistered.
        Raises Unavailable if too many calls wait for replies. Raises what ``call`` raises.
        """
        if len(self._waiting) >= _LIMIT:
            raise Unavailable(f"{len(self._waiting)} control requests are waiting, at most {_LIMIT} are allowed")
        result, _ = await self.call(operation, *([fd] if fd >= 0 else []), peer=peer)
        return result

    def answered(self, reply: Reply, fds: list[int]) -> None:
        """Gives a reply and its descriptors to the call that waits for it. Closes the descriptors if the call was cancelled."""
        waiter = self._waiting.get(reply.call_id)
        if waiter is None or waiter.done():
            descriptors.close(fds)
        else:
            waiter.set_result((reply, fds))

    def fail(self, error: ServingError) -> None:
        """Makes every call that waits for a reply raise ``error``. Called if the process that should reply is gone."""
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)
