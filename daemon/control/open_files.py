"""Repeats an operation while it fails because a process of the daemon has no free file descriptor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tensord.shm import descriptors
from tensord.shm.errors import ServingError

T = TypeVar("T")


async def awaited(attempt: Callable[[], Awaitable[T]], on_wait: Callable[[Exception], object] = lambda _: None) -> T:
    """Awaits ``attempt()`` and returns the result. Tries again each second as long as no file descriptor is free.

    Raises every other error of ``attempt``. ``on_wait``: called with the error before the second attempt, and not again.
    """
    while True:
        try:
            return await attempt()
        except (ServingError, OSError) as error:
            if not descriptors.lacked(error):
                raise
            on_wait(error)
            on_wait = lambda _: None  # noqa: E731
        await asyncio.sleep(descriptors.AGAIN_SECONDS)
