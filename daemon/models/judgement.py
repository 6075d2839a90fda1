"""Says whether the daemon is ready as soon as that changes, and meanwhile how far loads are. Belongs to the supervisor's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from tensord.daemon.models import readiness
from tensord.daemon.models.readiness import Standing
from tensord.shm.progress import Loading, Readiness


class Judgement:
    """Owns what was published last."""

    def __init__(self, standings: Callable[[], Iterable[Standing]], publish: Callable[[Readiness], None]) -> None:
        """``standings``: of every wanted model now."""
        self._standings = standings
        self._publish = publish
        #: As it was published last; not before it is known what is wanted.
        self.readiness = Readiness()
        self._begun = False
        #: Incarnation of a worker -> what it loads now.
        self._loading: dict[int, Loading] = {}

    def begin(self) -> None:
        """It is known what is wanted."""
        self._begun = True

    def loads(self, worker: int, at: Loading | None) -> None:
        """What a worker loads now; None: it has answered, or is gone."""
        if at is None:
            self._loading.pop(worker, None)
        else:
            self._loading[worker] = at

    def judge(self, strict: bool) -> None:
        """Publishes what has changed. ``strict``: as of ``readiness``."""
        judged = readiness.readiness(self._standings(), strict)
        if judged.unserved and self._loading:
            judged = msgspec.structs.replace(judged, at=str(next(iter(self._loading.values()))))
        if self._begun and judged != self.readiness:
            self.readiness = judged
            self._publish(judged)
