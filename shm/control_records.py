"""The records that the supervisor exchanges with its child processes, which are fronts and workers.

``tensord.shm.channel`` sends and receives them. ``tensord.shm.record`` has their base class.

    supervisor --> front                      front --> supervisor
      Start Serve Stop LaneOpened               ChildReady ControlCall
      WorkerFenced ModelState ModelGone         StateAcknowledged
      Readiness RegionPlace Reply               Reply TracesEnded
      StatePublished LogChanged                 LaneClosed
      TraceChanged TraceCleared
      ControlCall RequestsRefused

    supervisor --> worker                     worker --> supervisor
      Start Stop LaneOpened LaneClosed          ChildReady Loaded Reply
      Load Unload CancelLoad                    Unloaded Loading
      LogChanged ControlCall Reply              ControlCall LaneClosed
      TraceChanged TraceCleared                 TracesEnded

Whoever gets a ControlCall answers it with one Reply that has the same ``call_id``. ``tensord.shm.operations`` has the
operations that a ControlCall may ask for.
"""

from __future__ import annotations

import msgspec

from tensord.shm import descriptors
from tensord.shm.errors import NoDescriptor, ServingError, from_code
from tensord.shm.messages import Timeline
from tensord.shm.operations import ANONYMOUS, Operation, Peer
from tensord.shm.record import Record


class Footprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time and memory that loading a model took. If the model has no compiled programs, only the time is known."""

    #: Seconds from reading its files to its last program, run once.
    seconds: float = 0.0
    #: The number of its programs, and how many of them had to be compiled; the others came from the cache.
    programs: int = 0
    compiled: int = 0
    #: Bytes of the parameters on the device.
    parameter_byte_size: int = 0
    #: Bytes of all programs, as they are stored.
    program_byte_size: int = 0
    #: Bytes of inputs, outputs and temporaries of the program that takes most; and what that program is for.
    batch_byte_size: int = 0
    largest: str = ""


class Readiness(Record, frozen=True, tag="readiness"):
    """Tells fronts whether the daemon is ready, and which models it should serve but does not."""

    ready: bool = False
    #: The number of models that should be served, and of those that are not.
    wanted: int = 0
    unserved: int = 0
    #: The first names of the models that are not served, sorted.
    names: tuple[str, ...] = ()
    #: The worker's current loading step.
    at: str = ""
    #: True if the daemon is being drained: it is not ready then, whatever is served.
    draining: bool = False
    #: The reason why processes that die cannot be replaced, other files being installed by now: which process said so; "": they
    #: can.
    outdated: str = ""

    def sentence(self) -> str:
        """Returns why the daemon is not ready or may not stay ready, or "" if all is well."""
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
    """Says that a worker now compiles or loads program ``number`` of the ``total`` programs of a model version.

    ``number`` and ``total`` are 0 until the worker knows how many programs there are.
    """

    name: str
    version: int
    number: int = 0
    total: int = 0
    #: The number of earlier executables that had to be compiled, because they were not in the cache.
    compiled: int = 0

    def __str__(self) -> str:
        """Returns words such as ``loading digits`` or ``compiling digits 3/16, 1 from the cache``."""
        if not self.total:
            return f"loading {self.name}"
        cached = self.number - 1 - self.compiled
        return f"compiling {self.name} {self.number}/{self.total}, {cached} from the cache"


class Start(Record, frozen=True, tag="start"):
    """The first record to a child process: the child's name, its options in msgpack, and a number that no other child gets."""

    #: Unique per process start; the child repeats it in ChildReady, so answers of a predecessor are never mistaken.
    incarnation: int
    #: The process's name in logs and process titles: "http-0", "worker-1".
    name: str
    options: msgspec.Raw


class Stop(Record, frozen=True, tag="stop"):
    """Asks a child process to finish its requests within ``grace_ns``, accept no new connections, and exit with status 0."""

    grace_ns: int


