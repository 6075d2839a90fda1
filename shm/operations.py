"""The operations that processes ask of each other in a call (``tensord.shm.control_records.ControlCall``).

Each docstring says what its Reply holds. Who asks is a ``Peer``, which comes with the call.
"""

from __future__ import annotations

import msgspec

from tensord.shm.record import Record

#: The message where an operation met a defect of ours.
FAILED = "the server failed to carry out the operation"
#: The message where models are not loaded on request: Triton's sentence.
NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"


class LoadModel(Record, frozen=True, tag="c.load"):
    """Loads a model by name; ``config`` is a JSON override, ``files`` override version files (path -> content)."""

    name: str
    config: str = ""
    files: dict[str, bytes] = msgspec.field(default_factory=dict)
    #: The model that asks while it is being loaded itself: its load waits for this one.
    within: str = ""


class UnloadModel(Record, frozen=True, tag="c.unload"):
    """Unloads a model by name."""

    name: str
    unload_dependents: bool = False


class ModelReady(Record, frozen=True, tag="c.isready"):
    """A worker asks whether any worker serves that version, or any version (0). Reply: JSON."""

    name: str
    version: int = 0


class RepositoryIndex(Record, frozen=True, tag="c.index"):
    """Asks for the repository's index. Reply: JSON array of {name, version?, state?, reason?}; ``detailed`` adds footprints."""

    ready: bool = False
    detailed: bool = False


class ModelStatistics(Record, frozen=True, tag="c.stats"):
    """Asks for statistics; "" and 0 mean all. Reply: JSON {"model_stats": [...]}; a worker's own, which the supervisor merges."""

    name: str = ""
    version: int = 0


class Peer(Record, frozen=True, tag="peer"):
    """Identifies the client that asks, as the socket tells it (``tensord.daemon.front.peer``), never as the client says."""

    #: "tcp": only the address is known.  "unix": the kernel vouches for the rest.  "operator": the control socket.
    kind: str = "tcp"
    #: The HOST:PORT of a TCP client.
    address: str = ""
    #: The process id of a unix peer when it connected; 0: in another PID namespace.
    pid: int = 0
    uid: int = -1
    gid: int = -1
    groups: tuple[int, ...] = ()

    @property
    def owner(self) -> str:
        """Returns whom quotas count: a user, or a TCP host, whose clients cannot be told apart for longer than a connection."""
        return f"uid {self.uid}" if self.kind == "unix" else f"{self.kind} {self.address.rpartition(':')[0]}".strip()


#: A TCP client of whom nothing is known.
ANONYMOUS = Peer()


class RegisterSystemRegion(Record, frozen=True, tag="c.reg"):
    """Maps part of a POSIX object. The first worker opens it, replies its descriptor and JSON {"access"}; the others get both."""

    name: str
    key: str
    offset: int
    byte_size: int
    #: How workers use it: "guarded", "snapshot" or "sealed" (``tensord.shm.regions``). "": the first worker decides by policy.
    access: str = ""
    #: The client that asks must have access to the object itself: the daemon lends nobody its own.
    peer: Peer = ANONYMOUS
    #: In a call to a worker: a region of that name may exist, and this one replaces it in one step.
    renews: bool = False


class RegisterCudaRegion(Record, frozen=True, tag="c.regcuda"):
    """Opens an allocation of a client's GPU memory under a name. Whoever holds the handle can open it: it goes into no log."""

    name: str
    #: A cudaIpcMemHandle_t: 64 bytes.
    raw_handle: bytes
    #: The GPU, counted as the daemon sees them.
    device_id: int
    byte_size: int
    #: As in RegisterSystemRegion.
    renews: bool = False
    #: Whether this worker opens it now. Otherwise another worker has that GPU, and this one opens it when a request needs it
    #: here.
    near: bool = True


class UnregisterRegion(Record, frozen=True, tag="c.unreg"):
    """Unregisters a region: no later request finds it. Name "", to the supervisor alone: every one that the peer may unregister.

    A worker's reply: JSON, how many tensors of requests are in it now.
    """

    kind: str
    name: str


