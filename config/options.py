"""The daemon's options as one frozen value. ``tensord.config.layers`` fills it from default.toml < file < environment < flags.

``config/default.toml`` says what each option means; this module has types and bounds, which msgspec enforces. Sizes are bytes,
times seconds unless the name says otherwise. Only operators set options; no option can be set over the network.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tensord.config import control_groups

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
    """Base class of all sections of the options. An unknown key in a section is an error."""


class Repository(Section, frozen=True):
    """Options of the model repositories: where they are, and which of their models to serve."""

    paths: tuple[str, ...] = ()
    control_mode: Literal["none", "explicit", "poll"] = "none"
    poll_interval: Annotated[float, Meta(ge=0.1, le=1e8)] = 15.0
    load: tuple[str, ...] = ()
    strict_readiness: bool = True
    required: tuple[str, ...] = ()
    exit_on_error: bool | Literal["auto"] = "auto"


class Http(Section, frozen=True):
    """Options of the HTTP fronts, among them the limits of a connection."""

    enabled: bool = True
    processes: Processes = "auto"
    address: Addresses = ("127.0.0.1",)
    port: Port = 8000
    socket_mode: SocketMode = "0660"
    max_head_byte_size: Annotated[int, Meta(ge=1024, le=_LARGEST)] = 64 << 10
    max_head_fields: Count = 1024
    max_body_byte_size: Annotated[int, Meta(ge=1024, le=_LARGEST)] = 64 << 20
    max_collected_byte_size: Annotated[int, Meta(ge=1024, le=_LARGEST)] = 256 << 20
    response_compression: Compression = "none"
    max_connections: Count = 4096
    head_timeout: Seconds = 10.0
    body_timeout: Seconds = 60.0
    min_rate: Rate = 8192
    write_timeout: Seconds = 30.0
    keep_alive_timeout: Seconds = 75.0
    answer_half_closed: bool = False
    use_tls: bool = False
    mutual_tls: bool = False
    certificate: str = ""
    key: str = ""
    root_certificate: str = ""
    restricted_api: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    header_forward_pattern: str = ""


class Grpc(Section, frozen=True):
    """Options of the gRPC fronts, among them the limits of a connection."""

    enabled: bool = True
    processes: Processes = "auto"
    address: Addresses = ("127.0.0.1",)
    port: Port = 8001
    socket_mode: SocketMode = "0660"
    restricted_protocol: tuple[str, ...] = ()
    header_forward_pattern: str = ""
    max_head_byte_size: Annotated[int, Meta(ge=1024, le=1 << 20)] = 64 << 10
    max_message_byte_size: Annotated[int, Meta(ge=1024, le=(1 << 31) - 1)] = 64 << 20
    max_receiving_byte_size: ByteSize = 1 << 30
    max_connections: Count = 4096
    max_concurrent_streams: Count = 1024
    max_stream_requests: Count = 256
    response_compression: Compression = "none"
    head_timeout: Seconds = 10.0
    body_timeout: Seconds = 60.0
    min_rate: Rate = 8192
    write_timeout: Seconds = 30.0
    keepalive_time: Seconds = 7200.0
    keepalive_timeout: Seconds = 20.0
    keepalive_permit_without_calls: bool = False
    min_ping_interval: Seconds = 300.0
    max_ping_strikes: CountOrNone = 2
    max_connection_idle: Seconds = 0.0
    max_connection_age: Seconds = 0.0
    max_connection_age_grace: Seconds = 0.0
    use_tls: bool = False
    mutual_tls: bool = False
    certificate: str = ""
    key: str = ""
    root_certificate: str = ""


class Metrics(Section, frozen=True):
    """Options of the HTTP server that has Prometheus metrics and the status page."""

    enabled: bool = True
    address: str = "127.0.0.1"
    port: Port = 8002
    page: bool = True
    gpus: bool = True
    agent_port: Port = 0
    buckets: Annotated[tuple[Bound, ...], Meta(min_length=1, max_length=MAX_BUCKETS)] = (
        *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
        *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    )


class Workers(Section, frozen=True):
    """Options of the worker processes: their number, devices, threads, memory and time limits."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpu: Count = 1
    cpu_beside_gpus: bool = False
    per_gpu: Annotated[int, Meta(ge=1, le=16)] = 1
    devices_per_worker: Annotated[int, Meta(ge=1, le=64)] = 1
    pin: bool = True
    cores: tuple[str, ...] = ()
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    single_thread_flops: CountOrNone = 1 << 26
    gpu_memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.75
    gpu_preallocate: bool = True
    max_isolated: CountOrNone = 8
    isolated_memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.1
    pinned_byte_size: ByteSize = msgspec.field(default_factory=control_groups.pinned_byte_size)
    max_parameter_byte_size: ByteSize = 4 << 30
    parameter_byte_size: ByteSize = 4 << 30
    max_parameter_sets: Annotated[int, Meta(ge=1, le=1 << 16)] = 1024
    execute_timeout: Seconds = 300.0
    load_timeout: Seconds = 1800.0
    idle_timeout: Seconds = 30.0


