"""Whose a region is."""

from __future__ import annotations

import asyncio
import os

import pytest

from tensord.daemon.front.peer import ConnectionEnd
from tensord.daemon.regions.region_record import EndWatch, is_owner
from tensord.shm.operations import Peer

ALICE, BOB = Peer("unix", "", 1, 1001, 1001), Peer("unix", "", 2, 1002, 1002)
ONE, OTHER = Peer("tcp", "127.0.0.1:1"), Peer("tcp", "10.0.0.1:2")


@pytest.mark.parametrize(
    ("peer", "owner", "is_its"),
    [
        (ALICE, ALICE, True),
        (ALICE, Peer("unix", "", 9, 1001, 7), True),
        (ALICE, BOB, False),
        (ALICE, ONE, False),
        (ONE, ALICE, False),
        (ONE, OTHER, True),
        (Peer("operator"), ALICE, True),
        (Peer("operator"), ONE, True),
    ],
)
def test_is_owner(peer: Peer, owner: Peer, is_its: bool) -> None:
    assert is_owner(peer, owner) is is_its


async def test_told_once_also_late_and_not_after_close() -> None:
    before = len(os.listdir("/proc/self/fd"))
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    fd = os.pidfd_open(process.pid)
    told: list[str] = []
    watch = EndWatch(fd, lambda: told.append("first"))
    closed = EndWatch(fd, lambda: told.append("closed"))
    closed.close()
    closed.close()
    process.kill()
    await process.wait()
    while not told:
        await asyncio.sleep(0.001)
    late = asyncio.Event()
    EndWatch(fd, late.set)
    await late.wait()
    watch.close()
    assert told == ["first"]
    os.close(fd)
    del process
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) <= before + 3  # the loop's own watch of children


async def test_a_connection() -> None:
    connection, told = ConnectionEnd(), asyncio.Event()
    with connection.descriptor() as end:
        watch = EndWatch(end, told.set)
    await asyncio.sleep(0)
    assert not told.is_set()
    connection.close()
    await told.wait()
    watch.close()


async def test_what_ends_during_a_pause_is_told_after_it() -> None:
    reading, writing = os.pipe()
    told: list[int] = []
    watch = EndWatch(reading, lambda: told.append(1))
    watch.pause()
    os.close(writing)
    await asyncio.sleep(0.01)
    assert told == []
    watch.resume()
    while not told:
        await asyncio.sleep(0)
    watch.pause()
    watch.resume()
    watch.close()
    os.close(reading)
