"""The records of a control channel: what the supervisor and its children, fronts and workers, say to each other.

Pure values, no I/O: ``tensord.shm.channel`` carries them; ``tensord.shm.record`` says what they all are.

                supervisor --> front                     front --> supervisor
    control     Start Serve Stop LaneOpened              ChildReady Call Seen
                WorkerFenced ModelState ModelGone
                Readiness RegionPlace Reply Told
                LogChanged TraceChanged TraceCleared

                supervisor --> worker                    worker --> supervisor
    control     Start Stop LaneOpened Load Unload        ChildReady Loaded Reply
                CancelLoad Call Reply LogChanged         Unloaded Loading Call

A Call, by a front, by a worker or to one, is answered by one Reply with the same ``call_id``; what it asks for is in
``tensord.shm.operations``.
"""

from __future__ import annotations

import msgspec

from tensord.shm.operations import ANONYMOUS, Operation, Peer
from tensord.shm.progress import Loading, Readiness
from tensord.shm.record import Record


class Footprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a model that is not compiled, only the time is known."""

    #: From its files to its last program, run once.
    seconds: float = 0.0
    #: Programs that were made, and how many of them had to be compiled; the others came from the cache.
    programs: int = 0
    compiled: int = 0
    #: Of the parameters on the device.
    parameter_byte_size: int = 0
    #: Of all programs, as they are kept.
    program_byte_size: int = 0
    #: Inputs, outputs and what lies between them, of the program that takes most; and what that is for.
    batch_byte_size: int = 0
    largest: str = ""
    #: Floating-point operations of one run of it; -1: the back end does not say.
    flops: float = -1.0


class Start(Record, frozen=True, tag="start"):
    """First record to a child: who it is and the whole configuration (``tensord.config.options.Options`` as msgpack)."""

    #: Unique per process start; the child repeats it in ChildReady, so answers of a predecessor are never mistaken.
    incarnation: int
    #: "http-0", "worker-1": for logs and process titles.
    name: str
    options: msgspec.Raw


class Stop(Record, frozen=True, tag="stop"):
    """Finish what is in flight within ``grace_ns``, then exit 0. A front stops accepting at once."""

    grace_ns: int


class ChildReady(Record, frozen=True, tag="ready"):
    """The child does its work: a front serves clients, a worker its control channel.

    A worker's carries two descriptors: its status page (``tensord.shm.status_page``) and its sequence page
    (``tensord.shm.sequence_page``).
    """

    incarnation: int
    #: What it goes without, for want of a C extension; a sentence each.
    missing: tuple[str, ...] = ()
    #: What it goes without, because its JAX lacks an interface that is not public; a sentence each.
    jax_lacks: tuple[str, ...] = ()


class Told(Record, frozen=True, tag="told"):
    """To a front: everything up to that edition of what fronts have to know was sent. Answered with Seen."""

    edition: int


class Seen(Record, frozen=True, tag="seen"):
    """The front acts upon everything up to that edition."""

    edition: int


class Serve(Record, frozen=True, tag="serve"):
    """The front knows all that the others know: from now on it may take clients."""


class LaneOpened(Record, frozen=True, tag="lane"):
    """One end of a lane's SEQPACKET pair travels with this record.

    To a front: ``peer`` is the worker's incarnation, ``device`` its name ("cpu:0", "cuda:1"), and two further descriptors are
    that worker's status page (``tensord.shm.status_page``) and its sequence page. To a worker: ``peer`` is the submitter's
    incarnation.
    """

    peer: int
    device: str = ""


class LogChanged(Record, frozen=True, tag="log"):
    """Log that way from now on. ``options``: ``tensord.config.options.Log`` as msgpack; ``name``: the receiver's, as in Start."""

    name: str
    options: msgspec.Raw


class TraceChanged(Record, frozen=True, tag="trace"):
    """Sample requests for a model, or ("") for all models without settings of their own, that way from now on.

    Where anything is traced descriptors come along: whose turn it is, and under a limit the number of traces left
    (``tensord.daemon.tracing.trace_counters``).
    """

    model: str
    #: As Submit.trace; 0: none.
    level: int
    #: One request in so many.
    rate: int
    log_frequency: int
    file: str


class TraceCleared(Record, frozen=True, tag="untrace"):
    """That model has no trace settings of its own any more."""

    model: str


