"""The operations that one process of the daemon may ask another process of the daemon to carry out.

A ``tensord.shm.control_records.ControlCall`` has one operation and, if a client asks for the operation, the client as a
``Peer``. The docstring of an operation says what the ``result`` of the Reply is.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tensord.shm.record import Record

#: The message where an operation met a defect of ours.
FAILED = "the server failed to carry out the operation"
#: The message where models are not loaded on request: Triton's sentence.
NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"


class LoadModel(Record, frozen=True, tag="c.load"):
    """Asks the supervisor to load a model by name, or to load it again. The empty reply comes once the model is loaded.

    ``config`` is JSON that replaces the model's config.pbtxt. If it is "", the ``config`` of an earlier load still holds if
    the model's files are unchanged. ``files`` maps paths "<version>/<file-name>" to contents. If ``files`` is not empty, the
    model has only these files, and ``config`` is required.
    """

    name: str
    config: str = ""
    files: dict[str, bytes] = msgspec.field(default_factory=dict)
    #: The model that asks while it is being loaded itself: its load waits for this one.
    within: str = ""


class UnloadModel(Record, frozen=True, tag="c.unload"):
    """Asks the supervisor to begin to unload a model. The reply is empty.

    If the model is an ensemble and ``unload_dependents`` is true, the supervisor also unloads models that only this ensemble
    uses. A model that was loaded by its own name stays loaded.
    """

    name: str
    unload_dependents: bool = False


class ModelReady(Record, frozen=True, tag="c.isready"):
    """Asks the supervisor or a worker whether a model version is served and ready. The reply is JSON, true or false.

    ``version`` 0 means the newest version that is served. If the model's code has ``is_ready()``, the worker calls it, and the
    supervisor asks all workers that serve the version. ``awaits``: a worker asks for a request, and the supervisor replies when
    that worker is not to load the version any more after others, and with Unavailable if the version is given up for now.
    """

    name: str
    version: int = 0
    awaits: bool = False


class RepositoryIndex(Record, frozen=True, tag="c.index"):
    """Asks the supervisor for the index of all models. The reply is a JSON array of {name, version?, state?, reason?}.

    ``ready`` means only versions that are ready. ``detailed`` adds the time and memory that loading each version took.
    """

    ready: bool = False
    detailed: bool = False


class ModelStatistics(Record, frozen=True, tag="c.stats"):
    """Asks the supervisor or a worker for statistics of model versions. The reply is JSON {"model_stats": [...]}.

    A worker replies with its own statistics, the supervisor with the sums over all workers. ``name`` "" means all models,
    and ``version`` 0 all versions.
    """

    name: str = ""
    version: int = 0


class Peer(Record, frozen=True, tag="peer"):
    """Identifies the client of an operation: a user and process on this host, or the address of a TCP client."""

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
        """Returns the name that quotas use for this client: its user or, for a TCP client, its host."""
        return f"uid {self.uid}" if self.kind == "unix" else f"{self.kind} {self.address.rpartition(':')[0]}".strip()


#: A TCP client of whom nothing is known.
ANONYMOUS = Peer()


class RegisterSystemRegion(Record, frozen=True, tag="c.reg"):
    """Asks the supervisor or a worker to register a part of a shared-memory object as the region ``name``.

    If a file descriptor of the object comes with the record, a worker uses this descriptor. Otherwise, the worker opens the
    object named ``key``, and replies with the object's file descriptor and a JSON object such as {"access": "guarded"}.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    #: How workers use it: "guarded", "snapshot" or "sealed" (``tensord.shm.regions``). "": the first worker decides by policy.
    access: str = ""
    #: The client that asks must have access to the object itself: the daemon lends nobody its own.
    peer: Peer = ANONYMOUS
    #: True, in a call to a worker: a region of that name may exist, and this one replaces it in one step.
    renews: bool = False


class RegisterCudaRegion(Record, frozen=True, tag="c.regcuda"):
    """Asks the supervisor or a worker to register GPU memory as a region. Do not log the record: its handle gives access."""

    name: str
    #: A cudaIpcMemHandle_t: 64 bytes.
    raw_handle: bytes
    #: The GPU, counted as the daemon sees them.
    device_id: int
    byte_size: int
    #: True, in a call to a worker: a region of that name may exist, and this one replaces it in one step.
    renews: bool = False
    #: True if this worker opens it now. Otherwise another worker has that GPU, and this one opens it when a request needs it
    #: here.
    near: bool = True


class UnregisterRegion(Record, frozen=True, tag="c.unreg"):
    """Asks the supervisor or a worker to unregister the region ``name`` of a ``kind``, "system" or "cuda".

    For the supervisor, the ``kind`` "" means any kind. The ``name`` "" means all regions of the kind that belong to the
    client that asks. A worker replies with a number as JSON: how many tensors of unfinished requests are in the region.
    """

    kind: str
    name: str


class AwaitRegion(Record, frozen=True, tag="c.awaitreg"):
    """Asks a worker to reply once no request uses an unregistered region that had this name. The reply is empty."""

    name: str


