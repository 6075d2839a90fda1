"""Merges the configuration from four layers into one frozen value: default.toml < file < environment < flags.

Every value is checked together with its source, so an error names the source (file, variable or flag), the key, what was
expected and what was given. An unknown key is always refused, with the nearest known key as a suggestion; nothing is ignored.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import json
import os
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tensord.config import accounts, control_groups, core_list, header_pattern, rate_limits, restrictions
from tensord.config.options import Options, Section
from tensord.shm.errors import InvalidArgument

PREFIX = "TENSORD_"
#: The variable that names the file to load; the command line itself reads it.
CONFIG_VARIABLE = "TENSORD_CONFIG"
#: The file with every key and its default, and comments for operators.
DEFAULTS = Path(__file__).with_name("default.toml")


class ConfigurationError(InvalidArgument):
    """Raised if the configuration is wrong. The message names the source, the key, the expected values and the given value."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The value that a file, an environment variable or a flag gives to a key of the configuration."""

    #: The key: "http.port", or "server_name" at the top.
    key: str
    value: Any
    #: Where the operator has to look: "tensord.toml", "TENSORD_HTTP_PORT" or "--http-port".
    source: str
    #: True if the value came as text (a variable, a flag): numbers are parsed, and a list is comma-separated.
    textual: bool = False


@functools.cache
def known_keys() -> Mapping[str, Any]:
    """Returns each configuration key, such as "http.port", with the type of its value."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(Options):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            found |= {f"{field.name}.{inner.name}": inner.type for inner in msgspec.structs.fields(field.type)}
        else:
            found[field.name] = field.type
    return found


@dataclass(frozen=True, slots=True)
class Configured:
    """The daemon's options, with the source of each value that the operator has set."""

    options: Options
    #: Key -> source of its value, as in ``Setting``; keys with their default are left out.
    sources: Mapping[str, str]


def read(
    file: Path | None = None, environment: Mapping[str, str] | None = None, flags: Iterable[Setting] = ()
) -> Configured:
    """Returns the daemon's options, and the source of each option that is set.

    A value in ``file`` replaces the default, an environment variable replaces both, and a flag replaces all three. Only
    variables that begin with ``TENSORD_`` are read from ``environment``. Raises ConfigurationError for the first mistake.
    """
    given = [*(read_file(file) if file is not None else ()), *read_environment(environment or {}), *flags]
    options = merge([*read_file(DEFAULTS), *given])
    return Configured(options, {setting.key: setting.source for setting in given})


@functools.cache
def defaults() -> Mapping[str, Any]:
    """Returns the default value of every key of the configuration."""
    return {setting.key: setting.value for setting in read_file(DEFAULTS)}


def described_type(key: str) -> msgspec.inspect.Type:
    """Returns msgspec's description of the type of a configuration key or, if the value is a list, of the list's items."""
    found = msgspec.inspect.type_info(known_keys()[key])
    while isinstance(found, msgspec.inspect.Metadata | _LIST):
        found = found.type if isinstance(found, msgspec.inspect.Metadata) else found.item_type
    return found


def choices(key: str) -> tuple[str, ...]:
    """Returns the words that are allowed as the value of the setting ``key``, or as an item if the value is a list.

    The result is empty if any text or number is allowed.
    """
    return tuple(_words(known_keys()[key]))


def _words(wanted: Any) -> Iterator[str]:
    if wanted is bool:
        yield from ("true", "false")
    elif typing.get_origin(wanted) is typing.Literal:
        yield from typing.get_args(wanted)
    else:
        for part in typing.get_args(wanted):
            yield from _words(part)


