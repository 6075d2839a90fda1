"""Counts the host memory that a worker has page-locked, of all kinds, within ``workers.pinned_byte_size``."""

from __future__ import annotations

import threading


class PinnedBudget:
    """The bytes that one GPU worker may lock; several threads use it."""

    def __init__(self, limit: int) -> None:
        """Allows ``limit`` bytes."""
        self.limit = limit
        #: Bytes that are locked now, or about to be.
        self.byte_size = 0
        self._lock = threading.Lock()

    def take(self, byte_size: int) -> bool:
        """Reserves bytes that are about to be locked. Returns False where there are too few, and reserves none."""
        with self._lock:
            fits = self.byte_size + byte_size <= self.limit
            self.byte_size += byte_size if fits else 0
        return fits

    def give_back(self, byte_size: int) -> None:
        """Gives bytes back that are not locked any more."""
        with self._lock:
            self.byte_size -= byte_size

    def __repr__(self) -> str:
        return f"<PinnedBudget {self.byte_size}/{self.limit} bytes>"
