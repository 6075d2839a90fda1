"""Dataclasses that hold the values of all metrics at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tensord.daemon.control.shared_counters import FrontCounts
from tensord.daemon.metrics.ledger import Total
from tensord.daemon.processes.gpu_watch import GpuState
from tensord.shm.control_records import Footprint, Loading
from tensord.shm.figures import Compiles, OwnMetrics


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """The metrics of the worker ``name``. They include the counts of dead processes that had this name."""

    name: str
    device: str
    up: bool
    answered: bool
    restarts: int
    lost_sequences: int = 0
    loading: Loading | None = None
    #: Clients' lanes that are open, requests that came on such lanes, ever, and bytes of the clients' segments there.
    lanes: int = 0
    lane_requests: int = 0
    lane_byte_size: int = 0
    compiles: Compiles = field(default_factory=Compiles)
    #: Code -> final answers on clients' lanes, ever.
    lane_answers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FrontSlot:
    """The metrics of the front ``name``. They include the counts of dead processes that had this name."""

    name: str
    protocol: str
    up: bool
    restarts: int
    counts: FrontCounts


@dataclass(frozen=True, slots=True)
class RegionTotals:
    """Counts the registered regions of one kind ("system", "cuda"), their bytes, and the tensors that use them now."""

    kind: str
    count: int
    byte_size: int
    leases: int


#: A bucket (model, version, protocol, kind of duration, number), and its exemplar, the traced request that came last (trace id,
#: duration in seconds, seconds since 1970).
Exemplar = tuple[tuple[str, int, str, int, int], tuple[str, float, float]]


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """Holds everything that one answer of /metrics shows, gathered at one moment."""

    ready: bool
    #: Models that should be served -> whether a version of each is.
    wanted: Mapping[str, bool]
    models: Sequence[Total]
    workers: Sequence[WorkerSlot]
    fronts: Sequence[FrontSlot]
    regions: Sequence[RegionTotals]
    #: The limits of regions, all kinds together.
    max_regions: int
    max_region_byte_size: int
    #: Name -> id of each process.
    processes: Mapping[str, int]
    #: Name and number of each version that is served -> its footprint on a worker.
    footprints: Mapping[tuple[str, int], Footprint]
    gpus: Sequence[GpuState] = ()
    #: UUID of a GPU and kind of its errors -> how often they were reported.
    gpu_errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    own: Sequence[OwnMetrics] = ()
    #: Clients that are connected to their socket, and lanes that they were refused, ever.
    clients: int = 0
    refused_lanes: int = 0
    #: Name, number and state of every version that is known, as in the repository index.
    states: Sequence[tuple[str, int, str]] = ()
    #: Name of a process's slot and why processes died there -> how many.
    deaths: Mapping[tuple[str, str], int] = field(default_factory=dict)
    #: True if the last reload of the configuration was successful, and when the last successful one was (seconds since 1970).
    reloaded: bool = True
    reloaded_at: float = 0.0
    #: Upper bounds of the histograms of durations, in seconds.
    buckets: Sequence[float] = ()
    #: Model and version -> its pushed parameter sets, and the number of its set ``main``; and the bytes of all sets.
    parameter_sets: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    parameter_byte_size: int = 0
    #: Model and outcome of a change of its sets -> how often, ever.
    parameter_changes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    #: The exemplars of all buckets; where a bucket has several, the last one counts.
    exemplars: Sequence[Exemplar] = ()
    spans: Mapping[str, int] = field(default_factory=dict)