def worded(key: str) -> str:
    """Describes the allowed values of a key, such as "none, low, medium or high" or "auto or int from 1 to 64"."""
    wanted = described_type(key)
    parts = wanted.types if isinstance(wanted, msgspec.inspect.UnionType) else (wanted,)
    numbers = [
        _bounded(part) for part in parts if isinstance(part, msgspec.inspect.IntType | msgspec.inspect.FloatType)
    ]
    values = [*choices(key), *numbers] or ["text"]
    return f"{', '.join(values[:-1])} or {values[-1]}" if len(values) > 1 else values[0]


def _bounded(wanted: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> str:
    """Describes a number type and its limits in words, such as "int from 1 to 64"."""
    name = "int" if isinstance(wanted, msgspec.inspect.IntType) else "number"
    if wanted.gt is not None:
        name += f" above {wanted.gt:g}"
    elif wanted.ge is not None:
        name += f" from {wanted.ge:g}"
    return name + (f" to {wanted.le}" if wanted.le is not None and wanted.le < 1 << 20 else "")


def merge(settings: Iterable[Setting]) -> Options:
    """Makes options of settings. If two settings have the same key, the later one counts.

    Raises ConfigurationError if a key is unknown or a value is wrong.
    """
    keys = known_keys()
    merged: dict[str, Any] = {}
    for setting in settings:
        if setting.key not in keys:
            raise ConfigurationError(f"{setting.source}: unknown key {setting.key}{_nearest(setting.key, keys)}")
        section, _, name = setting.key.rpartition(".")
        target = merged.setdefault(section, {}) if section else merged
        value = _convert(setting, keys[setting.key])
        target[name] = _at_home(setting, value) if setting.key in _PATHS.split() else value
    options = msgspec.convert(merged, Options)
    _check(options)
    return _absolute(options)


def read_file(path: Path) -> list[Setting]:
    """Reads the settings in a TOML file. Raises ConfigurationError if the file is unreadable or has an unknown section."""
    try:
        content = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    return list(_flatten(content, str(path)))


def _flatten(content: dict[str, Any], source: str) -> Iterator[Setting]:
    sections = {key.partition(".")[0] for key in known_keys() if "." in key}
    for name, value in content.items():
        if name in sections and not isinstance(value, dict):
            raise ConfigurationError(f"{source}: {name}: expected a section [{name}], given {shown(value)}")
        if not isinstance(value, dict):
            yield Setting(name, value, source)
            continue
        if name not in sections:
            raise ConfigurationError(f"{source}: unknown section [{name}]{_nearest(name, sections)}")
        for key, inner in value.items():
            yield Setting(f"{name}.{key}", inner, source)


def written(configured: Configured) -> str:
    """Returns all options as TOML. A comment follows each option that is set, and names the option's source."""
    lines: list[str] = []
    section = ""
    for line in DEFAULTS.read_text().splitlines():
        name, equals, _ = line.partition(" = ")
        if line.startswith("["):
            section = line.strip("[]") + "."
        elif equals and (key := section + name) in configured.sources:
            # JSON's texts, numbers and lists are TOML's as well.
            value = json.dumps(value_of(configured.options, key), ensure_ascii=False)
            line = f"{name} = {value}  # from {configured.sources[key]}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def read_environment(environment: Mapping[str, str]) -> list[Setting]:
    """Reads the settings in environment variables that begin with ``TENSORD_``.

    Ignores TENSORD_CONFIG, and variables that Kubernetes or Docker has set for services named "tensord" or "tensord-...".
    Raises ConfigurationError if another variable that begins with ``TENSORD_`` stands for no configuration key.
    """
    variables = _variables()
    foreign = service_variables(environment)
    found = []
    for name, value in environment.items():
        if not name.startswith(PREFIX) or name == CONFIG_VARIABLE or name in foreign:
            continue
        if name not in variables:
            raise ConfigurationError(f"environment: unknown variable {name}{_nearest(name, variables)}")
        found.append(Setting(variables[name], value, name, textual=True))
    return found


def service_variables(environment: Mapping[str, str]) -> frozenset[str]:
    """Returns the names of variables that Kubernetes or Docker has set for services named "tensord" or "tensord-...".

    Sources: Kubernetes "Accessing the Service", environment variables; Docker "Legacy container links".
    """
    # For a service named tensord-http, Kubernetes sets TENSORD_HTTP_PORT=tcp://..., which is also the variable of a key.
    # The value tells them apart: no key that ends in PORT takes a URL.
    ours, keys = {name: value for name, value in environment.items() if name.startswith(PREFIX)}, _variables()
    # What is linked by Docker has a ..._NAME, which no key is mistaken for.
    aliases = {
        name for name, value in ours.items() if name.endswith("_NAME") and name not in keys and _ALIAS.fullmatch(value)
    }
    linked = tuple(name.removesuffix("NAME") + "ENV_" for name in aliases)
    return frozenset(
        name
        for name, value in ours.items()
        if name in aliases
        or name.startswith(linked)
        or (name.endswith("_PORT") and _URL.fullmatch(value))
        or _OF_A_SERVICE.fullmatch(name)
        or _OF_A_PORT.fullmatch(name)
    )


def _variables() -> dict[str, str]:
    return {variable(key): key for key in known_keys()}


def variable(key: str) -> str:
    """Returns the name of the environment variable that sets ``key``."""
    return PREFIX + key.replace(".", "_").upper()


#: Keys whose values have secrets in them.
_SECRET = ("http.restricted_api", "grpc.restricted_protocol")
#: Keys that may be "auto", with what gives their value then.
_PARTS_OF_THE_HOST: Mapping[str, Callable[[], int]] = {
    "arenas.max_byte_size": control_groups.arena_byte_size,
    "workers.pinned_byte_size": control_groups.pinned_byte_size,
}


def _convert(setting: Setting, wanted: Any) -> Any:
    value = setting.value
    if value == "auto" and (part := _PARTS_OF_THE_HOST.get(setting.key)):
        return part()
    try:
        if isinstance(value, str) and msgspec.inspect.type_info(wanted).__class__ is _LIST:
            # A list of one may stand without brackets in a file.
            value = [piece.strip() for piece in value.split(",") if piece.strip()] if setting.textual else [value]
        return msgspec.convert(value, wanted, strict=not setting.textual)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "")
        expected = f"expected {worded(setting.key)}" if choices(setting.key) else reason[:1].lower() + reason[1:]
        raise ConfigurationError(f"{setting.source}: {setting.key}: {expected}, given {shown(setting.value)}") from None