class AwaitRegion(Record, frozen=True, tag="c.awaitreg"):
    """Waits for the end of a region. Reply, empty: no request uses a region that had that name, and it is closed."""

    name: str


class RegionRecords(Record, frozen=True, tag="c.regrec"):
    """Asks for everything known of a region, or of all (""). Reply: JSON array.

    A worker's: JSON object, name -> the tensors of requests that are in the region of that name, and in those that had it.
    """

    name: str = ""


class WorkerFigures(Record, frozen=True, tag="c.figures"):
    """Asks a worker for its metrics. Reply: ``tensord.shm.figures.Figures`` as JSON."""


class FileSource(Record, frozen=True, tag="s.file"):
    """Parameters in a file beside the model, or in an Orbax folder: whatever ``tensord.models.load`` reads."""

    #: Relative to the version's folder or, where that has none of the name, to the model's; never leads out of the latter.
    path: str


class RegionSource(Record, frozen=True, tag="s.region"):
    """Parameters in safetensors' layout in a registered region, of system or GPU memory."""

    region: str
    offset: int = 0
    #: 0: as much as there is behind the offset.
    byte_size: int = 0


class MemorySource(Record, frozen=True, tag="s.memory"):
    """Parameters in safetensors' layout in memory whose descriptor comes with the call."""

    byte_size: int


class LeafPlace(Record, frozen=True, tag="s.leaf"):
    """The bytes of one leaf in a registered region."""

    region: str
    offset: int
    byte_size: int
    #: As the protocol names it: "FP32".
    datatype: str
    shape: tuple[int, ...]


class LeavesSource(Record, frozen=True, tag="s.leaves"):
    """Parameters leaf by leaf."""

    #: The leaf's name, keys joined by dots -> where it is.
    leaves: dict[str, LeafPlace]


ParameterSource = FileSource | RegionSource | MemorySource | LeavesSource
#: The set that requests are answered with which name none.
MAIN_SET = "main"


class MakeParameters(Record, frozen=True, tag="c.makeparams"):
    """Has a worker make one sealed memory of the parameters of a set, whole, in safetensors' layout.

    Reply: JSON {"byte_size"}, with the memory's descriptor (a memfd, sealed SHRINK, GROW, WRITE and SEAL).
    """

    model: str
    version: int
    source: ParameterSource
    set: str = MAIN_SET
    #: Whether leaves that the source lacks are the set's newest, or main's where the worker has no set of that name.
    partial: bool = False
    #: The CRC-32 or SHA-256 of the bytes that came, as ``crc32:`` or ``sha256:`` and hexadecimal digits; "": not checked.
    checksum: str = ""


class StageParameters(Record, frozen=True, tag="c.stageparams"):
    """Validates the parameters of a set, and places them on the device beside those that are in use. Comes with their memory.

    They are whole and in safetensors' layout. Without memory: what the worker kept of that set under that number; number 0 of
    main is what the repository holds. Reply: JSON {"byte_size"}, or why they do not fit: then nothing has changed.
    """

    #: The supervisor's number of the push, by which it is committed or aborted.
    push: int
    model: str
    version: int
    set: str
    #: Grows from one push of a set to the next.
    number: int
    #: Whether a value that is not finite is an error.
    check_finite: bool = False


class CommitParameters(Record, frozen=True, tag="c.commitparams"):
    """Puts what was staged into use. Reply, JSON {}: every batch that begins from now on is computed with it."""

    push: int
    #: Whether sequences and stepped requests that have begun go on with it, too.
    move_sequences: bool = False


class AbortParameters(Record, frozen=True, tag="c.abortparams"):
    """Forgets what was staged for a push, if anything. Reply: JSON {}."""

    push: int


