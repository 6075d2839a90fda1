"""Keeps an exemplar for each bucket of the duration histograms: the trace of the last traced request that fell into the bucket.

    Trace.end ─▶ Exemplars ─▶ TraceExemplars, when somebody scrapes OpenMetrics ─▶ the supervisor ─▶ ``# {trace_id="..."} 0.01``

Only traced requests are noted. Used in the front's loop only.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from tensord.shm import trace_stamps
from tensord.shm.durations import COMPUTE, FIRST_RESPONSE, QUEUE, REQUEST

#: Model versions that have some; the one that was traced longest ago makes room.
_MAX_VERSIONS = 1024
#: The kind of a duration -> the stamps at its two ends.
_ENDS = (
    (REQUEST, trace_stamps.REQUEST_START, trace_stamps.COMPUTE_END),
    (QUEUE, trace_stamps.REQUEST_START, trace_stamps.COMPUTE_START),
    (COMPUTE, trace_stamps.COMPUTE_START, trace_stamps.COMPUTE_END),
    (FIRST_RESPONSE, trace_stamps.REQUEST_START, trace_stamps.RESPONSE_START),
)
#: The place of a bucket (kind, number) and what is there: the trace's id, the duration in seconds, and seconds since 1970.
Bucket = tuple[int, int]
Exemplar = tuple[str, float, float]


class Exemplars:
    """Remembers one front's last traced request in each bucket of each model version's histograms: the bucket's exemplar.

    Args:
      buckets: upper bounds of the histograms, in seconds.
    """

    def __init__(self, buckets: Sequence[float]) -> None:
        self._buckets = buckets
        self._versions: dict[tuple[str, int], dict[Bucket, Exemplar]] = {}

    def note(self, model: str, version: int, trace_id: str, moments: Mapping[str, int]) -> None:
        """Stores a traced request, answered without an error, as the exemplar of each bucket that its durations fall into.

        ``moments``: CLOCK_MONOTONIC ns of each timestamp, by its name.
        """
        found = self._versions.pop((model, version), {})
        while len(self._versions) >= _MAX_VERSIONS:
            del self._versions[next(iter(self._versions))]
        self._versions[model, version] = found
        now = time.time()
        for kind, begins, ends in _ENDS:
            if begins in moments and ends in moments:
                seconds = max(0, moments[ends] - moments[begins]) / 1e9
                found[kind, bisect_left(self._buckets, seconds)] = trace_id, seconds, now

    def told(self) -> list[tuple[str, int, list[tuple[int, int, str, float, float]]]]:
        """Returns (model, version, exemplars) of each model version: the answer to the supervisor's ``TraceExemplars``.

        An exemplar is: the kind of duration (``tensord.shm.durations``), the number of the bucket, the trace's id, the duration
        in seconds, and when it was noted, in seconds since 1970.
        """
        return [
            (model, version, [(*bucket, *exemplar) for bucket, exemplar in found.items()])
            for (model, version), found in self._versions.items()
        ]

    def __repr__(self) -> str:
        return f"<Exemplars of {len(self._versions)} model versions>"