class WorkerFenced(Record, frozen=True, tag="fenced"):
    """That worker process is certainly gone (pidfd), so its requests may be run elsewhere."""

    worker: int


class ModelState(Record, frozen=True, tag="model"):
    """What a front needs to know of one model version. Sent whole on every change; the last one holds."""

    name: str
    version: int
    #: UNKNOWN, READY, UNAVAILABLE, LOADING, UNLOADING: Triton's index states.
    state: str
    reason: str = ""
    #: Incarnations of the workers where it is READY.
    workers: tuple[int, ...] = ()
    #: Metadata answer (without "versions") and full ModelConfig, both JSON; empty unless READY.
    metadata: bytes = b""
    config: bytes = b""
    #: Whether a request may be run again where a worker died or a batch failed: not if the model keeps anything between requests.
    repeatable: bool = True
    #: Whether requests of a sequence have to reach the worker that has it.
    sticky: bool = False
    #: Whether it answers a request with any number of responses (Triton: decoupled).
    streams: bool = False
    #: Whether these can be joined along their first axes, for who wants one.
    joins: bool = False
    #: Its model says itself whether it is ready, and is asked by whoever wants to know.
    judges: bool = False
    #: The devices whose workers load it, whether they are there now or not; empty: all.
    devices: tuple[str, ...] = ()


class ModelGone(Record, frozen=True, tag="gone"):
    """That version is no longer known."""

    name: str
    version: int


class RegionPlace(Record, frozen=True, tag="place"):
    """The region is memory of that GPU, so requests that name it go there if their model is there. "": the region is gone.

    Sent for CUDA regions where there are several workers; every other region is as near to all of them.
    """

    region: str
    #: "cuda:1"; of workers that have several GPUs, their first one.
    device: str


class Load(Record, frozen=True, tag="load"):
    """Load one version and warm it; the answer is Loaded. The model before it keeps serving meanwhile."""

    name: str
    version: int
    #: The model's directory and the version's directory, absolute.
    model_path: str
    version_path: str
    #: Serialised ModelConfig protobuf as far as the operator gave it; the worker completes it.
    config: bytes
    #: How many workers load it: they share its bounds.
    workers: int = 1
    #: Digest of its files and configuration but for the number of its instances: with the same one only that has changed.
    content: str = ""


class CancelLoad(Record, frozen=True, tag="cancel-load"):
    """Nobody wants what the loads of that version bring that came before: they end as soon as they can, each with its answer."""

    name: str
    version: int


class Loaded(Record, frozen=True, tag="loaded"):
    """A version is ready, or failed with ``reason`` (one calm sentence)."""

    name: str
    version: int
    reason: str = ""
    #: It did not fail: it was given up, because nobody wants it any more.
    cancelled: bool = False
    metadata: bytes = b""
    config: bytes = b""
    #: As in ModelState.
    repeatable: bool = True
    sticky: bool = False
    streams: bool = False
    joins: bool = False
    #: Its model says itself whether it is ready, and is asked by whoever wants to know.
    judges: bool = False
    footprint: Footprint = Footprint()


class Unload(Record, frozen=True, tag="unload"):
    """Take no new requests for that version, finish the queued ones, drop it; answered with Unloaded."""

    name: str
    version: int


class Unloaded(Record, frozen=True, tag="unloaded"):
    """That version is gone from the worker."""

    name: str
    version: int


class Call(Record, frozen=True, tag="call"):
    """A question with an answer. With a registration of a region travels a pidfd of the client's process, where there is one."""

    call_id: int
    operation: Operation
    #: For whom a front asks.
    peer: Peer = ANONYMOUS


class Reply(Record, frozen=True, tag="reply"):
    """The answer to a Call: ``result`` (JSON, often empty) or a ServingError as code and message."""

    call_id: int
    code: str = ""
    message: str = ""
    result: bytes = b""


ToFront = (
    Start
    | Serve
    | Told
    | Stop
    | LogChanged
    | TraceChanged
    | TraceCleared
    | LaneOpened
    | WorkerFenced
    | ModelState
    | ModelGone
    | Readiness
    | RegionPlace
    | Reply
)
FromFront = ChildReady | Seen | Call
ToWorkerControl = Start | Stop | LogChanged | LaneOpened | Load | CancelLoad | Unload | Call | Reply
FromWorker = ChildReady | Loaded | Loading | Unloaded | Reply | Call
