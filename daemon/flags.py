"""Defines the daemon's command-line flags. Each flag sets one key of the configuration.

A unit file that starts a Triton server should start tensord once the program's name is changed. So a flag of tensord is named
like Triton's flag of the same meaning. Triton's ``--trace-config`` and ``--cache-config`` stand for other flags. Some flags of
Triton, such as ``--allow-cpu-metrics=false``, are accepted but change nothing. Any other flag is refused with a reason, or with
the name of the most similar flag.

    arguments ─▶ ``canonical`` writes each flag as ``--name=value`` ─▶ click parses them ─▶ ``settings`` returns keys and values
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from tensord.config import layers
from tensord.config.layers import ConfigurationError, Setting

if TYPE_CHECKING:
    _TextType = click.ParamType[str]
else:
    _TextType = click.ParamType  # before click 8.5 it is not generic


@dataclass(frozen=True, slots=True)
class Flag:
    """A command-line flag, which sets one key of the configuration."""

    name: str
    key: str
    help: str
    #: The name of its value in --help. "MS": Triton takes milliseconds where the configuration has seconds.
    metavar: str
    #: Another name of the same flag; "": it has none.
    alias: str

    @property
    def is_list(self) -> bool:
        """Returns whether the flag may be repeated. Each occurrence then adds to a list."""
        return isinstance(layers.defaults()[self.key], list)

    @property
    def is_switch(self) -> bool:
        """Returns whether the flag may be given without a value, which then means true."""
        return "true" in layers.choices(self.key)


#: All flags, in the order of --help: name and perhaps another one, key, name of the value, help.
_TABLE = """
    model-repository|model-store repository.paths DIR A folder of models; may be given more than once.
    model-control-mode repository.control_mode MODE none: all models, at start. explicit: on request. poll: all, and
        whatever changes.
    repository-poll-secs repository.poll_interval SECONDS Mode poll: how often the folders are looked at.
    load-model repository.load NAME Explicit mode: load it at start; * is all. May be repeated.
    strict-readiness repository.strict_readiness VALUE Not ready until every model wanted at the start has served.
    exit-on-error repository.exit_on_error VALUE Exit when a model fails to load at start; false: not even without a repository.
    allow-http http.enabled VALUE Serve HTTP.
    http-address http.address ADDRESS Address to listen on, or unix:PATH; may be repeated.
    http-port http.port PORT Port to listen on; 0 picks a free one.
    http-processes http.processes COUNT HTTP fronts (processes) that share the port.
    http-max-input-size http.max_body_byte_size BYTES Largest request body in bytes.
    http-infer-response-compression-level http.response_compression LEVEL none, low, medium or high.
    http-header-timeout http.head_timeout SECONDS How long a client may take for the head of a request.
    http-restricted-api http.restricted_api GROUP[,GROUP]:KEY=VALUE Groups of calls that need a header; may be repeated.
    http-header-forward-pattern http.header_forward_pattern RE2 Headers that become parameters of a request.
    http-socket-mode http.socket_mode MODE Mode of the sockets of unix: addresses.
    allow-grpc grpc.enabled VALUE Serve gRPC.
    grpc-address grpc.address ADDRESS Address to listen on, or unix:PATH; may be repeated.
    grpc-port grpc.port PORT Port to listen on; 0 picks a free one.
    grpc-processes grpc.processes COUNT gRPC fronts that share the port.
    grpc-socket-mode grpc.socket_mode MODE Mode of the sockets of unix: addresses.
    grpc-max-input-size grpc.max_message_byte_size BYTES Largest message in bytes.
    grpc-infer-response-compression-level grpc.response_compression LEVEL none, low, medium or high.
    grpc-keepalive-time grpc.keepalive_time MS Silence before a connection is pinged.
    grpc-keepalive-timeout grpc.keepalive_timeout MS Wait for the answer to a ping.
    grpc-keepalive-permit-without-calls grpc.keepalive_permit_without_calls VALUE Ping connections without calls as well.
    grpc-http2-min-recv-ping-interval-without-data grpc.min_ping_interval MS A client's pings that come faster are strikes.
    grpc-http2-max-ping-strikes grpc.max_ping_strikes COUNT Strikes that a client may have; 0: any number.
    grpc-max-connection-idle grpc.max_connection_idle MS Connections without calls are ended after this; 0: never.
    grpc-max-connection-age grpc.max_connection_age MS Connections are ended after this; 0: never.
    grpc-max-connection-age-grace grpc.max_connection_age_grace MS Connections of that age are cut off so much later.
    grpc-restricted-protocol grpc.restricted_protocol GROUP[,GROUP]:KEY=VALUE As --http-restricted-api, for gRPC.
    grpc-header-forward-pattern grpc.header_forward_pattern RE2 Metadata that become parameters of a request.
    grpc-use-ssl grpc.use_tls VALUE TLS on the gRPC port.
    grpc-use-ssl-mutual grpc.mutual_tls VALUE Clients must show a certificate.
    grpc-server-cert grpc.certificate FILE PEM file of the certificate.
    grpc-server-key grpc.key FILE PEM file of the certificate's key.
    grpc-root-cert grpc.root_certificate FILE PEM file that clients' certificates are checked with.
    allow-metrics metrics.enabled VALUE Serve metrics for Prometheus.
    metrics-address metrics.address ADDRESS Address to listen on.
    metrics-port metrics.port PORT Port to listen on; 0 picks a free one.
    allow-gpu-metrics metrics.gpus VALUE Metrics of GPUs as well, where workers use them.
    allow-client-shm regions.enabled VALUE Clients may register shared memory.
    allow-client-lanes clients.lanes VALUE Clients get lanes to the workers.
    device workers.device KIND What workers run on; auto: GPUs, or the CPU where there are none.
    cpu-workers workers.cpu COUNT Number of CPU workers.
    cpu-beside-gpus workers.cpu_beside_gpus VALUE CPU workers beside GPU workers as well.
    workers-per-gpu workers.per_gpu COUNT Workers of one GPU, which divide its memory.
    gpu-memory-fraction workers.gpu_memory_fraction PART What XLA takes of a GPU's memory, in all of its workers together.
    cache-directory executables.cache_directory DIR Where compiled code is kept between starts.
    response-cache-byte-size response_cache.byte_size BYTES Bytes of answers that are given again; also
        --cache-config=local,size=BYTES.
    rate-limit rate_limit.mode MODE off, or execution_count: instances wait for resources.
    rate-limit-resource rate_limit.resources NAME:COUNT[:DEVICE] How much there is of a resource; may be repeated.
    control-socket supervisor.control_socket PATH Unix socket for tensorctl.
    exit-timeout-secs supervisor.exit_timeout SECONDS Seconds for accepted requests after SIGTERM.
    drain-time-secs supervisor.drain_time SECONDS Seconds of serving on after SIGTERM, while it says that it is not ready.
    id server_name NAME The server's name in GET /v2.
    trace-level trace.level LEVEL TIMESTAMPS or TENSORS, may be repeated; or OFF.
    trace-rate trace.rate COUNT Trace one request in so many.
    trace-count trace.count COUNT Traces until it stops; -1: no end.
    trace-file trace.file FILE Where traces are written.
    trace-log-frequency trace.log_frequency COUNT Traces in each file; 0: all in one.
    log-verbose log.verbose LEVEL 0: off; 1: debug messages; 2: of libraries as well.
    log-info log.info VALUE Log information.
    log-warning log.warning VALUE Log warnings.
    log-error log.error VALUE Log errors.
    log-format log.format FORMAT default, ISO8601 or json.
    log-file log.file FILE Log to this file instead of standard error.
