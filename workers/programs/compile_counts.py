"""Counts the programs that a worker compiles, in any thread, for its metrics."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from tensord.shm.figures import Compiles


class CompileCounts:
    """Counts programs that were compiled and programs that were found in the cache; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = self._ns = self._cache_hits = 0

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Counts one compilation, and the time spent in the ``with`` block. A compilation that fails is counted, too."""
        began_ns = time.monotonic_ns()
        try:
            yield
        finally:
            with self._lock:
                self._count += 1
                self._ns += time.monotonic_ns() - began_ns

    def found(self) -> None:
        """Counts a program that was found in the cache, so that it was not compiled."""
        with self._lock:
            self._cache_hits += 1

    def figures(self) -> Compiles:
        """Returns the counts so far: compilations, their time in ns, programs found in the cache."""
        with self._lock:
            return Compiles(self._count, self._ns, self._cache_hits)

    def __repr__(self) -> str:
        return f"<CompileCounts {self.figures()}>"