class ChildReady(Record, frozen=True, tag="ready"):
    """Says that a child process, a front or a worker, has started and can do its work.

    A worker's record comes with two memfds. In the first the worker shows what it does, and in the second its sequences.
    """

    incarnation: int
    #: The parts that the child goes without because a C extension is missing; a sentence each.
    missing: tuple[str, ...] = ()
    #: The parts that the child goes without because its JAX lacks an interface that is not public; a sentence each.
    jax_lacks: tuple[str, ...] = ()


class StatePublished(Record, frozen=True, tag="published"):
    """Tells a front that it was sent all changes of models and regions up to the one with the number ``edition``.

    The front answers with StateAcknowledged.
    """

    edition: int


class StateAcknowledged(Record, frozen=True, tag="acknowledged"):
    """Says that a front uses all changes of models and regions up to the one with the number ``edition``."""

    edition: int


class Serve(Record, frozen=True, tag="serve"):
    """Tells a front that it was sent the state of all models and regions, and may accept clients."""


class LaneLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits on what one client may use of one worker over its lane. Sizes are in bytes."""

    #: Requests whose final answer has not left; one more is answered UNAVAILABLE.
    in_flight: int
    #: The client's segments that are open at a time, and the bytes of all of them.
    segments: int
    segment_byte_size: int
    #: All segments of the lane's response arena together.
    response_byte_size: int
    #: The most bytes that answers to all lanes of its user may hold of one worker's memory, and that requests may.
    max_owner_response_byte_size: int = 4 << 30
    max_owner_request_byte_size: int = 1 << 30


class LaneClient(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Says which client has a lane, and how many requests and bytes of memory the client may use over the lane."""

    #: The client as the kernel tells it; of kind "unix".
    peer: Peer
    limits: LaneLimits


class LaneOpened(Record, frozen=True, tag="lane"):
    """Gives a front or a worker its end of a new lane, as a socket that comes with the record.

    In a record to a front, ``peer`` is the ``incarnation`` of the worker's Start record, and ``device`` is the worker's device,
    such as "cuda:1". Two memfds follow the socket. The worker writes what it does into the first, and its sequences into the
    second. In a record to a worker, ``peer`` is the ``incarnation`` of the front's Start record, or the client lane's number.
    """

    peer: int
    device: str = ""
    #: The front's protocol, "http" or "grpc", on the record to a worker for a front's lane.
    protocol: str = ""
    #: The client, on the record to a worker for a client's lane: nothing that comes on it is to be trusted. None: a front's lane.
    client: LaneClient | None = None


class LaneClosed(Record, frozen=True, tag="unlane"):
    """Says that a lane is to end, has ended or could not be opened.

    The supervisor sends this record to a worker to end a client's lane. A worker sends this record to the supervisor when a
    client's lane has ended or could not be opened. ``peer`` is then the lane's number.

    A front sends this record to the supervisor if its lane to a worker could not be opened. ``peer`` is then the number that
    the supervisor gave the worker. The supervisor tries again.
    """

    peer: int


class LogChanged(Record, frozen=True, tag="log"):
    """Tells a process to use new log settings. ``name`` is the name that the process writes into its log.

    ``options`` is a ``tensord.config.options.Log``, encoded as MessagePack.
    """

    name: str
    options: msgspec.Raw


class TraceChanged(Record, frozen=True, tag="trace"):
    """Changes which requests for a model a process traces. ``model`` is "" for all models without settings of their own.

    If ``level`` is not 0, an eventfd for the selection of every ``rate``-th request comes with the record. If the number of
    traces is also limited, a second eventfd follows, which counts the traces that are still allowed.
    """

    model: str
    #: The level of traces, as in ``RequestRecord.trace``; 0: no request is sampled.
    level: int
    #: One request in so many.
    rate: int
    log_frequency: int
    file: str


class TraceCleared(Record, frozen=True, tag="untrace"):
    """Tells a process to drop a model's own trace settings. The settings for all models then hold for the model."""

    model: str


