"""The records that cross process borders: on lanes (submitter <-> worker) and on control channels (child <-> supervisor).

Pure values, no I/O: ``shm.channel`` carries them. Each record is a msgpack array whose first element is its tag, so a reader
that knows the union of a direction decodes and type-checks in one pass; anything else is refused as malformed.

                submitter --> worker                     worker --> submitter
    lane        SegmentOpened, -Closed, -Refused         SegmentOpened, -Closed, -Refused
                Submit RequestForm FormSubmit            Completion AnswerForm FormCompletion
                Release Cancel

                supervisor --> front                     front --> supervisor
    control     Start Stop LaneOpened WorkerFenced       ChildReady Call
                ModelState ModelGone Readiness
                RegionPlace Reply LogChanged
                TraceChanged TraceCleared

                supervisor --> worker                    worker --> supervisor
    control     Start Stop LaneOpened Load Unload        ChildReady Loaded Reply
                Call LogChanged                      Unloaded Loading

Integers that are sizes or offsets are bytes; ``*_ns`` are nanoseconds; deadlines are absolute CLOCK_MONOTONIC, which all
processes of one host share.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shm.progress import Loading, Readiness
from shm.record import Record
from shm.settings import ChangeLog, ChangeTrace

Parameter = bool | int | float | str


# --------------------------------------------------------------------------------------------------- places of tensors


class Slice(Record, frozen=True, tag="a"):
    """Bytes in an arena of the lane: ``[offset, offset + byte_size)`` of segment ``segment``."""

    segment: int
    offset: int
    byte_size: int


class RegionSlice(Record, frozen=True, tag="r"):
    """Bytes in a client's registered region. For outputs ``byte_size`` is the room, not the size written."""

    region: str
    offset: int
    byte_size: int


class Inline(Record, frozen=True, tag="i"):
    """A tensor so small that a slot would cost more than the bytes."""

    content: bytes


Place = Slice | RegionSlice | Inline
#: What a request or an answer of a form has of its own of a tensor.
Content = bytes | Slice


class Tensor(Record, frozen=True, tag="t"):
    """One named tensor and where its bytes are. BYTES content is length-prefixed (u32 little-endian) wherever it lies."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    place: Place


class RequestedOutput(Record, frozen=True, tag="o"):
    """An output the client asked for. ``region`` is where it goes, None for the response arena."""

    name: str
    region: RegionSlice | None = None
    #: 0: the tensor itself; k > 0: its k top classes as BYTES "value:index[:label]".
    classification: int = 0


# --------------------------------------------------------------------------------------------------------------- lanes


class SegmentOpened(Record, frozen=True, tag="S+"):
    """The sender's arena grew by a sealed segment; its descriptor travels with this record."""

    segment: int
    byte_size: int


class SegmentClosed(Record, frozen=True, tag="S-"):
    """The sender will not refer to this segment again: unmap it."""

    segment: int


class SegmentRefused(Record, frozen=True, tag="S!"):
    """The peer could not map this segment of the receiver's arena: it is to be announced again before its next use."""

    segment: int


class TracedTensor(Record, frozen=True, tag="tt"):
    """A tensor of a traced request as text: elements in row-major order, comma-separated, the first ones of a large tensor."""

    activity: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    content: str
    truncated: bool


class Timeline(Record, frozen=True, tag="tl"):
    """What a traced request met in the worker: names and CLOCK_MONOTONIC ns, and its tensors."""

    moments: tuple[tuple[str, int], ...]
    tensors: tuple[TracedTensor, ...] = ()


class Submit(Record, frozen=True, tag="Q"):
    """One request. ``request_id`` is the submitter's, never reused on any lane of that submitter."""

    request_id: int
    model: str
    #: 0: the newest ready version.
    version: int
    inputs: tuple[Tensor, ...]
    #: Empty: all outputs.
    outputs: tuple[RequestedOutput, ...] = ()
    #: Reserved keys (sequence_*, priority, timeout, binary_data_output) are taken out before this.
    parameters: dict[str, Parameter] = msgspec.field(default_factory=dict)
    #: The client's ``id``, "" when none was given.
    client_id: str = ""
    #: How often workers have died under this request; above 0 it is run alone, so that it cannot take others with it.
    strikes: int = 0
    #: The submitter gives up then; 0: never. A request whose deadline passed in the queue is not run.
    deadline_ns: int = 0
    #: When the front had the whole request; the queue duration counts from here.
    received_ns: int = 0
    priority: int = 0
    timeout_us: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    #: What to note of it: 1 when it was where, 2 its tensors, or the sum; 0: nothing, as of nearly every request.
    trace: int = 0


class Release(Record, frozen=True, tag="L"):
    """Response-arena leases the submitter is done with: (segment, offset, generation) each."""

    leases: tuple[tuple[int, int, int], ...]


