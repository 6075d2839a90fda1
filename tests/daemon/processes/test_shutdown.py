"""The end: children that finish, that do not, and an operator in a hurry."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from tensord.daemon.processes.child import Child
from tensord.daemon.processes.shutdown import Shutdown

LATER_NS = 3600 * 10**9


class Leaving:
    """A child that dies when it is told to stop, or only when it is killed."""

    def __init__(self, shutdown: Shutdown, table: dict[int, Child], number: int, stubborn: bool) -> None:
        self.name = f"child-{number}"
        self.alive = True
        self.kills = 0
        self._shutdown = shutdown
        self._table = table
        self._number = number
        self._stubborn = stubborn
        table[number] = cast(Child, self)

    def stop(self, grace_ns: int) -> None:
        self.grace_ns = grace_ns
        if not self._stubborn:
            asyncio.get_running_loop().call_soon(self._die)

    def kill(self) -> None:
        self.kills += 1
        asyncio.get_running_loop().call_soon(self._die)

    def _die(self) -> None:
        self.alive = False
        self._table.pop(self._number, None)
        self._shutdown.child_died()


def children(shutdown: Shutdown, *stubborn: bool) -> tuple[dict[int, Child], list[Any]]:
    table: dict[int, Child] = {}
    return table, [Leaving(shutdown, table, number, each) for number, each in enumerate(stubborn)]


async def test_all_finish() -> None:
    shutdown = Shutdown()
    table, made = children(shutdown, False, False, False)
    await shutdown.finish(table, time.monotonic_ns() + LATER_NS)
    assert not table
    assert all(0 < child.grace_ns <= LATER_NS for child in made)
    await shutdown.finish(table, 0)


async def test_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    shutdown = Shutdown()
    table, made = children(shutdown, True, True)
    await shutdown.finish(table, time.monotonic_ns() + 10**7)
    assert len(table) == 2
    assert "stopping: child-0, child-1 did not finish in time" in caplog.text
    await shutdown.bury(lambda: made)
    assert [(child.alive, child.kills > 0) for child in made] == [(False, True)] * 2


async def test_a_hurry() -> None:
    """The first signal asks, the second does not wait."""
    shutdown = Shutdown()
    assert not shutdown.requested.is_set()
    shutdown.signalled()
    assert shutdown.requested.is_set()
    table, _ = children(shutdown, True)
    asyncio.get_running_loop().call_soon(shutdown.signalled)
    await shutdown.finish(table, time.monotonic_ns() + LATER_NS)
    assert len(table) == 1
