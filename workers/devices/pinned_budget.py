"""How much host memory a worker has page-locked, all kinds of it together, within ``workers.pinned_byte_size``."""

from __future__ import annotations

import threading


class PinnedBudget:
    """One per GPU worker. Used by several threads."""

    def __init__(self, limit: int) -> None:
        """``limit``: bytes."""
        self.limit = limit
        #: What is locked now, or about to be.
        self.byte_size = 0
        self._lock = threading.Lock()

    def take(self, byte_size: int) -> bool:
        """Before so much is locked. False: it would be too much, and nothing is taken."""
        with self._lock:
            fits = self.byte_size + byte_size <= self.limit
            self.byte_size += byte_size if fits else 0
        return fits

    def give_back(self, byte_size: int) -> None:
        """So much is not locked any more."""
        with self._lock:
            self.byte_size -= byte_size

    def __repr__(self) -> str:
        return f"<PinnedBudget {self.byte_size}/{self.limit} bytes>"
