"""What a worker counts, in the form the supervisor asks for it (``shm.operations.WorkerFigures``): for metrics.

Statistics, which clients read, begin anew whenever a version is loaded. These go on where a load replaces another one, and say
when they began, so that whoever adds them up can tell counters that began anew from those that stand still.
"""

from __future__ import annotations

import operator

import msgspec


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
    #: Refused for want of room, before they ran or with what they came to (``shm.refusals``); in no statistics.
    queue_full: int = 0
    compiling: int = 0
    answer_room: int = 0
    #: Of the response cache: requests it answered, answers it took, and the time of each.
    cache_hit: int = 0
    cache_hit_ns: int = 0
    cache_miss: int = 0
    cache_miss_ns: int = 0

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
    #: Whether the response cache is used for it.
    cached: bool = False


class Figures(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Everything of one worker."""

    #: Those that take requests.
    versions: tuple[VersionFigures, ...]
    #: Kind of region, "system" or "cuda" -> tensors of requests that are in such regions now.
    leases: dict[str, int]
