"""Looking again and again, while anything waits."""

from __future__ import annotations

import asyncio

from tensord.daemon.submit.sweeper import Sweeper


async def test_it_looks_as_long_as_anything_waits() -> None:
    looked: list[float] = []
    done = asyncio.Event()

    def sweep(now: float) -> bool:
        looked.append(now)
        if len(looked) == 2:
            done.set()
        return len(looked) < 2

    sweeper = Sweeper(asyncio.get_running_loop(), sweep)
    sweeper.later()
    sweeper.later()
    assert "waiting" in repr(sweeper)
    await done.wait()
    assert "waiting" not in repr(sweeper)
    assert looked == sorted(looked)
    sweeper.later()
    sweeper.close()
    await asyncio.sleep(0.15)
    assert len(looked) == 2
