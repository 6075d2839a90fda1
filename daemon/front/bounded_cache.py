"""Defines a cache of bounded size, which keeps the values that were stored or looked up last."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(dict[K, V | None]):
    """Caches values by key. Keeps at least the ``count`` values that were stored or found last, and at most twice as many.

    If ``count`` is 0, nothing is stored. ``cache[key]`` returns the value, or None if it was never stored or was evicted.
    """

    __slots__ = ("_count", "_old")

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self._old: dict[K, V | None] = {}

    def __missing__(self, key: K) -> V | None:
        value = self._old.pop(key, None)
        if value is not None:
            self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        """Caches a value under a key, and may evict values that were not looked up for long."""
        if not self._count:
            return
        if len(self) >= self._count:
            self._old = dict(self)
            self.clear()
        self[key] = value

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} and {len(self._old)}>"
