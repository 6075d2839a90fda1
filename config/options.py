"""The daemon's options as one frozen value. ``tensord.config.layers`` fills it from default.toml < file < environment < flags.

The comments in ``config/default.toml`` are the reference for operators; this module has types and bounds, which msgspec
enforces. Sizes are bytes, times seconds unless the name says otherwise. Only operators set options; no option can be
set over the network.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tensord.config import host_memory

Port = Annotated[int, Meta(ge=0, le=65535, description="a TCP port; 0 picks a free one")]
#: TCP addresses and unix:PATH; a single one needs no brackets.
Addresses = Annotated[tuple[str, ...], Meta(min_length=1)]
SocketMode = Annotated[str, Meta(pattern="^0[0-7]{3}$", description="octal permissions of a Unix socket")]
#: The largest integer that a record to a child process can hold.
_LARGEST = (1 << 63) - 1
Count = Annotated[int, Meta(ge=1, le=_LARGEST)]
#: The most prepared requests of a front; a lane has so many numbers for them (``tensord.shm.prepared``).
PreparedCount = Annotated[int, Meta(ge=0, le=1024)]
CountOrNone = Annotated[int, Meta(ge=0, le=_LARGEST)]
ByteSize = Annotated[int, Meta(ge=0, le=_LARGEST)]
ArenaSize = Annotated[int, Meta(ge=1 << 20, le=1 << 40)]
#: The most fronts that a protocol may have; each has a row of their shared counters (``tensord.daemon.control.shared_counters``).
MAX_PROCESSES = 64
Processes = Literal["auto"] | Annotated[int, Meta(ge=1, le=MAX_PROCESSES)]
#: Bounded, so that every time is also a number of nanoseconds.
Seconds = Annotated[float, Meta(ge=0, le=1e8)]
#: Bytes a second.
Rate = Annotated[int, Meta(ge=0, le=1 << 40)]
#: The most upper bounds of a histogram (``tensord.shm.durations``).
MAX_BUCKETS = 32
#: The upper bound of a histogram's bucket, in seconds.
Bound = Annotated[float, Meta(gt=0, le=1e6)]
#: A part of something; 1: all of it.
Share = Annotated[float, Meta(gt=0, le=1)]
Compression = Literal["none", "low", "medium", "high"]
#: The zlib level of each compression; 0: answers are not compressed.
COMPRESSION_LEVELS: dict[Compression, int] = {"none": 0, "low": 1, "medium": 6, "high": 9}


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of all sections of the options: an unknown key is an error, never ignored."""


class Repository(Section, frozen=True):
    """The model repositories, and which of their models to serve."""

    paths: tuple[str, ...] = ()
    control_mode: Literal["none", "explicit", "poll"] = "none"
    #: poll mode: seconds between two looks at the folders.
    poll_interval: Annotated[float, Meta(ge=0.1, le=1e8)] = 15.0
    #: explicit mode: what to load at start; "*" is everything.
    load: tuple[str, ...] = ()
    strict_readiness: bool = True
    #: Models that readiness waits for, in the place of all that are wanted at the start.
    required: tuple[str, ...] = ()
    #: What ends the daemon at start. True: a model that fails to load.  "auto": only a repository that cannot be read.  False:
    #: neither.
    exit_on_error: bool | Literal["auto"] = "auto"