class Cancel(Record, frozen=True, tag="X"):
    """Nobody waits for this request any more. If it still queues it is dropped; a final Completion comes either way."""

    request_id: int


class Completion(Record, frozen=True, tag="C"):
    """An answer. Exactly one with ``final`` per Submit."""

    request_id: int
    #: "" or a ``ServingError.code``; with a code, ``message`` is the sentence for the client.
    code: str = ""
    message: str = ""
    final: bool = True
    version: int = 0
    outputs: tuple[Tensor, ...] = ()
    #: The response-arena lease that holds every Slice among ``outputs``: (segment, offset, generation).
    lease: tuple[int, int, int] | None = None
    parameters: dict[str, Parameter] = msgspec.field(default_factory=dict)
    #: Of a request that asked for it.
    trace: Timeline | None = None


class RequestForm(Record, frozen=True, tag="Q+"):
    """What requests of one kind have in common (``shm.forms``); from now on the number stands for it.

    ``submit`` is one of them without what each has of its own: its id and its client's, its moments, the tensors in no region.
    """

    number: int
    submit: Submit


class FormSubmit(Record, frozen=True, tag="q"):
    """A request of a form: what it has of its own, as in Submit."""

    request_id: int
    form: int
    #: Of the inputs that lie in no region, in their order: their bytes, or where those are.
    contents: tuple[Content, ...]
    client_id: str = ""
    deadline_ns: int = 0
    received_ns: int = 0


class AnswerForm(Record, frozen=True, tag="C+"):
    """What answers of one kind have in common; ``completion`` is one of them without its id and the tensors in no region."""

    number: int
    completion: Completion


class FormCompletion(Record, frozen=True, tag="c"):
    """An answer of a form, final and good."""

    request_id: int
    form: int
    #: Of the outputs that lie in no region, in their order: their bytes, or where those are.
    contents: tuple[Content, ...]
    #: As in Completion.
    lease: tuple[int, int, int] | None = None


ToWorker = SegmentOpened | SegmentClosed | SegmentRefused | Submit | RequestForm | FormSubmit | Release | Cancel
ToSubmitter = SegmentOpened | SegmentClosed | SegmentRefused | Completion | AnswerForm | FormCompletion


# ------------------------------------------------------------------------------------------------------------- control


class Start(Record, frozen=True, tag="start"):
    """First record to a child: who it is and the whole validated configuration (``config.options.Options`` as msgpack)."""

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

    A worker's carries one descriptor: its status page (``shm.status_page``).
    """

    incarnation: int
    #: A worker: what it goes without, for want of a C extension; a sentence each.
    missing: tuple[str, ...] = ()


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

    To a front: ``peer`` is the worker's incarnation, ``device`` its name ("cpu:0", "cuda:1"), and a second descriptor is that
    worker's status page (see ``shm.status_page``). To a worker: ``peer`` is the submitter's incarnation.
    """

    peer: int
    device: str = ""


class LogChanged(Record, frozen=True, tag="log"):
    """Log that way from now on. ``options`` is ``config.options.Log`` as msgpack; ``name`` is the receiver's, as in Start."""

    name: str
    options: msgspec.Raw


