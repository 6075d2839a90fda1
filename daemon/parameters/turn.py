"""Orders the changes of a model's parameters and the loads of the model: a change is alone, loads begin to serve together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Turn:
    """Lets changes of a model's parameters, and loads of the model that are to serve, go on in the order in which they came."""

    def __init__(self) -> None:
        #: Held while one load is given parameters: what its worker dies of is known before another worker gets it.
        self.restoring = asyncio.Lock()
        #: Held by a change until it has ended, and by a load for no longer than it waits.
        self._entry = asyncio.Lock()
        self._loads = 0
        #: Set while no load has its turn.
        self._without_loads = asyncio.Event()
        self._without_loads.set()

    @contextlib.asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Waits until the changes and loads that came before have ended, and keeps later ones waiting until the block has."""
        async with self._entry:
            await self._without_loads.wait()
            yield

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Waits until the changes that came before have ended, and keeps later ones waiting until the block has.

        Loads do not wait for each other, except to be given parameters: a worker that is busy, or stands, holds up another one
        only while it is given some, or where a change waits for it.
        """
        async with self._entry:
            self._loads += 1
            self._without_loads.clear()
        try:
            yield
        finally:
            self._loads -= 1
            if not self._loads:
                self._without_loads.set()
