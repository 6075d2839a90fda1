"""The counters of a worker. The supervisor asks for them (``tensord.shm.operations.WorkerFigures``) to make metrics.

If a loaded model version is loaded again, its counters go on. If it is loaded after an unload, its counters start at 0, and
``VersionFigures.began_ns`` is the time of that load.
"""

from __future__ import annotations

import enum
import operator

import msgspec

#: Upper bounds of the histogram of the time to the first response, as Triton's, in ms.
FIRST_RESPONSE_MS = (100, 500, 2000, 5000)


class SlowReason(enum.Enum):
    """The reason why a worker answered a request in Python instead of C. The value is a sentence for operators."""

    # Of a model version: they hold for each request to it.
    NOT_COMPILED = "the C extension was not built when tensord was installed"
    INSTANCES = "the model runs in threads or processes of its own, not in the worker's loop"
    STREAMS = "a request to the model may have several responses"
    ORDERED = "the model's answers keep the order of their requests"
    QUEUE = "the model's queue has priorities, a policy, or replaces requests"
    PROPERTIES = "the model has inputs that are made of properties of the request"
    CACHE = "the response cache is used for the model"
    DATATYPES = "the model has inputs whose bytes are converted: BYTES, BOOL, or with another shape than clients send"
    # Of a kind of requests, or of an ensemble: it is known when one has run.
    CLASSIFICATION = "the requests want outputs as class labels"
    NEW = "the requests were the first of their kind, or of ever other shapes, or a model or a region had just changed"
    INSIDE = "the requests were made by a model or by a step of an ensemble"
    TRACED = "the requests were traced before an answer to one without a trace was known"
    PARAMETERS = "the requests use or name another parameter set than the newest main"
    REGIONS = "the requests have tensors in regions of a GPU, or empty ones, or a sequence whose tensors are in regions"
    STEPS = "the steps of the ensemble run as requests to their models"
    LARGE = "the tensors are large or on a GPU, and the program can neither read nor write them where they are"
    UNFIT = "no run of C fits: the requests are padded, leave out inputs, have too many tensors, or are large and share runs"

    @property
    def label(self) -> str:
        """Returns the reason's name in lower case, for metrics."""
        return self.name.lower()


class Counts(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Counters of one model version on one worker. They count requests unless their names say something else."""

    success: int = 0
    #: Failed requests: waited too long; cancelled; refused by the model or its executable; anything else. Sums as in statistics.
    rejected: int = 0
    canceled: int = 0
    backend: int = 0
    other: int = 0
    #: Rows, and runs of the model.
    inference: int = 0
    execution: int = 0
    #: Durations of successful requests, in ns.
    request_ns: int = 0
    queue_ns: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0
    #: Bytes of tensors that were copied (docs/data-plane.md).
    copied_byte_size: int = 0
    #: Requests refused for want of room, before they ran or with their answer (``tensord.shm.refusals``); in no statistics.
    queue_full: int = 0
    compiling: int = 0
    answer_room: int = 0
    #: The response cache: requests it answered, answers it stored, and the time of each.
    cache_hit: int = 0
    cache_hit_ns: int = 0
    cache_miss: int = 0
    cache_miss_ns: int = 0
    #: Models with several responses: requests that had one, the time to the first one, and how many had it within each of
    #: ``FIRST_RESPONSE_MS``.
    first: int = 0
    first_ns: int = 0
    first_within_0: int = 0
    first_within_1: int = 0
    first_within_2: int = 0
    first_within_3: int = 0
    #: Sequences that lost their state with a run that failed.
    lost_sequences: int = 0
    #: Rows and elements of padding that were computed, because programs have fixed shapes.
    padded_rows: int = 0
    padded_elements: int = 0
    #: Failed requests that newer ones replaced while they waited.
    replaced: int = 0
    #: Time of all runs, each once however many requests it was for, in ns. Of an ensemble 0: its steps' runs are theirs.
    busy_ns: int = 0
    #: Label of ``SlowReason`` -> requests that were not answered in C for this reason.
    slow: dict[str, int] = {}

    def __add__(self, other: Counts) -> Counts:
        *counts, slow = msgspec.structs.astuple(self)
        *others, more = msgspec.structs.astuple(other)
        slow = {label: slow.get(label, 0) + more.get(label, 0) for label in slow | more}
        return msgspec.structs.replace(Counts(*map(operator.add, counts, others)), slow=slow)


class SetFigures(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A parameter set on one worker: name, number of the push of its values, size in bytes, and whether it is on the device."""

    name: str
    #: 0: what the repository has.
    number: int
    byte_size: int
    on_device: bool


class ParameterFigures(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The parameter sets of one model version on one worker, and counters of their use."""

    sets: tuple[SetFigures, ...]
    #: Pushes that were committed.
    pushes: int = 0
    #: Batches whose set had to be placed on the device first; sets that left it for others.
    misses: int = 0
    evictions: int = 0


class VersionFigures(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The counters of one model version on one worker, from ``began_ns`` on."""

    name: str
    version: int
    #: When its counters began (CLOCK_MONOTONIC): after an unload and a load it is another time.
    began_ns: int
    #: Requests that wait now: in the queue, or for their shape to be compiled.
    pending: int
    counts: Counts
    #: True if the response cache is used for this version; and if it gives several responses.
    cached: bool = False
    streams: bool = False
    #: The sequences with a slot, and those that wait for one; None for a model without sequences.
    sequences: tuple[int, int] | None = None
    #: Histograms of its clients' requests that were answered well, as ``tensord.shm.durations`` has them.
    durations: dict[str, tuple[int, ...]] = {}
    #: None: parameters of this model cannot be pushed.
    parameters: ParameterFigures | None = None


class MetricFigures(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The value of a metric that a model's code has defined, for one combination of labels."""

    labels: tuple[tuple[str, str], ...]
    #: The value; for a histogram the sum of what it has observed.
    value: float
    #: The upper bounds of a histogram, and how many values were within each and no smaller one; the last counts those beyond all.
    buckets: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()


class OwnMetrics(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A metric that models' code has defined, with a value for each combination of labels."""

    name: str
    description: str
    #: One of "counter", "gauge", "histogram".
    kind: str
    #: The models and versions that have made it.
    owners: tuple[tuple[str, int], ...]
    metrics: tuple[MetricFigures, ...]


class Compiles(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Counts the programs that a worker has compiled, and the programs that it found in the cache instead."""

    #: Compilations, those that failed included, and the time of all of them in ns.
    count: int = 0
    ns: int = 0
    #: Programs that the cache had.
    cache_hits: int = 0


class Figures(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """All counters of one worker, for metrics."""

    #: The versions that take requests.
    versions: tuple[VersionFigures, ...]
    #: Kind of region, "system" or "cuda" -> tensors of requests that are in such regions now.
    leases: dict[str, int]
    #: The metrics that models keep themselves.
    own: tuple[OwnMetrics, ...] = ()
    #: Requests that came on clients' lanes, ever; and bytes of the segments that such lanes have opened and not closed.
    lane_requests: int = 0
    lane_byte_size: int = 0
    compiles: Compiles = Compiles()
    #: Code -> final answers on clients' lanes, ever.
    lane_answers: dict[str, int] = {}
