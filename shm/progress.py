"""The records that say how far the daemon is: sent whole on every change, and the last one holds."""

from __future__ import annotations

from tensord.shm.record import Record


class Readiness(Record, frozen=True, tag="readiness"):
    """Whether the daemon is ready, and which of the wanted models serve nothing now."""

    ready: bool = False
    #: Models that should be served, and how many of them are not.
    wanted: int = 0
    unserved: int = 0
    #: The first of those, by name.
    names: tuple[str, ...] = ()
    #: What a worker loads now, and how far it is.
    at: str = ""

    def sentence(self) -> str:
        """Which models serve nothing; "": none of the wanted ones."""
        if not self.unserved:
            return ""
        more = f" and {self.unserved - len(self.names)} more" if self.unserved > len(self.names) else ""
        at = f" ({self.at})" if self.at else ""
        return f"{self.unserved} of {self.wanted} models are not served: {', '.join(self.names)}{more}{at}"


class Loading(Record, frozen=True, tag="loading"):
    """What the loader is at: executable ``number`` of ``total``; 0 of 0 while it is not known yet how many there are."""

    name: str
    version: int
    number: int = 0
    total: int = 0
    #: Of those before it, how many had to be compiled, and were not in the cache.
    compiled: int = 0

    def __str__(self) -> str:
        """``loading digits``, ``compiling digits 3/16, 1 from the cache``."""
        if not self.total:
            return f"loading {self.name}"
        cached = self.number - 1 - self.compiled
        return f"compiling {self.name} {self.number}/{self.total}, {cached} from the cache"