class RegionRecords(Record, frozen=True, tag="c.regrec"):
    """Asks the supervisor or a worker for the state of the region ``name``, or of all regions if ``name`` is "".

    The supervisor replies with a JSON array. A worker replies with a JSON object that has two numbers for each region's name:
    how many tensors of unanswered requests are in the region, and how many in former regions of the same name.
    """

    name: str = ""


class WorkerFigures(Record, frozen=True, tag="c.figures"):
    """Asks a worker for its counters. The reply is ``tensord.shm.figures.Figures`` as JSON."""


class FileSource(Record, frozen=True, tag="s.file"):
    """Says that pushed parameters are in a file or an Orbax checkpoint in the model's folder."""

    #: Relative to the version's folder or, where that has none of the name, to the model's; never leads out of the latter.
    path: str


class RegionSource(Record, frozen=True, tag="s.region"):
    """Says that pushed parameters are in a registered region, in safetensors format."""

    region: str
    offset: int = 0
    #: 0: as much as there is behind the offset.
    byte_size: int = 0


class MemorySource(Record, frozen=True, tag="s.memory"):
    """Says that pushed parameters are in a memfd in safetensors format. The memfd's descriptor is sent with the push."""

    byte_size: int


class LeafPlace(Record, frozen=True, tag="s.leaf"):
    """Says in which part of a registered region one pushed parameter is, and which datatype and shape it has."""

    region: str
    offset: int
    byte_size: int
    #: The datatype as the protocol names it: "FP32".
    datatype: str
    shape: tuple[int, ...]


class LeavesSource(Record, frozen=True, tag="s.leaves"):
    """Says where in registered regions pushed parameters are. ``leaves``: parameter name -> region, range, datatype, shape."""

    #: The leaf's name, keys joined by dots -> where it is.
    leaves: dict[str, LeafPlace]


ParameterSource = FileSource | RegionSource | MemorySource | LeavesSource
#: The set that requests are answered with which name none.
MAIN_SET = "main"


class MakeParameters(Record, frozen=True, tag="c.makeparams"):
    """Asks a worker to read new parameters from ``source`` and to write them in safetensors format into a memfd.

    The reply is JSON {"byte_size"} with the memfd's descriptor. The memfd has the seals SHRINK, GROW, WRITE and SEAL.
    """

    model: str
    version: int
    source: ParameterSource
    set: str = MAIN_SET
    #: True if leaves that the source lacks are the set's newest, or main's where the worker has no set of that name.
    partial: bool = False
    #: The CRC-32 or SHA-256 of the bytes that came, as ``crc32:`` or ``sha256:`` and hexadecimal digits; "": not checked.
    checksum: str = ""
    #: True if they are for what is loaded and not served yet.
    held: bool = False


class StageParameters(Record, frozen=True, tag="c.stageparams"):
    """Asks a worker to check new parameters and to copy them to its device. Requests do not use the new parameters yet.

    A memfd with the new parameters in safetensors format may come with this record. If no memfd comes, the worker takes the
    values of ``set`` that it got under the same ``number`` before. If ``set`` is "main", ``number`` 0 means the parameters in
    the model repository. The reply is JSON {"byte_size"}, or an error that says why the worker refuses the parameters.
    """

    #: The supervisor's number of the push, by which it is committed or aborted.
    push: int
    model: str
    version: int
    set: str
    #: Grows from one push of a set to the next.
    number: int
    #: True if a value that is not finite is an error.
    check_finite: bool = False
    #: True if they are for what is loaded and not served yet.
    held: bool = False


class CommitParameters(Record, frozen=True, tag="c.commitparams"):
    """Tells a worker to use the parameters that StageParameters with the same ``push`` copied. The reply is JSON {}."""

    push: int
    #: True if sequences and stepped requests that have begun go on with it, too.
    move_sequences: bool = False


class AbortParameters(Record, frozen=True, tag="c.abortparams"):
    """Tells a worker to discard any parameters that StageParameters with the same ``push`` copied. The reply is JSON {}."""

    push: int


class ServeLoaded(Record, frozen=True, tag="c.serveloaded"):
    """Tells a worker to serve the last load of a model version, in place of what it serves of it. The reply is JSON {}.

    If no load of the version waits to be served, the worker does nothing and also replies {}.
    """

    model: str
    version: int


class DropParameters(Record, frozen=True, tag="c.dropparams"):
    """Asks the supervisor or a worker to remove a parameter set other than main. Later requests cannot use the set.

    A worker removes the set from its memory and replies with JSON {}. The supervisor asks all workers to remove it, and gives
    an empty reply.
    """

    model: str
    #: The version; 0, which only the supervisor takes: the newest that serves.
    version: int
    set: str


