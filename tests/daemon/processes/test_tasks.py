"""Work beside the rest on the supervisor's loop."""

from __future__ import annotations

import asyncio

import pytest

from tensord.daemon.processes.tasks import Tasks


async def test_a_defect_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    failed: list[str] = []
    tasks = Tasks(lambda: failed.append("failed"))

    async def works() -> None:
        await asyncio.sleep(0)

    async def fails() -> None:
        raise RuntimeError("no such thing")

    tasks.spawn(works())
    tasks.spawn(fails())
    for _ in range(3):
        await asyncio.sleep(0)
    assert failed == ["failed"]
    assert "no such thing" in caplog.text
    await tasks.cancel()
    assert failed == ["failed"]


async def test_none_goes_on_after_cancel() -> None:
    tasks, ended = Tasks(lambda: pytest.fail("a cancelled task is no defect")), asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    tasks.spawn(waits())
    await asyncio.sleep(0)
    await tasks.cancel()
    assert ended.is_set()
