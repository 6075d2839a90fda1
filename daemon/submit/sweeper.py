"""Looks again and again for what waited too long, while anything waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_SWEEP_SECONDS = 0.1


class Sweeper:
    """``sweep`` gets the loop's time, ends what is late, and says whether anything waits still."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sweep: Callable[[float], bool]) -> None:
        self._loop = loop
        self._sweep = sweep
        self._timer: asyncio.TimerHandle | None = None

    def later(self) -> None:
        """Something waits."""
        if self._timer is None:
            self._timer = self._loop.call_later(_SWEEP_SECONDS, self._due)

    def close(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _due(self) -> None:
        self._timer = None
        if self._sweep(self._loop.time()):
            self.later()

    def __repr__(self) -> str:
        return f"<Sweeper{'' if self._timer is None else ', waiting'}>"