class PushParameters(Record, frozen=True, tag="c.push"):
    """Asks the supervisor to push new values of the parameter set ``set`` to every worker that has the model version.

    If one worker refuses the values, no worker uses them. The reply is JSON {"model", "version", "set", "number", "byte_size"}.
    ``number`` 0 means one more than the set's highest number so far. The reply has the number that the push got.
    """

    model: str
    #: 0: the newest that serves.
    version: int
    set: str
    source: ParameterSource
    #: 0: one more than the last.
    number: int = 0
    #: True if leaves that the source lacks are the set's newest, or main's where the worker has no set of that name.
    partial: bool = False
    checksum: str = ""
    #: True if a value that is not finite is an error.
    check_finite: bool = False
    move_sequences: bool = False


class ListParameters(Record, frozen=True, tag="c.listparams"):
    """Asks the supervisor for parameter sets. The reply is a JSON array with an object for each set.

    ``model`` "" means all models, ``version`` 0 all versions, and ``set`` "" all names.
    """

    model: str = ""
    version: int = 0
    set: str = ""


class RevertParameters(Record, frozen=True, tag="c.revertparams"):
    """Asks the supervisor to undo the newest push into a parameter set. All workers then use the set's former values again.

    The reply is JSON {"model", "version", "set", "number", "byte_size"}. "number" and "byte_size" are those of the push that
    brought the former values. If the former values are in the model repository, both are 0.
    """

    model: str
    #: 0: the newest that serves.
    version: int
    set: str


class RegionStatus(Record, frozen=True, tag="c.regstat"):
    """Asks the supervisor for the regions of a ``kind``, "system" or "cuda", with this ``name``. ``name`` "" means any name.

    The reply is a JSON array with one object for each region. The object has the region's name and byte_size, for example.
    """

    kind: str
    name: str


class Settle(Record, frozen=True, tag="c.settle"):
    """Asks a worker or the supervisor to reply once earlier changes have taken effect. The reply is empty.

    A worker replies when it has handled all records that the supervisor sent to it before the Settle. The supervisor replies
    when all serving fronts have acknowledged all records that the supervisor sent to fronts before the Settle.
    """


class AwaitIdle(Record, frozen=True, tag="c.idle"):
    """Asks a front to reply once all requests of its clients are answered and all answers are sent. The reply is empty."""


class EndIdleLanes(Record, frozen=True, tag="c.idlelanes"):
    """Tells a worker to close clients' lanes that have no requests in flight. The reply is JSON: how many lanes remain."""


class TakeProfile(Record, frozen=True, tag="c.profile"):
    """Asks a worker to record a JAX profile of ``seconds`` seconds into ``folder``, and then to send an empty reply."""

    seconds: float
    folder: str


class SequenceRecords(Record, frozen=True, tag="c.seqrec"):
    """Asks a worker for its live sequences, at most 1,000 of each model version. The reply is a JSON array."""


class ConnectionRecords(Record, frozen=True, tag="c.connrec"):
    """Asks a front for its connections with clients, at most 1,000. The reply is a JSON array."""


class RecentErrors(Record, frozen=True, tag="c.errors"):
    """Asks a front or worker for the last errors that clients got, at most 100. The reply is a JSON array."""


class TraceExemplars(Record, frozen=True, tag="c.exemplars"):
    """Asks a front for the Prometheus exemplars of its duration histograms. The reply is a JSON array."""


class _ChangeSettings(Record, frozen=True):
    def changes(self) -> dict[str, Any]:
        """Returns the new values of the settings that are to change, by name."""
        given = msgspec.structs.asdict(self).items()
        return {field: value for field, value in given if value is not None and value != () and field != "model"}


class ChangeLog(_ChangeSettings, frozen=True, tag="c.log"):
    """Asks the supervisor to change the log settings that are not None. The reply is all log settings as JSON."""

    info: bool | None = None
    warning: bool | None = None
    error: bool | None = None
    verbose: int | None = None
    format: str | None = None


class ChangeTrace(_ChangeSettings, frozen=True, tag="c.trace"):
    """Asks the supervisor to change trace settings of ``model``, or the default settings of all models if ``model`` is "".

    Settings that are None stay unchanged. A model's settings in ``cleared`` go back to the default of all models. If ``model``
    is "", they go back to the daemon's options. ``count`` -1 means no limit of traces. The reply is the new settings as JSON.
    """

    model: str = ""
    level: int | None = None
    rate: int | None = None
    count: int | None = None
    log_frequency: int | None = None
    cleared: tuple[str, ...] = ()


_OfModels = LoadModel | UnloadModel | ModelReady | RepositoryIndex | ModelStatistics | ServeLoaded
_OfRegions = RegisterSystemRegion | RegisterCudaRegion | UnregisterRegion | AwaitRegion | RegionStatus
_ToPush = MakeParameters | StageParameters | CommitParameters | AbortParameters
_OfParameters = _ToPush | DropParameters | RevertParameters | PushParameters | ListParameters
_Records = RegionRecords | SequenceRecords | ConnectionRecords | RecentErrors | TraceExemplars | WorkerFigures
_OfProcesses = Settle | AwaitIdle | EndIdleLanes | TakeProfile | ChangeLog | ChangeTrace
Operation = _OfModels | _OfRegions | _OfParameters | _Records | _OfProcesses
