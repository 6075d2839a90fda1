"""Tests where a connection reads what its client sends: into the front's buffer, or large tensors into the arena at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tensord.daemon.grpc.connection import Http2Connection
from tests.work.connection import MIB
from tests.work.counter import Work
from tests.work.grpc_connection import GrpcBench, call
from tests.work.test_front_work import one_large
from tests.work.test_grpc_work import large

#: Sizes of the front's read buffer, and of the part of it that clients get who send large messages.
WHOLE, FIRST = 256 << 10, 16 << 10


class Client:
    """A client that notes how large the memory is that each of its reads gets."""

    def __init__(self, bench: GrpcBench) -> None:
        self._bench = bench
        self.transport = bench.connect()
        self.connection: Http2Connection = self.transport._protocol
        self.connection.get_buffer = self._note
        self._number = -1
        self.rooms: list[int] = []

    def _note(self, sizehint: int) -> memoryview:
        room = Http2Connection.get_buffer(self.connection, sizehint)
        self.rooms.append(len(room))
        return room

    @property
    def leases(self) -> int:
        """Returns how many leases of the request arena are outstanding."""
        return self._bench.submitter.statistics()["leases"]

    async def ask(self, content: bytes, complete: Callable[..., Any]) -> list[int]:
        """Sends a call and waits for its answer. Returns the sizes of the memory that its reads got."""
        self.rooms.clear()
        self._number += 2
        await self._bench.answer(Work(), [(self.transport, call(self._number, content, MIB + 240))], complete)
        return self.rooms


async def test_all_but_the_first_pages_of_a_large_message_are_read_to_their_place() -> None:
    bench = GrpcBench()
    made = Client(bench)
    await asyncio.sleep(0)
    first, rest, *_ = await made.ask(large(""), one_large)
    assert (first, rest > MIB - WHOLE) == (WHOLE, True)
    first, rest, *_ = await made.ask(large(""), one_large)
    assert (first, MIB - FIRST < rest < MIB) == (FIRST, True)
    bench.close()