class EndedTrace(Record, frozen=True, tag="ended"):
    """Describes a traced request that has ended, for OpenTelemetry."""

    #: Ids in hexadecimal digits as W3C Trace Context has them; ``parent_id``: the client's span, "": a trace begins with the
    #: request.
    trace_id: str
    span_id: str
    parent_id: str
    #: CLOCK_MONOTONIC ns.
    began_ns: int
    moments: tuple[tuple[str, int], ...]
    model: str
    #: Attributes of the request's own span.
    attributes: dict[str, str | int | bool]
    #: The events that the worker noted for the request, without its tensors; None: the worker noted nothing.
    timeline: Timeline | None = None
    #: The error that the request was answered with; "": it was answered with outputs.
    error: str = ""


class TracesEnded(Record, frozen=True, tag="traces"):
    """Sends ended traces to the supervisor, which forwards them to an OpenTelemetry collector."""

    traces: tuple[EndedTrace, ...]


class WorkerFenced(Record, frozen=True, tag="fenced"):
    """Tells a front that a worker process has certainly ended, so that other workers may run its requests."""

    worker: int


class Derivative(Record, frozen=True):
    """Describes a model that computes derivatives, such as "digits.pull_back". ``metadata`` and ``config`` are JSON texts."""

    name: str
    metadata: bytes
    config: bytes


class VersionTraits(Record, frozen=True, kw_only=True):
    """What fronts need to know of a loaded model version. Base class of the records ``ModelState`` and ``Loaded``."""

    #: Metadata answer (without "versions") and full ModelConfig, both JSON; empty if the version is not loaded.
    metadata: bytes = b""
    config: bytes = b""
    #: True if a request may be run again after a worker died or a batch failed: not if the model keeps state between requests.
    repeatable: bool = True
    #: True if requests of a sequence have to reach the worker that has it.
    sticky: bool = False
    #: True if it answers a request with any number of responses (Triton: decoupled).
    streams: bool = False
    #: True if several responses can be joined along their first axes, for a client that wants one.
    joins: bool = False
    #: True if the model has a readiness check of its own, which is asked whenever a client wants to know.
    judges: bool = False
    #: True if a request that is run twice harms nobody: jitted code that gives one answer and keeps nothing.
    pure: bool = False
    derivatives: tuple[Derivative, ...] = ()
    #: Name of a derivative -> why it is not there, of a model that declares derivatives.
    lacking: dict[str, str] = msgspec.field(default_factory=dict)


class ModelState(VersionTraits, frozen=True, tag="model"):
    """Describes a model version to a front. It replaces all earlier ModelState records of this version."""

    name: str
    version: int
    #: One of UNKNOWN, READY, UNAVAILABLE, LOADING, UNLOADING: Triton's index states.
    state: str
    reason: str = ""
    #: Incarnations of the workers where it is READY.
    workers: tuple[int, ...] = ()
    #: The devices whose workers load it, whether they are there now or not; empty: all.
    devices: tuple[str, ...] = ()
    #: True if it is UNAVAILABLE or UNLOADING for now: its next try, or a worker or a model that it needs, is awaited.
    awaited: bool = False


class ModelGone(Record, frozen=True, tag="gone"):
    """Tells a front that a model version does not exist any more."""

    name: str
    version: int


class RequestsRefused(Record, frozen=True, tag="refused"):
    """Tells a front whether to refuse new inference requests from now on."""

    refused: bool


class RegionPlace(Record, frozen=True, tag="place"):
    """Tells a front on which GPU a client's CUDA region is. ``device`` is "" if the region does not exist any more."""

    region: str
    #: The GPU, "cuda:1"; for workers that have several GPUs, their first one.
    device: str


class Load(Record, frozen=True, tag="load"):
    """Tells a worker to load a model version and to answer with Loaded. Requests find what was loaded only after ServeLoaded.

    Discards an earlier load of the version that was not served. What the worker serves of it goes on, also if loading fails.
    """

    name: str
    version: int
    #: The model's directory and the version's directory, absolute.
    model_path: str
    version_path: str
    #: Serialised ModelConfig protobuf as far as the operator gave it; the worker completes it.
    config: bytes
    #: The number of workers that load it: they share its bounds.
    workers: int = 1
    #: Digest of its files except config.pbtxt; "": it is not known.
    content: str = ""


class CancelLoad(Record, frozen=True, tag="cancel-load"):
    """Tells a worker to cancel its unfinished loads of a model version. The worker still answers each load with Loaded."""

    name: str
    version: int


