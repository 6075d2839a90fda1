"""What a worker counts, in the form the supervisor asks for it (``tensord.shm.operations.WorkerFigures``): for metrics.

Statistics, which clients read, begin anew whenever a version is loaded. These go on where a load replaces another one, and say
when they began, so that whoever adds them up can tell counters that began anew from those that stand still.
"""

from __future__ import annotations

import operator

import msgspec

#: Bounds of the histogram of the time to the first response, as Triton's: in ms.
FIRST_RESPONSE_MS = (100, 500, 2000, 5000)


class Counts(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What only grows while a version is served on one worker. Requests, unless the name says otherwise."""

    success: int = 0
    #: Failed: waited too long; cancelled; refused by the model or its executable; anything else. Together as in statistics.
    rejected: int = 0
    canceled: int = 0
    backend: int = 0
    other: int = 0
    #: Rows, and runs of the model.
    inference: int = 0
    execution: int = 0
    #: Of successful requests, in ns.
    request_ns: int = 0
    queue_ns: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0
    #: Bytes of tensors (docs/data-plane.md).
    copied_byte_size: int = 0
    #: Refused for want of room, before they ran or with what they came to (``tensord.shm.refusals``); in no statistics.
    queue_full: int = 0
    compiling: int = 0
    answer_room: int = 0
    #: Of the response cache: requests it answered, answers it took, and the time of each.
    cache_hit: int = 0
    cache_hit_ns: int = 0
    cache_miss: int = 0
    cache_miss_ns: int = 0
    #: Of models with several responses: requests that had one, the time to the first one, and how many had it within each of
    #: ``FIRST_RESPONSE_MS``.
    first: int = 0
    first_ns: int = 0
    first_within_0: int = 0
    first_within_1: int = 0
    first_within_2: int = 0
    first_within_3: int = 0
    #: Sequences whose state went with a run that failed.
    lost_sequences: int = 0
    #: Rows and elements of inputs that were computed for nobody, because programs have fixed shapes.
    padded_rows: int = 0
    padded_elements: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(operator.add, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))


class VersionFigures(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One model version on one worker, as long as it is served there."""

    name: str
    version: int
    #: When its counters began (CLOCK_MONOTONIC): after an unload and a load it is another time.
    began_ns: int
    #: Requests that wait for their turn now, or for their shape to be compiled.
    pending: int
    counts: Counts
    #: Whether the response cache is used for it, and whether it answers with several responses.
    cached: bool = False
    streams: bool = False
    #: Of a model with sequences: those with a slot, and those that wait for one.
    sequences: tuple[int, int] | None = None


class MetricFigures(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One metric that a model keeps itself."""

    labels: tuple[tuple[str, str], ...]
    #: The value; of a histogram the sum of what it has observed.
    value: float
    #: Of a histogram: upper bounds, and how many were within each and no smaller one; the last beyond all.
    buckets: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()


class OwnMetrics(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A family of them."""

    name: str
    description: str
    #: "counter", "gauge", "histogram".
    kind: str
    #: The models and versions that have made it.
    owners: tuple[tuple[str, int], ...]
    metrics: tuple[MetricFigures, ...]


class Figures(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Everything of one worker."""

    #: Those that take requests.
    versions: tuple[VersionFigures, ...]
    #: Kind of region, "system" or "cuda" -> tensors of requests that are in such regions now.
    leases: dict[str, int]
    #: What models keep themselves.
    own: tuple[OwnMetrics, ...] = ()