class Arenas(Section, frozen=True):
    """Options of the daemon's arenas: their sizes, and how much of them each client may use."""

    byte_size: ArenaSize = 32 << 20
    max_byte_size: ArenaSize = msgspec.field(default_factory=control_groups.arena_byte_size)
    keep_byte_size: ByteSize = 256 << 20
    inline_byte_size: Annotated[int, Meta(ge=0, le=32768)] = 32768
    wait: Seconds = 5.0
    connection_share: Share = 0.25
    client_share: Share = 0.5
    arriving_share: Share = 0.75


class Requests(Section, frozen=True):
    """Options of requests: how many the daemon holds, how long they may take, and whether the daemon gives them ids."""

    timeout: Seconds = 0.0
    worker_wait: Seconds = 60.0
    max_in_flight: Count = 8192
    max_queue_size: Count = 4096
    max_sequences: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    max_calls: Annotated[int, Meta(ge=1, le=1_000_000)] = 1024
    make_ids: bool = False


class ResponseCacheOptions(Section, frozen=True):
    """Options of the cache of answers: its size."""

    byte_size: ByteSize = 0


class RateLimit(Section, frozen=True):
    """Options of the rate limiter: whether it is on, and the amount of each resource that executing model instances share."""

    mode: Literal["off", "execution_count"] = "off"
    resources: tuple[str, ...] = ()


class ExecutablesOptions(Section, frozen=True):
    """Options of compiled programs: their cache, and limits for shapes without a bucket, batches, and state of sequences."""

    cache_directory: str = ""
    max_unexpected_shapes: Count = 32
    max_batch_byte_size: ByteSize = 1 << 30
    max_state_byte_size: ByteSize = 4 << 30


class RegionsOptions(Section, frozen=True):
    """Options of regions: which shared memory may be registered, how workers access it, and the limits."""

    enabled: bool = True
    key_prefixes: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    access: Literal["guarded", "snapshot"] = "guarded"
    snapshot_key_prefixes: tuple[str, ...] = ()
    snapshot_owners: tuple[str, ...] = ()
    guarded_key_prefixes: tuple[str, ...] = ()
    guarded_owners: tuple[str, ...] = ()
    max_count: Count = 4096
    max_byte_size: ByteSize = 1 << 40
    max_total_byte_size: ByteSize = 1 << 44
    max_owner_count: Count = 2048
    max_owner_byte_size: ByteSize = 1 << 43
    reclaim: Literal["never", "owner", "connection"] = "never"


class ClientsOptions(Section, frozen=True):
    """Options of the Unix socket for clients on this host, and the limits of their lanes."""

    socket: str = ""
    socket_mode: SocketMode = "0660"
    http: bool = True
    lanes: bool = True
    max_count: Count = 4096
    max_owner_count: Count = 2048
    max_owner_lanes: Count = 4096
    max_in_flight: Count = 256
    max_segments: Count = 64
    segment_byte_size: ByteSize = 1 << 30
    response_byte_size: ArenaSize = 256 << 20
    body_timeout: Seconds = 60.0
    max_owner_request_byte_size: ByteSize = 1 << 30
    max_owner_response_byte_size: ByteSize = 4 << 30


class SupervisorOptions(Section, frozen=True):
    """Options of the supervisor: how it stops, how many pushed parameters it keeps, who may push, and its control socket."""

    exit_timeout: Seconds = 30.0
    drain_time: Seconds = 0.0
    parameter_byte_size: ByteSize = 8 << 30
    parameter_owners: tuple[str, ...] = ()
    control_socket: str = ""


class Log(Section, frozen=True):
    """Options of the log: its levels, format and file."""

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)] = 0
    format: Literal["default", "ISO8601", "json"] = "default"
    access: Annotated[int, Meta(ge=0, le=_LARGEST)] = 0
    file: str = ""


class TraceOptions(Section, frozen=True):
    """Options of traces: where traces are written, and which requests are traced until somebody changes the trace settings."""

    level: tuple[Literal["TIMESTAMPS", "TENSORS"], ...] = ()
    rate: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)] = 1000
    count: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] = -1
    file: str = ""
    otlp: str = ""
    log_frequency: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)] = 0
    max_byte_size: ByteSize = 1 << 30
    max_files: Count = 1000


class Expert(Section, frozen=True):
    """Options for measurements, fault finding and tests. Operators need not change them."""

    spin_us: Annotated[int, Meta(ge=0, le=10_000)] = 300
    max_prepared: PreparedCount = 1024
    max_ahead: Annotated[int, Meta(ge=4096, le=_LARGEST)] = 1 << 20
    place_outputs: bool = True
    long_compile: Seconds = 30.0
    start_timeout: Seconds = 120.0
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