#: The class by which msgspec describes ``tuple[str, ...]``.
_LIST = msgspec.inspect.VarTupleType


#: Keys that name a file or a folder, or may do so after ``unix:``.
_PATHS = """
    repository.paths executables.cache_directory log.file trace.file http.address grpc.address http.certificate
    http.key http.root_certificate grpc.certificate grpc.key grpc.root_certificate clients.socket
    supervisor.control_socket
"""


def _at_home(setting: Setting, value: Any) -> Any:
    """Replaces a leading ``~`` in a path, or in each path of a list, by the home directory.

    Raises ConfigurationError if the home directory is not known.
    """
    if not isinstance(value, str):
        return tuple(_at_home(setting, each) for each in value)
    scheme = "unix:" if value.startswith("unix:") else ""
    path = value.removeprefix(scheme)
    with contextlib.suppress(ValueError):  # no name of a user
        path = os.path.expanduser(path)
    if path.startswith("~"):
        raise ConfigurationError(
            f"{setting.source}: {setting.key}: expected a path, given {shown(value)}, and no home directory is known for "
            f"{shown(path.partition('/')[0])}; a folder of that name is './~'"
        )
    return scheme + path


def _absolute(options: Options) -> Options:
    # A model's code may change the working directory.
    repository, executables = options.repository, options.executables
    cache = executables.cache_directory
    return msgspec.structs.replace(
        options,
        repository=msgspec.structs.replace(repository, paths=tuple(map(os.path.abspath, repository.paths))),
        executables=msgspec.structs.replace(executables, cache_directory=cache and os.path.abspath(cache)),
    )