class Http(Section, frozen=True):
    """The HTTP servers (fronts), and the limits of what they accept from a connection."""

    enabled: bool = True
    #: Fronts that share the addresses; "auto": by cores and GPUs (tensord.daemon.processes.fronts).
    processes: Processes = "auto"
    #: Every address is listened on; the port counts for TCP only.
    address: Addresses = ("127.0.0.1",)
    port: Port = 8000
    socket_mode: SocketMode = "0660"
    #: Bytes of request line and headers together.
    max_head_byte_size: Annotated[int, Meta(ge=1024, le=_LARGEST)] = 64 << 10
    #: Header fields of one request.
    max_head_fields: Count = 1024
    max_body_byte_size: Annotated[int, Meta(ge=1024, le=_LARGEST)] = 64 << 20
    #: Bytes of bodies in ordinary memory, of all connections together: JSON, and what comes chunked or compressed.
    max_collected_byte_size: Annotated[int, Meta(ge=1024, le=_LARGEST)] = 256 << 20
    #: The compression of answers to clients that accept gzip or deflate.
    response_compression: Compression = "none"
    max_connections: Count = 4096
    #: A request whose head or body is not complete by then is answered 408 and its connection closed.
    head_timeout: Seconds = 10.0
    body_timeout: Seconds = 60.0
    #: The lowest rate of a body in bytes a second, after its first seconds; 0: any rate.
    min_rate: Rate = 8192
    #: A client that takes none of its answer for that long, or less than ``min_rate``, is cut off.
    write_timeout: Seconds = 30.0
    keep_alive_timeout: Seconds = 75.0
    #: A client that has ended its sending side gets the answers to what it sent; else it is gone, and its requests are cancelled.
    answer_half_closed: bool = False
    #: TLS on the addresses of TCP; Unix sockets stay plain.
    use_tls: bool = False
    #: Whether clients need a certificate signed by ``root_certificate``.
    mutual_tls: bool = False
    certificate: str = ""
    key: str = ""
    root_certificate: str = ""
    #: "GROUP[,GROUP...]:KEY=VALUE" each: these calls need the header KEY with VALUE (tensord.config.restrictions).
    restricted_api: tuple[str, ...] = ()
    #: Origins whose pages may ask from within a browser, such as "https://example.org"; "*": all.
    cors_origins: tuple[str, ...] = ()
    #: A pattern (RE2, any case): headers whose names it matches become parameters of the request; "": none.
    header_forward_pattern: str = ""


class Grpc(Section, frozen=True):
    """The gRPC servers (fronts), and the limits of what they accept from a connection."""

    enabled: bool = True
    #: As for http.
    processes: Processes = "auto"
    address: Addresses = ("127.0.0.1",)
    port: Port = 8001
    socket_mode: SocketMode = "0660"
    #: As http.restricted_api; the metadata key is "triton-grpc-protocol-KEY".
    restricted_protocol: tuple[str, ...] = ()
    #: As http.header_forward_pattern.
    header_forward_pattern: str = ""
    #: Bytes of a call's headers together, decoded.
    max_head_byte_size: Annotated[int, Meta(ge=1024, le=1 << 20)] = 64 << 10
    #: Bytes of one message, also after decompression.
    max_message_byte_size: Annotated[int, Meta(ge=1024, le=(1 << 31) - 1)] = 64 << 20
    #: Bytes of incomplete messages of all connections together.
    max_receiving_byte_size: ByteSize = 1 << 30
    max_connections: Count = 4096
    max_concurrent_streams: Count = 1024
    #: Requests of one ModelStreamInfer that are in flight, or whose answers wait for earlier ones; the client waits beyond.
    max_stream_requests: Count = 256
    response_compression: Compression = "none"
    #: A connection that has not opened, or a message that is not complete, by then is given up.
    head_timeout: Seconds = 10.0
    body_timeout: Seconds = 60.0
    #: As for http.
    min_rate: Rate = 8192
    #: A client that takes none of an answer for that long, or less than ``min_rate``, is cut off.
    write_timeout: Seconds = 30.0
    #: A connection silent for so long is pinged, and cut off if it does not answer.
    keepalive_time: Seconds = 7200.0
    keepalive_timeout: Seconds = 20.0
    keepalive_permit_without_calls: bool = False
    #: A client without calls may ping at this interval; it may ping faster ``max_ping_strikes`` times (0: any number).
    min_ping_interval: Seconds = 300.0
    max_ping_strikes: CountOrNone = 2
    #: Closes a connection that had no calls for so long; 0: never.
    max_connection_idle: Seconds = 0.0
    #: Closes a connection of that age; 0: never.
    max_connection_age: Seconds = 0.0
    max_connection_age_grace: Seconds = 0.0
    use_tls: bool = False
    #: Whether clients need a certificate signed by ``root_certificate``.
    mutual_tls: bool = False
    certificate: str = ""
    key: str = ""
    root_certificate: str = ""


class Metrics(Section, frozen=True):
    """The port on which Prometheus reads metrics and browsers see the status page, and what is shown there."""

    enabled: bool = True
    address: str = "127.0.0.1"
    port: Port = 8002
    #: Whether ``/`` is a page for browsers.
    page: bool = True
    #: Whether GPUs are shown as well, where there are GPU workers; their errors are logged then.
    gpus: bool = True
    #: The port of HAProxy's agent-check, on the same address; 0: there is none.
    agent_port: Port = 0
    #: Upper bounds of the histograms of durations, in seconds; they grow.
    buckets: Annotated[tuple[Bound, ...], Meta(min_length=1, max_length=MAX_BUCKETS)] = (
        *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
        *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    )


