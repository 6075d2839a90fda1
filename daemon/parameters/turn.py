"""Orders the changes of a model's parameters and the loads of the model: a change is alone, loads begin to serve together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Turn(asyncio.Lock):
    """Held by one change of a model's parameters, or by all the loads of the model that begin to serve at that time."""

    def __init__(self) -> None:
        super().__init__()
        #: Held while one load is given parameters: what its worker dies of is known before another worker gets it.
        self.restoring = asyncio.Lock()
        self._entry = asyncio.Lock()
        self._loads = 0

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Waits for the change that holds the turn, and keeps later ones waiting until the block has ended.

        Loads do not wait for each other: a worker that is busy, or stands, holds up the model on none but itself.
        """
        async with self._entry:
            if not self._loads:
                await self.acquire()
            self._loads += 1
        try:
            yield
        finally:
            self._loads -= 1
            if not self._loads:
                self.release()
