"""The operations that one process may ask another to carry out, with a ``tensord.shm.control_records.ControlCall``.

Each class is one operation; its docstring says what the ``result`` of the Reply holds. The ``Peer`` in the call says which client
asks.
"""

from __future__ import annotations

import msgspec

from tensord.shm.record import Record

#: The message where an operation met a defect of ours.
FAILED = "the server failed to carry out the operation"
#: The message where models are not loaded on request: Triton's sentence.
NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"


class LoadModel(Record, frozen=True, tag="c.load"):
    """Asks the supervisor to load a model by name, or to load it again. Reply: empty, once the model is loaded.

    ``config`` replaces its config.pbtxt, as JSON; ``files`` replace its version files (path -> content).
    """

    name: str
    config: str = ""
    files: dict[str, bytes] = msgspec.field(default_factory=dict)
    #: The model that asks while it is being loaded itself: its load waits for this one.
    within: str = ""


class UnloadModel(Record, frozen=True, tag="c.unload"):
    """Asks the supervisor to begin to unload a model. Reply: empty.

    ``unload_dependents``: if the model is an ensemble, also its members that nothing else uses.
    """

    name: str
    unload_dependents: bool = False


class ModelReady(Record, frozen=True, tag="c.isready"):
    """Asks the supervisor whether any worker serves a model version (0: any version). Reply: JSON, true or false."""

    name: str
    version: int = 0


class RepositoryIndex(Record, frozen=True, tag="c.index"):
    """Asks the supervisor for the index of all models. Reply: JSON array of {name, version?, state?, reason?}.

    ``ready``: only versions that are ready; ``detailed``: with each version's footprint (time and memory of its loading).
    """

    ready: bool = False
    detailed: bool = False


class ModelStatistics(Record, frozen=True, tag="c.stats"):
    """Asks the supervisor or a worker for statistics of a model version; name "": of all models, version 0: of all versions.

    Reply: JSON {"model_stats": [...]}. Each worker replies with its own statistics; the supervisor adds them up.
    """

    name: str = ""
    version: int = 0


class Peer(Record, frozen=True, tag="peer"):
    """Identifies the client that asks for an operation, as the socket tells it, never as the client says.

    Source: ``tensord.daemon.front.peer``.
    """

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
        """Returns the name under which quotas count this client: its user, or for TCP its host.

        (Clients of one TCP host cannot be told apart for longer than a connection.)
        """
        return f"uid {self.uid}" if self.kind == "unix" else f"{self.kind} {self.address.rpartition(':')[0]}".strip()


#: A TCP client of whom nothing is known.
ANONYMOUS = Peer()


class RegisterSystemRegion(Record, frozen=True, tag="c.reg"):
    """Registers part of a POSIX shared-memory object as a region under a name.

    The first worker opens the object and replies with its descriptor and JSON {"access": how it uses the region}; both are sent
    to the other workers.
    """

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
    """Registers an allocation of a client's GPU memory as a region under a name.

    Anybody who has the handle can open the memory, so the handle is never written to a log.
    """

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
    """Unregisters a region of a kind, "system", "cuda" or "" (any): no later request finds it.

    Name "", to the supervisor only: every region of the kind that this client may unregister. A worker replies with JSON, the
    number of tensors of requests that lie in the region now.
    """

    kind: str
    name: str


class AwaitRegion(Record, frozen=True, tag="c.awaitreg"):
    """Asks a worker to reply once all earlier regions of this name are closed, as no request uses them any more. Reply: empty."""

    name: str


class RegionRecords(Record, frozen=True, tag="c.regrec"):
    """Asks the supervisor for all that is known of a region, or of all regions (name ""). Reply: JSON array.

    A worker that is asked replies with a JSON object: name -> [tensors of requests in the region of that name, tensors of
    requests in earlier regions of the same name].
    """

    name: str = ""


class WorkerFigures(Record, frozen=True, tag="c.figures"):
    """Asks a worker for its counters, from which metrics are made. Reply: ``tensord.shm.figures.Figures`` as JSON."""


class FileSource(Record, frozen=True, tag="s.file"):
    """Says that parameters to push are in a file or Orbax checkpoint of the model's folder (see ``tensord.models.load``)."""

    #: Relative to the version's folder or, where that has none of the name, to the model's; never leads out of the latter.
    path: str


class RegionSource(Record, frozen=True, tag="s.region"):
    """Says that parameters to push are in a registered region, of system or GPU memory, in safetensors format."""

    region: str
    offset: int = 0
    #: 0: as much as there is behind the offset.
    byte_size: int = 0


class MemorySource(Record, frozen=True, tag="s.memory"):
    """Says that parameters to push are in a memory file in safetensors format, whose descriptor comes with the call."""

    byte_size: int


class LeafPlace(Record, frozen=True, tag="s.leaf"):
    """Says where in a registered region the bytes of one parameter are, and its datatype and shape."""

    region: str
    offset: int
    byte_size: int
    #: As the protocol names it: "FP32".
    datatype: str
    shape: tuple[int, ...]


