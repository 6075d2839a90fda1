"""Repeats what fails because a process of the daemon may open no more files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tensord.shm import descriptors
from tensord.shm.errors import ServingError

T = TypeVar("T")


async def awaited(attempt: Callable[[], Awaitable[T]], on_wait: Callable[[Exception], object] = lambda _: None) -> T:
    """Calls ``attempt`` until it does not fail for lack of a file descriptor, once a second. Returns its result.

    No process learns that another one has closed a file, so nothing but a further attempt can tell.
    ``on_wait``: called with the error of the first attempt, if there is a second one. Raises whatever else ``attempt`` raises.
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