#: The keys of ``regions`` that name users or groups of this host.
_ACCOUNTS = ("owners", "snapshot_owners", "guarded_owners", "groups")


def _check(options: Options) -> None:
    """Raises ConfigurationError if an option is malformed or contradicts another option."""
    arenas, expert = options.arenas, options.expert
    if arenas.max_byte_size < arenas.byte_size:
        raise ConfigurationError(
            f"arenas.max_byte_size: expected at least arenas.byte_size ({arenas.byte_size}), given {arenas.max_byte_size}"
        )
    if expert.max_restart_delay < expert.restart_delay:
        raise ConfigurationError(
            f"expert.max_restart_delay: expected at least expert.restart_delay ({expert.restart_delay}), "
            f"given {expert.max_restart_delay}"
        )
    if options.repository.load and options.repository.control_mode != "explicit":
        raise ConfigurationError('repository.load: needs repository.control_mode = "explicit"')
    if any(not path for path in options.repository.paths):
        raise ConfigurationError("repository.paths: expected folders, given an empty one")

    _check_addresses(options)
    buckets = options.metrics.buckets
    if any(after <= before for before, after in itertools.pairwise(buckets)):
        raise ConfigurationError(
            f"metrics.buckets: expected each larger than the one before, given {shown(list(buckets))}"
        )

    for entry in options.workers.cores:
        _explained("workers.cores", core_list.parse, entry)
    if options.workers.cores and not options.workers.pin:
        raise ConfigurationError("workers.cores: needs workers.pin = true")
    if options.workers.cores and len(options.workers.cores) != options.workers.cpu:
        raise ConfigurationError(
            f"workers.cores: expected one entry for each CPU worker (workers.cpu = {options.workers.cpu}), "
            f"given {len(options.workers.cores)}"
        )
    if options.workers.per_gpu > 1 and options.workers.devices_per_worker > 1:
        raise ConfigurationError(
            f"workers.per_gpu: a GPU has {options.workers.per_gpu} workers or a worker has several GPUs "
            f"(workers.devices_per_worker = {options.workers.devices_per_worker}), not both"
        )

    trace = options.trace
    if trace.otlp and not trace.otlp.startswith(("http://", "https://")):
        raise ConfigurationError(f"trace.otlp: expected http://... or https://..., given {shown(trace.otlp)}")
    if trace.level and not (trace.file or trace.otlp):
        raise ConfigurationError("trace.level: needs trace.file or trace.otlp")
    if trace.level and not trace.rate:
        raise ConfigurationError("trace.rate: expected at least 1 where trace.level is given, given 0")
    lists = {f"regions.{key}": getattr(options.regions, key) for key in _ACCOUNTS}
    for key, names in (*lists.items(), ("supervisor.parameter_owners", options.supervisor.parameter_owners)):
        kind, find = ("group", accounts.group_id) if key.endswith("groups") else ("user", accounts.user_id)
        for name in names:
            try:
                find(name)
            except KeyError:
                raise ConfigurationError(f"{key}: expected a {kind} of this host, given {shown(name)}") from None
    _explained("rate_limit.resources", rate_limits.parse, options.rate_limit.resources)
    _explained("http.restricted_api", restrictions.parse, options.http.restricted_api)
    _explained("grpc.restricted_protocol", restrictions.parse, options.grpc.restricted_protocol)
    for name, served in (("http", options.http), ("grpc", options.grpc)):
        if (served.use_tls or served.mutual_tls) and not (served.certificate and served.key):
            raise ConfigurationError(f"{name}.use_tls: needs {name}.certificate and {name}.key")
        if served.mutual_tls and not served.root_certificate:
            raise ConfigurationError(f"{name}.mutual_tls: needs {name}.root_certificate")
        if served.header_forward_pattern:
            _explained(f"{name}.header_forward_pattern", header_pattern.compiled, served.header_forward_pattern)


