"""The daemon at one moment, as metrics show it. Gathered on the supervisor's loop, written as text in another thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tensord.daemon.metrics.ledger import Total
from tensord.daemon.metrics.own_metrics import OwnFamily
from tensord.daemon.processes.gpu_watch import Gpu
from tensord.shm.control_records import Footprint
from tensord.shm.progress import Loading
from tensord.shm.refusals import Refusal


@dataclass(frozen=True, slots=True)
class WorkerPost:
    """A worker's place, whether it is filled now or not."""

    name: str
    device: str
    #: A process is there and has reported.
    up: bool
    #: It has said what it counts in time; else what is shown of it is what it said last.
    answered: bool
    #: How often a dead one was replaced.
    restarts: int
    #: Sequences that had begun on those that died.
    lost_sequences: int = 0
    #: What it loads now, if that is known.
    loading: Loading | None = None


@dataclass(frozen=True, slots=True)
class FrontPost:
    """A front's place, whether it is filled now or not."""

    name: str
    protocol: str
    up: bool
    connections: int
    restarts: int
    #: Requests that it has refused, by reason.
    refused: Mapping[Refusal, int]
    #: Kinds of requests that have a number now; that were given one, and that had to give it to others, ever.
    forms: int = 0
    forms_minted: int = 0
    forms_evicted: int = 0


@dataclass(frozen=True, slots=True)
class Regions:
    """Registered regions of one kind, "system" or "cuda"."""

    kind: str
    count: int
    byte_size: int
    #: Tensors of requests that are in them now.
    leases: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of it."""

    #: As /v2/health/ready says.
    ready: bool
    #: Models that should be served -> whether a version of each is.
    wanted: Mapping[str, bool]
    models: Sequence[Total]
    workers: Sequence[WorkerPost]
    fronts: Sequence[FrontPost]
    regions: Sequence[Regions]
    #: What may be registered, all kinds together.
    max_regions: int
    max_region_byte_size: int
    #: Name -> id of each process.
    processes: Mapping[str, int]
    #: Name and number of each version that is served -> what it takes on a worker.
    footprints: Mapping[tuple[str, int], Footprint]
    #: This host's, where models run on GPUs.
    gpus: Sequence[Gpu] = ()
    #: UUID and kind of what a GPU has met -> how often.
    gpu_errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    #: What models keep themselves.
    own: Sequence[OwnFamily] = ()