class Workers(Section, frozen=True):
    """The worker processes, which run models: how many, on which devices, with which threads, memory and time limits."""

    #: "auto": one worker per visible GPU, else CPU workers.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpu: Count = 1
    #: Whether CPU workers are started beside GPU workers as well, for models with KIND_CPU.
    cpu_beside_gpus: bool = False
    #: Workers of one GPU, which divide ``gpu_memory_fraction``.
    per_gpu: Annotated[int, Meta(ge=1, le=16)] = 1
    #: GPUs of one worker, which a model may have several of; CPU workers have so many devices of XLA on the same cores.
    devices_per_worker: Annotated[int, Meta(ge=1, le=64)] = 1
    #: Whether each CPU worker is pinned to its share of the cores (before XLA sizes its thread pool).
    pin: bool = True
    #: The cores of each CPU worker, as Linux lists them ("0-3,8"); empty: shares of those the daemon may use.
    cores: tuple[str, ...] = ()
    #: Threads that XLA computes with in each CPU worker; 0: as many as the worker has cores.
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    #: CPU programs of up to so many floating-point operations are computed by one thread; 0: all programs use all threads.
    single_thread_flops: CountOrNone = 1 << 26
    #: The part of a GPU's memory that XLA takes, in all of its workers together; clients' regions and gathered inputs lie
    #: outside of it.
    gpu_memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.75
    gpu_preallocate: bool = True
    #: The most models that have worker processes of their own (the parameter ``isolated``) at a time.
    max_isolated: CountOrNone = 8
    #: The part of a GPU's memory that XLA takes for an isolated model that names none; beside ``gpu_memory_fraction``.
    isolated_memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.1
    #: Host memory (arenas, system regions) that a GPU worker page-locks; 0: none; "auto" in the configuration: a part of the
    #: host's memory.
    pinned_byte_size: ByteSize = msgspec.field(default_factory=host_memory.pinned_byte_size)
    #: Bytes of one pushed parameter set, and of all of them, and models on demand, on a worker's device.
    max_parameter_byte_size: ByteSize = 4 << 30
    parameter_byte_size: ByteSize = 4 << 30
    #: Parameter sets of one model version, ``main`` among them.
    max_parameter_sets: Annotated[int, Meta(ge=1, le=1 << 16)] = 1024
    #: A worker that executes, compiles or loads longer than this without progress is killed and replaced; 0: never.
    execute_timeout: Seconds = 300.0
    load_timeout: Seconds = 1800.0
    #: An idle worker's loop must iterate at least this often.
    idle_timeout: Seconds = 30.0


class Arenas(Section, frozen=True):
    """The daemon's shared memory for tensors of requests and answers (not clients' regions): its sizes, who may use how much."""

    #: The first segment of each arena; large tensors get segments of their own.
    byte_size: ArenaSize = 32 << 20
    #: All segments of one arena together; "auto" in the configuration: a part of the host's memory.
    max_byte_size: ArenaSize = msgspec.field(default_factory=host_memory.arena_byte_size)
    #: Free large segments that are kept for the next large tensor.
    keep_byte_size: ByteSize = 256 << 20
    #: Tensors up to this size travel inside their record.
    inline_byte_size: Annotated[int, Meta(ge=0, le=8192)] = 4096
    #: How long a request waits for room before it is refused with 503.
    wait: Seconds = 5.0
    #: The share of ``max_byte_size`` that one connection may hold of a front's request arena, and of answers that it has not
    #: taken.
    connection_share: Share = 0.25
    #: The share of all connections of one client: a user on unix sockets, a host on TCP.
    client_share: Share = 0.5
    #: The share of a request arena's ``max_byte_size`` that incomplete bodies may take together.
    arriving_share: Share = 0.75


class Requests(Section, frozen=True):
    """Limits on the requests that are being served, and whether requests get ids."""

    #: An answer that takes longer is given up: 503, and the request is cancelled. 0: never.
    timeout: Seconds = 0.0
    #: How long a request waits for a worker while one is being replaced.
    worker_wait: Seconds = 60.0
    max_in_flight: Count = 8192
    #: Requests queued for one model on one worker (a model's own max_queue_size is applied besides).
    max_queue_size: Count = 4096
    #: Sequences that live at a time on one worker, of all its models.
    max_sequences: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    #: Calls of other models that one execution of a model has under way at a time.
    max_calls: Annotated[int, Meta(ge=1, le=1_000_000)] = 1024
    #: True: the server gives an id to each request that has none.
    make_ids: bool = False


