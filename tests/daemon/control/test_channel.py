"""A control channel on an event loop flushes once an iteration, and survives a slow peer, a lost peer and garbage."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from tensord.daemon.control.channel import ControlCalls, ControlChannel
from tensord.shm.channel import Channel, pair
from tensord.shm.control_records import ChildReady, ControlCall, FromFront, LaneOpened, Reply, Stop, ToFront
from tensord.shm.errors import Unavailable
from tensord.shm.operations import RecentErrors, RepositoryIndex
from tensord.shm.record import decoder
from tests.open_files import no_descriptors_left


class Ends:
    """A front's ControlChannel, and the supervisor's bare channel at its other end."""

    def __init__(self) -> None:
        ours, theirs = pair()
        self.records: list[Any] = []
        self.fds: list[int] = []
        self.closed = 0
        self.connection = ControlChannel(Channel(ours, decoder(ToFront)), self._record, self._close)
        self.peer = Channel(theirs, decoder(FromFront))
        self.connection.start()

    def _record(self, record: Any, fds: list[int]) -> None:
        self.records.append(record)
        self.fds += fds

    def _close(self) -> None:
        self.closed += 1

    def end(self) -> None:
        self.connection.close()
        self.peer.close()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)


async def test_records_of_one_turn_share_a_datagram() -> None:
    ends = Ends()
    for i in range(10):
        ends.connection.send(ChildReady(i))
    await turns()
    received = ends.peer.receive()
    assert received is not None
    assert received[0] == [ChildReady(i) for i in range(10)]
    ends.end()


async def test_a_peer_that_does_not_read_gets_everything_later() -> None:
    ends = Ends()
    sent = [ControlCall(i, RepositoryIndex()) for i in range(3000)]
    for call in sent:
        ends.connection.send(call)
        if call.call_id % 20 == 0:
            await asyncio.sleep(0)
    found: list[Any] = []
    while len(found) < len(sent):
        received = ends.peer.receive()
        if received is None:
            await asyncio.sleep(0.001)
            continue
        found += received[0]
    assert found == sent
    ends.end()


async def test_descriptors_come_with_their_record() -> None:
    before = set(os.listdir("/proc/self/fd"))
    ends = Ends()
    fd = os.memfd_create("x")
    ends.peer.put(Stop(1), fd)
    ends.peer.put(Stop(2))
    ends.peer.flush()
    os.close(fd)
    await turns()
    assert ends.records == [Stop(1), Stop(2)]
    assert len(ends.fds) == 1
    os.close(ends.fds[0])
    ends.end()
    assert set(os.listdir("/proc/self/fd")) <= before


async def test_a_lost_peer_is_told_once() -> None:
    ends = Ends()
    ends.peer.put(Stop(1))
    ends.peer.flush()
    ends.peer.close()
    await turns()
    assert ends.records == [Stop(1)]
    assert ends.closed == 1
    ends.connection.send(ChildReady(1))
    ends.end()
    assert ends.closed == 1


async def test_all_that_a_dead_peer_has_sent_is_heard() -> None:
    """More than the loop takes at a time."""
    ends = Ends()
    sent = [Stop(number) for number in range(150)]
    for record in sent:
        ends.peer.put(record)
        assert ends.peer.flush()
    ends.peer.close()
    ends.connection.finish()
    assert (ends.records, ends.closed) == (sent, 1)
    ends.end()


async def test_records_that_have_lost_their_descriptors() -> None:
    """A call is answered, any other record comes without them, and the connection goes on."""
    ends = Ends()
    memory = os.memfd_create("memory")
    for record in (LaneOpened(7), ControlCall(3, RecentErrors()), Stop(1)):
        ends.peer.put(record, memory)
    ends.peer.flush()
    with no_descriptors_left() as limit:
        await turns()
    assert (ends.records, ends.fds, ends.closed) == ([LaneOpened(7), Stop(1)], [], 0)
    received = ends.peer.receive()
    message = f"a process of the server has as many files open as it may, {limit}"
    assert received == ([Reply(3, "UNAVAILABLE", message, lacking=True)], [])
    os.close(memory)
    ends.end()


async def test_a_call_for_which_there_is_no_descriptor_is_over() -> None:
    ends = Ends()
    memory = os.memfd_create("memory")
    calls = ControlCalls(ends.connection.send)
    with no_descriptors_left(), pytest.raises(Unavailable, match="as many files open as it may"):
        await calls.call(RecentErrors(), memory)
    assert not calls._waiting
    os.close(memory)
    ends.end()


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_call_that_is_cancelled_keeps_no_descriptor(is_answered: bool) -> None:
    """Nor does it where the reply came, and whoever waits for it has not been told yet."""
    ends = Ends()
    calls = ControlCalls(ends.connection.send)
    calling = asyncio.create_task(calls.call(RecentErrors()))
    await turns()
    memory = os.memfd_create("memory")
    if is_answered:
        calls.answered(Reply(1), [memory])
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    if not is_answered:
        calls.answered(Reply(1), [memory])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory)
    assert not calls._waiting
    ends.end()


async def test_garbage_closes_the_connection() -> None:
    ours, theirs = pair()
    closed: list[bool] = []
    connection = ControlChannel(Channel(ours, decoder(ToFront)), lambda *_: None, lambda: closed.append(True))
    connection.start()
    theirs.send(b"\x01garbage")
    await turns()
    assert closed == [True]
    theirs.close()
