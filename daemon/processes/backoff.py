"""How long to wait before a dead process is replaced: short at first, doubling, never in step with others. Pure."""

from __future__ import annotations

import random

#: A process that lived this long was healthy: its death starts a new series.
HEALTHY_NS = 60 * 10**9
#: Seconds; the longest wait after a process that had come up.
SERVED_MAXIMUM = 1.0


class Backoff:
    """One post's history: the post stays, the processes in it change."""

    def __init__(self, first: float, maximum: float, chance: random.Random) -> None:
        """``first`` and ``maximum`` in seconds. ``chance`` spreads the delays by up to a tenth."""
        self._first = first
        self._maximum = maximum
        self._chance = chance
        #: Deaths in the present series.
        self.deaths = 0

    def died(self, lived_ns: int, served: bool) -> float:
        """Notes a death; returns the seconds to wait before the replacement starts.

        ``served``: it had come up. Requests wait for its replacement, and another process did come up in its place so far, so
        they do not wait long; one that never comes up is not tried again and again.
        """
        if lived_ns >= HEALTHY_NS:
            self.deaths = 0
        maximum = min(self._maximum, SERVED_MAXIMUM) if served else self._maximum
        # 2**20 is beyond any maximum; without the bound a long series would overflow.
        delay: float = min(maximum, self._first * 2 ** min(self.deaths, 20))
        self.deaths += 1
        return delay * self._chance.uniform(0.9, 1.0)

    def __repr__(self) -> str:
        return f"<Backoff deaths={self.deaths}>"