def _check_addresses(options: Options) -> None:
    """Raises ConfigurationError if an address is malformed, or is used by two servers."""
    http, grpc, metrics = options.http, options.grpc, options.metrics
    if metrics.address.startswith("unix:"):
        raise ConfigurationError(f"metrics.address: expected an address of TCP, given {shown(metrics.address)}")
    served = [
        ("http.port", http.enabled, http.address, http.port),
        ("grpc.port", grpc.enabled, grpc.address, grpc.port),
        ("metrics.port", metrics.enabled, (metrics.address,), metrics.port),
        ("metrics.agent_port", bool(metrics.agent_port), (metrics.address,), metrics.agent_port),
    ]
    taken: dict[tuple[str, int], str] = {}
    for key, enabled, addresses, port in served:
        section = key.partition(".")[0]
        for address in addresses if enabled else ():
            _explained(f"{section}.address", _address, address)
            place = (address, 0 if address.startswith("unix:") else port)
            other = taken.setdefault(place, key)
            if address.startswith("unix:") and other != key:
                raise ConfigurationError(f"{section}.address: {address} is also in {other.partition('.')[0]}.address")
            if port and other != key:
                raise ConfigurationError(f"{key}: {port} on {address} is also {other}")


def _address(address: str) -> None:
    """Raises ValueError if an address is empty or contains a port."""
    if not address or address == "unix:":
        raise ValueError(
            f"expected an address or unix:PATH, given {shown(address)}; every interface is '0.0.0.0' or '::'"
        )
    host, colon, port = address.rpartition(":")
    # An IPv6 address without brackets has colons, too.
    if colon and port.isdecimal() and (":" not in host or host.endswith("]")) and not address.startswith("unix:"):
        raise ValueError(f"expected an address without a port, which is a key of its own, given {shown(address)}")


def _explained(key: str, reader: Callable[[Any], Any], value: Any) -> None:
    """Calls ``reader(value)``. If this raises ValueError, raises ConfigurationError with ``key`` in its message."""
    try:
        reader(value)
    except ValueError as error:
        raise ConfigurationError(f"{key}: {error}") from None


def changed_keys(old: Options, new: Options) -> list[str]:
    """Returns the keys whose values differ between ``old`` and ``new``."""
    return [key for key in known_keys() if value_of(old, key) != value_of(new, key)]


def value_of(options: Options, key: str) -> Any:
    """Returns the value of a key, such as "http.port"."""
    value: Any = options
    for name in key.split("."):
        value = getattr(value, name)
    return value


def shown_value_of(options: Options, key: str) -> Any:
    """Returns the value of the option ``key``, with ``...`` in place of secret header values."""
    value = value_of(options, key)
    return restrictions.without_values(value) if key in _SECRET else value


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def shown(value: Any) -> str:
    """Returns the Python literal of a value, cut to 100 characters, for an error's message."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


#: The URL of a service's first port; a plain number there is the operator's mistake.
_URL = re.compile(r"(tcp|udp|sctp)://\S+", re.ASCII)
_OF_A_SERVICE = re.compile(r"[A-Z0-9_]+_SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)", re.ASCII)
_OF_A_PORT = re.compile(r"[A-Z0-9_]+_PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?", re.ASCII)
#: The form ``/container/alias``; the other container's own variables only come along with it.
_ALIAS = re.compile(r"/[^/\s]+/[^/\s]+")
_SHOWN = 3


def ignored_sentence(ignored: frozenset[str]) -> str:
    """Returns the log message about ignored environment variables. The message has at most three of their names."""
    shown = ", ".join(sorted(ignored)[:_SHOWN]) + (", ..." if len(ignored) > _SHOWN else "")
    return f"environment: not read as configuration, because the container platform set it for a service: {shown}"