"""


def _flags() -> Iterator[Flag]:
    for line in _TABLE.strip().replace("\n        ", " ").splitlines():
        names, key, metavar, text = line.split(maxsplit=3)
        name, _, alias = names.partition("|")
        yield Flag(name, key, text, metavar, alias)


FLAGS = tuple(_flags())
_BY_NAME = {name: flag for flag in FLAGS for name in (flag.name, flag.alias) if name}

_NO, _PORT_KEPT = ("false", "0"), "the supervisor holds the port, so that no restart of a front refuses a connection"
_COMPLETED = "configurations are always completed from the model"
#: Flags that name something tensord does not have: harmless with a value that asks for nothing, refused otherwise.
#: name -> (harmless values; None: any, because it only shapes what is not there, reason)
_ABSENT: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "allow-cpu-metrics": (_NO, "the metrics are of the daemon only; of the host, Prometheus' node exporter has them"),
    "metrics-config": (
        ("counter_latencies=true", "summary_latencies=false", "histogram_latencies=false", "histogram_latencies=true"),
        "durations are counters and histograms; there are no summaries",
    ),
    "metrics-interval-ms": (None, "every scrape reads the figures of its moment; GPUs are looked at every two seconds"),
    # A client will notice by its connection that these ports and addresses are not served.
    "grpc-infer-allocation-pool-size": (None, "messages are read into memory that is not kept"),
    "grpc-infer-thread-count": (None, "the front needs one thread"),
    "grpc-max-response-pool-size": (None, "a stream that is not read stops its client"),
    "grpc-http2-max-pings-without-data": (None, "the front sends no pings beyond keepalive"),
    "http-thread-count": (None, "the front needs one thread"),
    "pinned-memory-pool-byte-size": (None, "arenas.byte_size sizes our memory"),
    "disable-auto-complete-config": (_NO, _COMPLETED),
    "strict-model-config": (_NO, _COMPLETED),
    "reuse-http-port": (_NO, _PORT_KEPT),
    "reuse-grpc-port": (_NO, _PORT_KEPT),
    "enable-peer-access": (None, "workers ask for it where a region lies on another GPU"),
}
_REFUSED = {
    "backend-directory": "back ends are part of tensord: jax and python",
    "backend-config": "back ends take no settings of their own; see [workers] and [executables] in the configuration",
    "cuda-memory-pool-byte-size": "XLA manages device memory: --gpu-memory-fraction is its part",
    "model-load-thread-count": "workers decide how many models they load at a time",
    "allow-sagemaker": "the SageMaker endpoint is not offered",
    "allow-vertex-ai": "the Vertex AI endpoint is not offered",
    "buffer-manager-thread-count": "tensors are not copied between buffers by threads of their own",
}


class FlagCommand(click.Command):
    """A click command that accepts all flags of the daemon besides its own parameters."""

    def __init__(self, *arguments: Any, **words: Any) -> None:
        super().__init__(*arguments, **words)
        self.context_settings = {**self.context_settings, "allow_extra_args": True}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *_options()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the command-line words ``args`` into click's context ``ctx``.

        When a shell completes a command line, returns the words that click cannot parse. Otherwise returns an empty list.
        Raises ConfigurationError if a flag is refused or if there are too many arguments. Raises click.UsageError if an option
        that is no flag of the daemon, or an argument, is invalid or missing.
        """
        if ctx.resilient_parsing:  # a shell completes them
            return super().parse_args(ctx, args)
        own = dict.fromkeys(ctx.help_option_names, False)
        for parameter in self.params:
            if isinstance(parameter, click.Option):
                own |= dict.fromkeys(parameter.opts, not parameter.is_flag)
        extra = super().parse_args(ctx, canonical(args, own))
        if extra:
            raise ConfigurationError(f"unexpected argument '{extra[0]}'; flags begin with --")
        return extra

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = [(each, each.get_help_record(ctx)) for each in self.get_params(ctx)]
        with formatter.section("Options"):
            formatter.write_dl([row for each, row in records if row and not isinstance(each, FlagOption)])
        with formatter.section("Flags, each for one key (Triton's names where the meaning is the same)"):
            formatter.write_dl([row for each, row in records if row and isinstance(each, FlagOption)])


