"""The records that say how far the daemon's start has come. Each is sent whole on every change; the latest one is valid."""

from __future__ import annotations

from tensord.shm.record import Record


class Readiness(Record, frozen=True, tag="readiness"):
    """Says whether the daemon is ready, and which of the models that should be served are not."""

    ready: bool = False
    #: The number of models that should be served, and of those that are not.
    wanted: int = 0
    unserved: int = 0
    #: The first names of the models that are not served, sorted.
    names: tuple[str, ...] = ()
    #: The worker's current loading step.
    at: str = ""
    #: Whether the daemon is being drained: it is not ready then, whatever is served.
    draining: bool = False
    #: Why processes that die cannot be replaced, other files being installed by now: which process said so; "": they can.
    outdated: str = ""

    def sentence(self) -> str:
        """Returns a sentence on why the daemon is not ready, or may not stay ready, such as which models are not served."""
        if self.draining:
            return "the server is draining"
        return "; ".join(filter(None, (self._unserved(), self.outdated)))

    def _unserved(self) -> str:
        if not self.unserved:
            return ""
        more = f" and {self.unserved - len(self.names)} more" if self.unserved > len(self.names) else ""
        at = f" ({self.at})" if self.at else ""
        return f"{self.unserved} of {self.wanted} models are not served: {', '.join(self.names)}{more}{at}"


class Loading(Record, frozen=True, tag="loading"):
    """Says which step of loading a model a worker is at: executable ``number`` of ``total``; 0 of 0 until the total is known."""

    name: str
    version: int
    number: int = 0
    total: int = 0
    #: The number of earlier executables that had to be compiled, because they were not in the cache.
    compiled: int = 0

    def __str__(self) -> str:
        """Returns the step in words: ``loading digits``, ``compiling digits 3/16, 1 from the cache``."""
        if not self.total:
            return f"loading {self.name}"
        cached = self.number - 1 - self.compiled
        return f"compiling {self.name} {self.number}/{self.total}, {cached} from the cache"
