"""How far a load is: told to the supervisor while it goes on, and said in the log of every program that had to be compiled."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

_log = logging.getLogger(__name__)
T = TypeVar("T")
#: ``tell(number, total)``: executable ``number`` of ``total`` is begun.
Tell = Callable[[int, int], None]


def nobody(number: int, total: int) -> None:
    """Nobody is told."""


class LoadProgress:
    """Of one load; belongs to the thread that loads."""

    def __init__(self, name: str, version: int, tell: Tell = nobody) -> None:
        self._what = f"model '{name}' version {version}"
        self._tell = tell
        self._number = 0
        self._total = 0
        self._began_ns = 0
        self._compiled = 0

    def through(self, wanted: Sequence[T]) -> Iterator[T]:
        """The executables that are to be made, one by one; says in the end what came of them."""
        self._total, started_ns = len(wanted), time.monotonic_ns()
        for self._number, one in enumerate(wanted, 1):
            self._began_ns = time.monotonic_ns()
            self._tell(self._number, self._total)
            yield one
        seconds = (time.monotonic_ns() - started_ns) / 1e9
        cached = self._total - self._compiled
        _log.info(
            "%s: %d executables compiled, %d from the cache, in %.1f s", self._what, self._compiled, cached, seconds
        )

    def compiled(self, what: object) -> None:
        """The present one was not in the cache."""
        self._compiled += 1
        seconds = (time.monotonic_ns() - self._began_ns) / 1e9
        _log.info("%s: %d of %d compiled in %.1f s: %s", self._what, self._number, self._total, seconds, what)
