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
        #: Names that were wanted when the daemon started, and still are.
        self._first: set[str] = set()
        #: If any: these alone count, from whenever.
        self._required: frozenset[str] = frozenset()
        #: Those of both that have served.
        self._served: set[str] = set()
        #: Incarnation of a worker -> what it loads now.
        self._loading: dict[int, Loading] = {}

    def begin(self, wanted: Iterable[str], required: Iterable[str]) -> None:
        """It is known what is wanted, for the first time or again after a reload. ``required``: ``repository.required``."""
        if not self._begun:
            self._first = set(wanted)
        self._required = frozenset(required)
        self._begun = True

    def loads(self, worker: int, at: Loading | None) -> None:
        """What a worker loads now; None: it has answered, or is gone."""
        if at is None:
            self._loading.pop(worker, None)
        else:
            self._loading[worker] = at

    def judge(self, strict: bool) -> None:
        """Publishes what has changed. ``strict``: as of ``readiness``."""
        standings = list(self._standings())
        self._first &= {model.name for model in standings}
        self._served &= self._first | self._required
        self._served |= {model.name for model in standings if model.served} & (self._first | self._required)
        counted = (self._required or self._first) - self._served
        judged = readiness.readiness(standings, strict, counted)
        if judged.unserved and self._loading:
            judged = msgspec.structs.replace(judged, at=str(next(iter(self._loading.values()))))
        if self._begun and judged != self.readiness:
            self.readiness = judged
            self._publish(judged)