class Loaded(VersionTraits, frozen=True, tag="loaded"):
    """Says how the loading of a model version ended. ``reason`` says why it failed, or is "" after success."""

    name: str
    version: int
    reason: str = ""
    #: True if the load did not fail but was cancelled, because nobody wants the version any more.
    cancelled: bool = False
    #: False for ensembles and Triton Python models: it has no parameter sets, not even ``main``.
    has_parameters: bool = True
    footprint: Footprint = Footprint()


class Unload(Record, frozen=True, tag="unload"):
    """Tells a worker to unload a model version: to refuse new requests, finish waiting ones, and answer with Unloaded."""

    name: str
    version: int


class Unloaded(Record, frozen=True, tag="unloaded"):
    """Says that a worker has unloaded a model version."""

    name: str
    version: int


class ControlCall(Record, frozen=True, tag="call"):
    """Asks the process at the other end to carry out an operation and to answer with a Reply.

    A file descriptor may come with the record: a pidfd of the client's process, or a memfd of parameters that a client pushed.
    """

    call_id: int
    operation: Operation
    #: The client for whom a front asks.
    peer: Peer = ANONYMOUS


class Reply(Record, frozen=True, tag="reply"):
    """Answers a ControlCall with ``result`` (JSON, often empty), or with an error's ``code`` and ``message``."""

    call_id: int
    code: str = ""
    message: str = ""
    result: bytes = b""
    #: True if the operation failed because a process of the daemon could open no more files.
    lacking: bool = False

    @classmethod
    def refusing(cls, call_id: int, error: ServingError) -> Reply:
        """Makes the answer to a call that failed with ``error``."""
        return cls(call_id, error.code, error.message, lacking=descriptors.lacked(error))

    def check(self) -> None:
        """Raises a ServingError if the call failed: NoDescriptor if a process of the daemon could open no more files."""
        if self.code:
            raise NoDescriptor(self.message) if self.lacking else from_code(self.code, self.message)


_ToChild = Start | Stop | LogChanged | TraceChanged | TraceCleared | LaneOpened | ControlCall | Reply
_Published = WorkerFenced | ModelState | ModelGone | Readiness | RegionPlace | StatePublished
ToFront = _ToChild | _Published | Serve | RequestsRefused
FromFront = ChildReady | StateAcknowledged | ControlCall | Reply | TracesEnded | LaneClosed
ToWorkerControl = _ToChild | LaneClosed | Load | CancelLoad | Unload
FromWorker = ChildReady | Loaded | Loading | Unloaded | Reply | ControlCall | LaneClosed | TracesEnded


class CheckLoads(Record, frozen=True, tag="check"):
    """Asks a process that checks models to load model versions one by one, and to report the outcome of each."""

    #: The daemon's ``tensord.config.options.Options`` as msgpack.
    options: msgspec.Raw
    #: Versions of models, in the order in which a worker would load them.
    loads: tuple[Load, ...]
    #: True: each bucket of the loaded models is asked with a generated request, and its answer compared.
    deep: bool = False


class LoadStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="at"):
    """A line of JSON from a process that checks models: what it does now, such as ``loading digits``."""

    at: str


class LoadOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="of"):
    """A line of JSON in which a process that checks models says whether one model version could be loaded."""

    name: str
    version: int
    #: The reason why it does not load; "" if it does.
    reason: str
    #: The completed configuration as JSON, if it does.
    config: str = ""
    footprint: Footprint = Footprint()
    #: The completed configurations of its derivatives as JSON, by name.
    derivatives: dict[str, str] = {}
    #: Name of a derivative that the model lacks -> the reason.
    lacking: dict[str, str] = {}
    #: The warnings that the load has logged.
    warnings: tuple[str, ...] = ()
    #: One row of a table for each bucket that was asked, as ``tensord.workers.programs.trials`` makes it.
    trials: tuple[dict[str, str | float], ...] = ()
    #: How many bytes the process had printed by then.
    printed: int = 0


LoadLine = LoadStep | LoadOutcome