class ResponseCacheOptions(Section, frozen=True):
    """The cache of answers, for models whose configuration asks for it."""

    #: Inputs and outputs of all cached answers, of all shared workers together: each has its share; 0: there is no cache.
    byte_size: ByteSize = 0


class RateLimit(Section, frozen=True):
    """The resources of the rate limiter: an instance of a model executes only while it has the resources that it needs."""

    mode: Literal["off", "execution_count"] = "off"
    #: The amounts, "NAME:COUNT" or "NAME:COUNT:DEVICE" (tensord.config.rate_limits); by default as much as any one instance
    #: needs.
    resources: tuple[str, ...] = ()


class ExecutablesOptions(Section, frozen=True):
    """How models are compiled, where compiled programs are cached, and limits on their size."""

    #: "": $XDG_CACHE_HOME/tensord, or $CACHE_DIRECTORY under systemd. It holds code, so it has to be this user's alone.
    cache_directory: str = ""
    #: Shapes of one model version compiled because a request asked for them, besides its buckets; the oldest makes room.
    max_unexpected_shapes: Count = 32
    #: The most bytes of inputs and outputs of a model's largest batch; a model that needs more is not loaded.
    max_batch_byte_size: ByteSize = 1 << 30
    #: The most bytes that a model keeps of all its sequences on one worker; beyond it is not loaded, or its step is refused.
    max_state_byte_size: ByteSize = 4 << 30


class RegionsOptions(Section, frozen=True):
    """Shared memory of clients: which objects may be registered as regions, how workers access them, and limits."""

    enabled: bool = True
    #: The prefixes that keys may have, without the leading slash; empty: any.
    key_prefixes: tuple[str, ...] = ()
    #: Users and groups (names or numbers) whose objects may be registered besides the daemon's own.
    owners: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    #: How workers use a region: mapped behind the fault guard, or read and written with system calls.
    access: Literal["guarded", "snapshot"] = "guarded"
    #: Exceptions by key and by the object's owner; snapshot goes first.
    snapshot_key_prefixes: tuple[str, ...] = ()
    snapshot_owners: tuple[str, ...] = ()
    guarded_key_prefixes: tuple[str, ...] = ()
    guarded_owners: tuple[str, ...] = ()
    max_count: Count = 4096
    #: The most bytes of one region, and of all together.
    max_byte_size: ByteSize = 1 << 40
    max_total_byte_size: ByteSize = 1 << 44
    #: The limits of one owner: a user on unix sockets, a host on TCP.
    max_owner_count: Count = 2048
    max_owner_byte_size: ByteSize = 1 << 43
    #: When a region that was registered over a unix socket is unregistered: with the process that did it, or with its connection.
    reclaim: Literal["never", "owner", "connection"] = "never"


class ClientsOptions(Section, frozen=True):
    """The unix socket for clients, and the direct connections to workers (lanes) that clients get there."""

    #: The socket's path; "": clients.sock in $RUNTIME_DIRECTORY under systemd, else beside tensorctl's socket.
    socket: str = ""
    socket_mode: SocketMode = "0660"
    #: Whether HTTP is served on http.sock in the same folder as well, where it is served at all.
    http: bool = True
    #: Whether clients get lanes; without, they ask over HTTP.
    lanes: bool = True
    #: Clients that are connected at a time: of all users, and of one.
    max_count: Count = 4096
    max_owner_count: Count = 2048
    #: Lanes of one user: a connection has one to each worker that it asks.
    max_owner_lanes: Count = 4096
    #: Requests of one lane that are in flight.
    max_in_flight: Count = 256
    #: Segments of memory that a client has on one lane, and the bytes of all of them.
    max_segments: Count = 64
    segment_byte_size: ByteSize = 1 << 30
    #: Answers of one lane in the worker's memory, until the client has given them back.
    response_byte_size: ArenaSize = 256 << 20
    #: A record that comes in several parts may take so long, from its first to its last.
    body_timeout: Seconds = 60.0
    #: What requests on all lanes of one user hold of each worker's memory, as they are kept there.
    max_owner_request_byte_size: ByteSize = 1 << 30
    #: What answers to all lanes of one user hold of each worker's memory.
    max_owner_response_byte_size: ByteSize = 4 << 30