class FlagOption(click.Option):
    """The click option of one command-line flag of the daemon. It keeps the flag's value as the user's text."""

    def __init__(self, flag: Flag) -> None:
        names = [f"--{name}" for name in (flag.name, flag.alias) if name]
        super().__init__(
            [*names, "flag_" + flag.name.replace("-", "_")],
            type=_KeyType(flag),
            multiple=flag.is_list,
            expose_value=False,
            callback=_collect,
            metavar=flag.metavar,
            help=flag.help,
        )
        self.flag = flag

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        flag = self.flag
        words = "|".join(layers.choices(flag.key))
        shown = f"--{flag.name}[={words}]" if flag.is_switch else f"--{flag.name}={flag.metavar}"
        default = layers.defaults()[flag.key]
        if flag.metavar == "MS":
            return shown, f"{flag.help} [{flag.key}: milliseconds; default {round(default * 1000)}]"
        kind = "" if flag.is_switch else f" {layers.worded(flag.key)};"
        return shown, f"{flag.help} [{flag.key}:{kind} default {layers.shown(default)}]"


class _KeyType(_TextType):
    """The click type of a flag's value. In a shell it completes the names of files, or the values that the flag may have."""

    name = "value"

    def __init__(self, flag: Flag) -> None:
        self._flag = flag

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if self._flag.metavar in ("DIR", "FILE"):
            return [CompletionItem(incomplete, type=self._flag.metavar.lower())]
        return [CompletionItem(value) for value in layers.choices(self._flag.key) if value.startswith(incomplete)]