class TraceChanged(Record, frozen=True, tag="trace"):
    """Sample requests for a model, or ("") for all models without settings of their own, that way from now on.

    Where anything is traced descriptors travel along: whose turn it is (``daemon.trace_turn``), and where there is a limit the
    number of traces left (``daemon.trace_budget``).
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
    #: False where a request may not be run twice (sequences, decoupled models).
    stateless: bool = True
    #: Answers a request with any number of responses.
    decoupled: bool = False


class ModelGone(Record, frozen=True, tag="gone"):
    """That version is no longer known."""

    name: str
    version: int


class RegionPlace(Record, frozen=True, tag="place"):
    """Only the worker of that device has the region, so requests that name it go there. "": the region is gone.

    Sent for CUDA regions where there are several GPU workers; every other region is on all of them.
    """

    region: str
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


class Loaded(Record, frozen=True, tag="loaded"):
    """A version is ready, or failed with ``reason`` (one calm sentence)."""

    name: str
    version: int
    reason: str = ""
    metadata: bytes = b""
    config: bytes = b""
    stateless: bool = True
    decoupled: bool = False


class Unload(Record, frozen=True, tag="unload"):
    """Take no new requests for that version, finish the queued ones, drop it; answered with Unloaded."""

    name: str
    version: int


class Unloaded(Record, frozen=True, tag="unloaded"):
    """That version is gone from the worker."""

    name: str
    version: int


# Calls: front -> supervisor, and supervisor -> worker, each answered by one Reply with the same call_id.


class LoadModel(Record, frozen=True, tag="c.load"):
    """Repository load by name; ``config`` is a JSON override, ``files`` override version files (path -> content)."""

    name: str
    config: str = ""
    files: dict[str, bytes] = msgspec.field(default_factory=dict)


class UnloadModel(Record, frozen=True, tag="c.unload"):
    """Repository unload by name."""

    name: str
    unload_dependents: bool = False


class RepositoryIndex(Record, frozen=True, tag="c.index"):
    """Reply: JSON array of {name, version?, state?, reason?}."""

    ready: bool = False


class ModelStatistics(Record, frozen=True, tag="c.stats"):
    """Reply: JSON {"model_stats": [...]}; "" and 0 mean all. A worker answers for itself, the supervisor merges."""

    name: str = ""
    version: int = 0


class Peer(Record, frozen=True, tag="peer"):
    """Who asks. Filled in from the socket (``daemon.peer``), never from what the client says."""

    #: "tcp": only the address is known.  "unix": the kernel vouches for the rest.  "operator": the control socket.
    kind: str = "tcp"
    #: HOST:PORT of a TCP client.
    address: str = ""
    #: Of a unix peer when it connected; 0: in another PID namespace.
    pid: int = 0
    uid: int = -1
    gid: int = -1
    groups: tuple[int, ...] = ()

    @property
    def owner(self) -> str:
        """Whom quotas count: a user, or a TCP host, whose clients cannot be told apart for longer than a connection."""
        return f"uid {self.uid}" if self.kind == "unix" else f"{self.kind} {self.address.rpartition(':')[0]}".strip()


#: A client of TCP of whom nothing is known.
ANONYMOUS = Peer()


class RegisterSystemRegion(Record, frozen=True, tag="c.reg"):
    """Map part of a POSIX object. The first worker opens it, replies its descriptor and JSON {"access"}; the others get both."""

    name: str
    key: str
    offset: int
    byte_size: int
    #: How workers use it: "guarded", "snapshot" or "sealed" (``shm.regions``). "": the first worker decides by policy.
    access: str = ""
    #: Whoever asks must have access to the object itself: the daemon lends nobody its own.
    peer: Peer = ANONYMOUS
    #: To a worker: a region of that name may be there, and this one takes its place in one step.
    renews: bool = False


class RegisterCudaRegion(Record, frozen=True, tag="c.regcuda"):
    """Open an allocation of a client's GPU memory under a name. Whoever holds the handle can open it: it goes into no log."""

    name: str
    #: cudaIpcMemHandle_t: 64 bytes.
    raw_handle: bytes
    #: The GPU, counted as the daemon sees them.
    device_id: int
    byte_size: int
    #: As of a system region.
    renews: bool = False


class UnregisterRegion(Record, frozen=True, tag="c.unreg"):
    """No later request finds the region. Name "", to the supervisor alone: every one that the peer may unregister.

    A worker's reply: JSON, how many tensors of requests are in it now.
    """

    kind: str
    name: str


class AwaitRegion(Record, frozen=True, tag="c.awaitreg"):
    """Reply, empty, when no request uses a region that had that name any more, and it is closed."""

    name: str


class RegionRecords(Record, frozen=True, tag="c.regrec"):
    """Reply: JSON array with everything known of the region, or of all ("").

    A worker's: JSON object, name -> the tensors of requests that are in the region of that name, and in those that had it.
    """

    name: str = ""


class WorkerFigures(Record, frozen=True, tag="c.figures"):
    """Asked of a worker. Reply: ``shm.figures.Figures`` as JSON."""


class RegionStatus(Record, frozen=True, tag="c.regstat"):
    """Reply: JSON array of the region or of all ("") of that kind, "system" or "cuda"."""

    kind: str
    name: str


class Settle(Record, frozen=True, tag="c.settle"):
    """Reply, empty, when every front acts upon all that was sent to this one before."""


Operation = (
    Settle
    | LoadModel
    | UnloadModel
    | RepositoryIndex
    | ModelStatistics
    | RegisterSystemRegion
    | RegisterCudaRegion
    | UnregisterRegion
    | AwaitRegion
    | RegionStatus
    | ChangeLog
    | ChangeTrace
    | RegionRecords
    | WorkerFigures
)


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
ToWorkerControl = Start | Stop | LogChanged | LaneOpened | Load | Unload | Call
FromWorker = ChildReady | Loaded | Loading | Unloaded | Reply

#: Encoders are cheap and stateless; one is enough for a process.
encoder = msgspec.msgpack.Encoder()


def decoder(union: Any) -> msgspec.msgpack.Decoder[Any]:
    """A typed decoder for a datagram: a list of the records of one direction."""
    return msgspec.msgpack.Decoder(list[union])
