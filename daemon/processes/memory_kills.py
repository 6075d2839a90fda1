"""Tells whether the kernel has killed a process of this daemon's control group for want of memory."""

from __future__ import annotations

from tensord.config.control_groups import MemoryGroup, memory_groups


class MemoryKills:
    """Tells whether the kernel has killed a process of one control group for want of memory, by the group's counter.

    ``group``: the control group; None: no group counts such kills.
    """

    def __init__(self, group: MemoryGroup | None) -> None:
        self._group = group
        self._last = self._count()

    @classmethod
    def own(cls) -> MemoryKills:
        """Makes an object for the innermost control group of this process that counts kills for want of memory.

        If no group counts them, ``grew`` always returns False.
        """
        return cls(next((group for group in memory_groups() if group.kills is not None), None))

    def grew(self) -> bool:
        """Returns whether a process of the control group was killed for want of memory since the last call or ``own``."""
        before, self._last = self._last, self._count()
        return self._last > before

    def _count(self) -> int:
        return 0 if self._group is None else self._group.kills or 0

    def __repr__(self) -> str:
        return f"<MemoryKills {self._last} in {self._group}>"
