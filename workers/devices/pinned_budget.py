"""Counts all host memory that a worker has page-locked, within ``workers.pinned_byte_size``."""

from __future__ import annotations

import threading


class PinnedBudget:
    """Counts the bytes of host memory that one GPU worker has page-locked, within a limit; several threads use it."""

    def __init__(self, limit: int) -> None:
        """``limit``: the bytes that may be locked at a time."""
        self.limit = limit
        #: Bytes that are locked now, or about to be.
        self.byte_size = 0
        self._lock = threading.Lock()

    def take(self, byte_size: int) -> bool:
        """Reserves bytes that are about to be locked. Returns False, and reserves nothing, if they would exceed the limit."""
        with self._lock:
            fits = self.byte_size + byte_size <= self.limit
            self.byte_size += byte_size if fits else 0
        return fits

    def give_back(self, byte_size: int) -> None:
        """Frees reserved bytes that are no longer locked."""
        with self._lock:
            self.byte_size -= byte_size

    def __repr__(self) -> str:
        return f"<PinnedBudget {self.byte_size}/{self.limit} bytes>"