@functools.cache
def _options() -> Sequence[FlagOption]:
    return [FlagOption(flag) for flag in FLAGS]


#: The place in a context's ``meta`` of what its flags set.
_SETTINGS = f"{__name__}.settings"


def _collect(ctx: click.Context, option: click.Parameter, value: Any) -> None:
    if value is None or value == () or ctx.resilient_parsing:
        return
    assert isinstance(option, FlagOption)
    flag = option.flag
    given = _seconds(flag.name, value) if flag.metavar == "MS" else value
    if flag.key == "trace.level":
        given = tuple(level for level in value if level != "OFF")  # which alone takes back what the file says
    found: list[Setting] = ctx.meta.setdefault(_SETTINGS, [])
    found.append(Setting(flag.key, given, f"--{flag.name}", textual=not flag.is_list))


def settings(ctx: click.Context) -> list[Setting]:
    """Returns the configuration keys that the flags of a command line set, with their values, in the order of the flags."""
    return list(ctx.meta.get(_SETTINGS, ()))


def canonical(arguments: Sequence[str], own: Mapping[str, bool]) -> list[str]:
    """Returns the command-line words ``arguments`` with each flag of the daemon written as one word, ``--name=value``.

    ``--trace-config`` and ``--cache-config`` are replaced by the flags that they stand for. Flags of Triton that change nothing
    in tensord are left out. Options in ``own`` and their values are unchanged.
    ``own``: each option that is no flag of the daemon, such as "--help" -> whether the option takes a value.
    Raises ConfigurationError if a flag is unknown or refused, or lacks its value.
    """
    found: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        option, equals, _ = word.partition("=")
        if option in own or not word.startswith("-"):
            found.append(word)
            if own.get(option) and not equals and waiting:
                found.append(waiting.pop(0))
            continue
        name, value = _split(word)
        flag = _BY_NAME.get(name)
        is_switch = flag.is_switch if flag is not None else name.startswith(("allow-", "disable-", "strict-", "reuse-"))
        if (
            value is None
            and waiting
            and not waiting[0].startswith("--")
            and not (is_switch and not _is_bool(waiting[0]))
        ):
            value = waiting.pop(0)
        if name in _STANDING_FOR:
            if (stands_for := _STANDING_FOR[name](value or "")) is not None:
                waiting.insert(0, stands_for)
        elif flag is None:
            _refuse_or_ignore(name, value)
        elif value is None and not flag.is_switch:
            raise ConfigurationError(f"--{name}: needs a value")
        else:
            found.append(f"--{name}={'true' if value is None else value}")
    return found