class LeavesSource(Record, frozen=True, tag="s.leaves"):
    """Says for each parameter to push, by name, in which place of a registered region it is."""

    #: The leaf's name, keys joined by dots -> where it is.
    leaves: dict[str, LeafPlace]


ParameterSource = FileSource | RegionSource | MemorySource | LeavesSource
#: The set that requests are answered with which name none.
MAIN_SET = "main"


class MakeParameters(Record, frozen=True, tag="c.makeparams"):
    """Tells a worker to write all parameters of a set, from ``source``, into one sealed memory in safetensors format.

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
    """Tells a worker to validate new parameters of a set and copy them to the device, next to those in use.

    The memory that comes with the call holds all parameters in safetensors format. Without memory, the worker takes version
    ``number`` of this set, which it has kept; number 0 of the set main is what the repository holds. Reply: JSON {"byte_size"},
    or the error that says why the parameters are refused; then nothing has changed.
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
    """Tells a worker to use the parameters that it has staged of a push for every batch from now on. Reply: JSON {}."""

    push: int
    #: Whether sequences and stepped requests that have begun go on with it, too.
    move_sequences: bool = False


class AbortParameters(Record, frozen=True, tag="c.abortparams"):
    """Tells a worker to drop the parameters that it has staged of a push, if there are any. Reply: JSON {}."""

    push: int


class ServeLoaded(Record, frozen=True, tag="c.serveloaded"):
    """Tells a worker to let requests find a version whose Load had ``held`` set; nothing happens to any other version.

    Reply: JSON {} when requests find it, so that only then fronts hear of it.
    """

    model: str
    version: int


class DropParameters(Record, frozen=True, tag="c.dropparams"):
    """Drops a parameter set on one worker (sent to a worker) or on all (sent to the supervisor): no later request finds it.

    The set main cannot be dropped. Reply: JSON {} from a worker, empty from the supervisor.
    """

    model: str
    #: To the supervisor 0: the newest that serves.
    version: int
    set: str


class PushParameters(Record, frozen=True, tag="c.push"):
    """Pushes new parameters of a set to every worker with the model version; if one refuses, none uses them.

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
    """Asks the supervisor for the parameter sets of a model ("": all models), a version (0: all) and a name ("": all names).

    Reply: JSON array with an object for each set: {"model", "version", "set", ...}.
    """

    model: str = ""
    version: int = 0
    set: str = ""


class RevertParameters(Record, frozen=True, tag="c.revertparams"):
    """Reverts a set, on all workers, to the parameters that it had before its last push. Reply: JSON, as to PushParameters."""

    model: str
    #: 0: the newest that serves.
    version: int
    set: str


class RegionStatus(Record, frozen=True, tag="c.regstat"):
    """Asks the supervisor which regions of a kind, "system" or "cuda", are registered: the one of that name, or all (name "").

    Reply: JSON array with an object for each region, in the form in which clients get it.
    """

    kind: str
    name: str


class Settle(Record, frozen=True, tag="c.settle"):
    """Asks the supervisor to reply (empty) once every front acts upon all changes that the asking front knew when it asked."""


class AwaitIdle(Record, frozen=True, tag="c.idle"):
    """Asks a front to reply once none of its clients waits for an answer, or for the rest of an answer. Reply: empty."""


class EndIdleLanes(Record, frozen=True, tag="c.idlelanes"):
    """Tells a worker to close the lanes of clients without a request in flight. Reply: JSON, how many lanes stay open."""


class TakeProfile(Record, frozen=True, tag="c.profile"):
    """Tells a worker to record a profile for ``seconds`` and to write it below ``folder``. Reply: empty, once it is written."""

    seconds: float
    folder: str


class SequenceRecords(Record, frozen=True, tag="c.seqrec"):
    """Asks a worker for its live sequences. Reply: JSON array with an object for each, at most 1,000 of each model version."""


class ConnectionRecords(Record, frozen=True, tag="c.connrec"):
    """Asks a front for its clients' connections. Reply: JSON array with an object for each, at most 1,000."""


class RecentErrors(Record, frozen=True, tag="c.errors"):
    """Asks a front, or a worker with clients' lanes, for the last errors that clients got. Reply: JSON array, at most 100."""


class TraceExemplars(Record, frozen=True, tag="c.exemplars"):
    """Asks a front for its histograms' exemplars. Reply: JSON, as ``tensord.shm.tracer.Exemplars.told`` returns them."""


class ChangeLog(Record, frozen=True, tag="c.log"):
    """Asks the supervisor to change the log settings that are not None, for all processes. Reply: JSON, all settings."""

    info: bool | None = None
    warning: bool | None = None
    error: bool | None = None
    verbose: int | None = None
    format: str | None = None


class ChangeTrace(Record, frozen=True, tag="c.trace"):
    """Asks the supervisor to change trace settings, those that are not None, of a model or of all models (``model`` "").

    A model forgets its own value for each setting in ``cleared``. Reply: JSON, the settings of the model that are now in force.
    Fields as in TraceChanged; ``count`` is -1 for no limit.
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