class DropParameters(Record, frozen=True, tag="c.dropparams"):
    """Forgets a set, which is not main; no later request finds it. Reply: JSON {}."""

    model: str
    #: To the supervisor 0: the newest that serves.
    version: int
    set: str


class PushParameters(Record, frozen=True, tag="c.push"):
    """Brings a new number of a parameter set to every worker that has the model version, or to none.

    Reply: JSON {"model", "version", "set", "number", "byte_size"}.
    """

    model: str
    #: 0: the newest that serves.
    version: int
    set: str
    source: ParameterSource
    #: 0: one more than the last.
    number: int = 0
    #: As in MakeParameters.
    partial: bool = False
    checksum: str = ""
    #: As in StageParameters and CommitParameters.
    check_finite: bool = False
    move_sequences: bool = False


class ListParameters(Record, frozen=True, tag="c.listparams"):
    """Asks for the parameter sets of a model ("": of all), a version (0: of all) and a name ("": all). Reply: JSON array."""

    model: str = ""
    version: int = 0
    set: str = ""


class RevertParameters(Record, frozen=True, tag="c.revertparams"):
    """Asks the supervisor to put the parameters into use again that a set had before. Reply: as for PushParameters."""

    model: str
    #: 0: the newest that serves.
    version: int
    set: str


class RegionStatus(Record, frozen=True, tag="c.regstat"):
    """Asks for the status of a region, or of all (""), of a kind, "system" or "cuda". Reply: JSON array."""

    kind: str
    name: str


class Settle(Record, frozen=True, tag="c.settle"):
    """Waits for the fronts. Reply, empty: every front acts upon all that was sent to the asking one before."""


class AwaitIdle(Record, frozen=True, tag="c.idle"):
    """Asks a front to answer once no client of it waits for an answer, or for the rest of one. Reply: empty."""


class EndIdleLanes(Record, frozen=True, tag="c.idlelanes"):
    """Asks a worker to end the clients' lanes on which nothing is in flight. Reply: JSON, how many others there are."""


class TakeProfile(Record, frozen=True, tag="c.profile"):
    """Has a worker record what it does for so many seconds, and write that below a folder. Reply, empty: it is written."""

    seconds: float
    folder: str


class SequenceRecords(Record, frozen=True, tag="c.seqrec"):
    """Asks a worker for its sequences. Reply: JSON array, 1,000 of a model version at most."""


class ConnectionRecords(Record, frozen=True, tag="c.connrec"):
    """Asks a front for its connections. Reply: JSON array, 1,000 at most."""


class RecentErrors(Record, frozen=True, tag="c.errors"):
    """Asks a front for the last errors that it has answered. Reply: JSON array, 100 at most, the latest last."""


class TraceExemplars(Record, frozen=True, tag="c.exemplars"):
    """Asks a front for the traced requests that stand for buckets of the histograms. Reply: JSON, ``Exemplars.told``."""


class ChangeLog(Record, frozen=True, tag="c.log"):
    """Changes the log settings that are not None. Reply: JSON, all settings then in force."""

    info: bool | None = None
    warning: bool | None = None
    error: bool | None = None
    verbose: int | None = None
    format: str | None = None


class ChangeTrace(Record, frozen=True, tag="c.trace"):
    """Changes the trace settings of a model, or of all (""), that are not None, and forgets its own values for ``cleared``.

    Reply: JSON, the settings then in force there. Fields as in TraceChanged; ``count`` is -1 for no limit.
    """

    model: str = ""
    level: int | None = None
    rate: int | None = None
    count: int | None = None
    log_frequency: int | None = None
    cleared: tuple[str, ...] = ()


Operation = (
    Settle
    | LoadModel
    | ModelReady
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
    | AwaitIdle
    | EndIdleLanes
    | TakeProfile
    | SequenceRecords
    | ConnectionRecords
    | TraceExemplars
    | RecentErrors
    | MakeParameters
    | StageParameters
    | CommitParameters
    | AbortParameters
    | DropParameters
    | RevertParameters
    | PushParameters
    | ListParameters
)