#: The flag for each setting of --trace-config.
_TRACE_FLAGS = {
    "level": "trace-level",
    "rate": "trace-rate",
    "count": "trace-count",
    "file": "trace-file",
    "log-frequency": "trace-log-frequency",
}


def _of_trace_config(value: str) -> str | None:
    """Returns the flag that means the same as ``--trace-config=value``, such as "--trace-rate=1" for "rate=1".

    Returns None for the value "mode=triton", which changes nothing in tensord.
    Raises ConfigurationError if the value names an unknown setting, or another mode than triton.
    """
    mode, comma, setting = value.partition(",")
    name, equals, given = (setting if comma else mode).partition("=")
    if (comma and mode != "triton") or (name, given) == ("mode", "opentelemetry"):
        raise ConfigurationError(
            f"--trace-config={value}: set trace.otlp in the file, or by {layers.variable('trace.otlp')}"
        )
    if (name, given) == ("mode", "triton"):
        return None
    if not equals or name not in _TRACE_FLAGS:
        raise ConfigurationError(
            f"--trace-config={value}: expected [triton,]SETTING=VALUE, with {', '.join(_TRACE_FLAGS)}"
        )
    return f"--{_TRACE_FLAGS[name]}={given}"


def _of_cache_config(value: str) -> str:
    cache, _, setting = value.partition(",")
    name, _, size = setting.partition("=")
    if cache != "local":
        raise ConfigurationError(f"--cache-config={value}: the one response cache is local,size=BYTES")
    if name != "size" or not (size.isascii() and size.isdigit()):
        raise ConfigurationError(f"--cache-config={value}: expected local,size=BYTES")
    return f"--response-cache-byte-size={size}"


#: Flags that stand for others.
_STANDING_FOR = {"trace-config": _of_trace_config, "cache-config": _of_cache_config}


def _split(argument: str) -> tuple[str, str | None]:
    if not argument.startswith("--") or argument == "--":
        raise ConfigurationError(f"unexpected argument '{argument}'; flags begin with --")
    name, equals, value = argument[2:].partition("=")
    # Triton's own parser takes both spellings.
    return name.replace("_", "-"), value if equals else None


def _seconds(name: str, value: str) -> str:
    if not (value.isascii() and value.isdigit()):
        raise ConfigurationError(f"--{name}={value}: a number of milliseconds is expected")
    return str(int(value) / 1000)


def _is_bool(value: str) -> bool:
    return value.lower() in ("true", "false", "0", "1")


def _refuse_or_ignore(name: str, value: str | None) -> None:
    if name in _REFUSED:
        raise ConfigurationError(f"--{name}: {_REFUSED[name]}")
    if name in _ABSENT:
        harmless, reason = _ABSENT[name]
        if harmless is not None and (value or "true").lower() not in harmless:
            raise ConfigurationError(f"--{name}={value or 'true'}: {reason}")
        return
    for key in layers.known_keys():
        if name == re.sub("[._]", "-", key):
            raise ConfigurationError(f"--{name}: {key} has no flag; set it in the file, or by {layers.variable(key)}")
    close = difflib.get_close_matches(name, [*_BY_NAME, *_ABSENT, *_REFUSED], n=1)
    raise ConfigurationError(f"--{name}: unknown flag" + (f"; did you mean --{close[0]}?" if close else ""))