class SupervisorOptions(Section, frozen=True):
    """How the daemon stops, keeps pushed parameters, and is controlled."""

    #: After SIGTERM, accepted requests may take so long to finish.
    exit_timeout: Seconds = 30.0
    #: How long the daemon goes on serving after SIGTERM, or ``tensorctl drain``, while it says that it is not ready.
    drain_time: Seconds = 0.0
    #: Bytes of pushed parameters that are kept for workers that are replaced, of all models.
    parameter_byte_size: ByteSize = 8 << 30
    #: Users (names or numbers) that may push parameters over unix sockets, besides root and the daemon's own; empty: all.
    parameter_owners: tuple[str, ...] = ()
    #: Unix socket for tensorctl; "": where tensorctl looks by itself (tensord.daemon.control.runtime_directory).
    control_socket: str = ""


class Log(Section, frozen=True):
    """The log: its levels, format and file."""

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)] = 0
    format: Literal["default", "ISO8601", "json"] = "default"
    #: The access log has one good answer in so many, and refusals; 0: there is none.
    access: Annotated[int, Meta(ge=0, le=_LARGEST)] = 0
    #: "": standard error.
    file: str = ""


class TraceOptions(Section, frozen=True):
    """How requests are traced from the daemon's start on, and where traces are written."""

    #: The levels; empty: tracing is off.
    level: tuple[Literal["TIMESTAMPS", "TENSORS"], ...] = ()
    #: One request in so many is traced.
    rate: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)] = 1000
    #: The number of traces until tracing stops; -1: it does not.
    count: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] = -1
    #: The file; "": nothing is written.
    file: str = ""
    #: Where a collector takes OTLP over HTTP, as ``http://127.0.0.1:4318/v1/traces``; "": no spans are sent.
    otlp: str = ""
    #: Above 0: so many traces into each of file.0, file.1, ...
    log_frequency: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)] = 0
    #: The most bytes that one front writes; then it drops traces.
    max_byte_size: ByteSize = 1 << 30
    #: With ``log_frequency``: files of the series, those that were there before included; then traces are dropped.
    max_files: Count = 1000


class Expert(Section, frozen=True):
    """Settings that no operator should have to change: for measurements, for finding faults, and for our own tests."""

    #: How long either end of a lane (a client's, too) polls before it sleeps, in microseconds, while records follow each other
    #: that fast. 0: never.
    spin_us: Annotated[int, Meta(ge=0, le=10_000)] = 300
    #: Prepared requests that each front keeps, so that requests like them are parsed once; 0: none.
    max_prepared: PreparedCount = 1024
    #: Bytes of a request's several responses that wait to be taken by its client; its model waits beyond.
    max_ahead: Annotated[int, Meta(ge=4096, le=_LARGEST)] = 1 << 20
    #: True: in CPU workers XLA writes large outputs straight into the client's region or the arena.  False: they are copied.
    place_outputs: bool = True
    #: A program that is being compiled for so long lets other models be compiled beside it; 0: they wait for its end.
    long_compile: Seconds = 30.0
    #: A child that does not report within this is killed and replaced.
    start_timeout: Seconds = 120.0
    #: A replacement starts after this, doubled on each death, up to the maximum.
    restart_delay: Seconds = 0.1
    max_restart_delay: Seconds = 10.0


class Options(Section, frozen=True):
    """All options of the daemon, in their sections."""

    server_name: str = "tensord"
    repository: Repository = Repository()
    http: Http = Http()
    grpc: Grpc = Grpc()
    metrics: Metrics = Metrics()
    workers: Workers = Workers()
    arenas: Arenas = Arenas()
    requests: Requests = Requests()
    response_cache: ResponseCacheOptions = ResponseCacheOptions()
    rate_limit: RateLimit = RateLimit()
    executables: ExecutablesOptions = ExecutablesOptions()
    regions: RegionsOptions = RegionsOptions()
    clients: ClientsOptions = ClientsOptions()
    supervisor: SupervisorOptions = SupervisorOptions()
    log: Log = Log()
    trace: TraceOptions = TraceOptions()
    expert: Expert = Expert()
