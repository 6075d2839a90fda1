"""The program ``tensorctl``: the operator's commands to a running daemon, sent over the daemon's control socket.

The option ``--socket`` names the socket, else the environment variable ``TENSORCTL_SOCKET``. Without a name, tensorctl searches
default folders. Exit status: 0: done; 1: the daemon answered with an error, or ``health`` found it not ready; 2: the command
line is wrong, or no daemon answered, or several did.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from tensord.daemon import tables
from tensord.daemon.control import runtime_directory
from tensord.daemon.control.runtime_directory import CONTROL_SOCKET

_PROCESS_COLUMNS = (
    *("name", "pid", "ready", "connections", "lanes", "device", "isolated", "memory_fraction", "cores", "threads"),
    *("memory_mib", "state", "outputs", "uptime_s", "deaths", "oldest_execution", "oldest_load"),
)
_REGION_COLUMNS = (
    *("name", "kind", "key", "offset", "byte_size", "access", "state"),
    *("owner", "pid", "address", "registered", "workers", "leases"),
)
_MODEL_COLUMNS = ("name", "version", "state", "parameters", "programs", "program_bytes", "largest_batch", "reason")
#: Columns of models that hold numbers of bytes, and are shown with units.
_SIZES = ("parameters", "program_bytes", "largest_batch")
_CONFIG_COLUMNS = ("key", "value", "source", "next", "waits")
_CONNECTION_COLUMNS = ("front", "owner", "pid", "requests", "idle_s", "request_bytes", "answer_bytes", "lanes")
_ERROR_COLUMNS = ("time", "front", "code", "model", "id", "client", "trace_id", "error")
_SEQUENCE_COLUMNS = ("worker", "model", "version", "id", "slot", "begun", "running", "waiting", "idle_s")
_PARAMETER_COLUMNS = (
    *("model", "version", "set", "number", "number_before", "byte_size", "kept", "pushed_at", "pushed_by"),
)
#: Said of a drain without time.
_NO_TIME = (
    "requests are refused at once: `--time 10` gives a balancer ten seconds to notice; a restart behind systemd's sockets needs "
    "no drain"
)


class _Command(click.Command):
    """A command of tensorctl, which accepts ``--json``."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self.params.append(
            click.Option(
                ["--json"], is_flag=True, expose_value=False, callback=_print_as_json, help="Print the answer as JSON."
            )
        )


def _print_as_json(ctx: click.Context, _: click.Parameter, given: bool) -> None:
    daemon = ctx.find_object(_Daemon)
    if given and daemon is not None:  # None: the shell completes a word
        daemon.as_json = True


class _Group(tables.CommandGroup):
    """A group of tensorctl's commands, which accept ``--json``."""

    command_class = _Command
    group_class = type


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--socket",
    "path",
    type=click.Path(path_type=Path),
    envvar="TENSORCTL_SOCKET",
    show_envvar=True,
    help="The daemon's control socket.  [default: that of the user's own daemon, else that of the service]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@click.version_option(package_name="tensord", prog_name="tensorctl", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context, path: Path | None, as_json: bool) -> None:
    """Query or control a running tensord daemon."""
    ctx.obj = _Daemon(path, as_json)


class _Daemon:
    """Sends commands to the daemon, and prints its answers as tables or as JSON."""

    def __init__(self, path: Path | None, as_json: bool) -> None:
        self._path = path
        self.as_json = as_json

    def ask(self, command: str, **words: Any) -> Any:
        """Sends a command with its arguments to the daemon and returns the answer. On an error, prints it and exits."""
        try:
            return _ask(self._path, {"command": command, **words})
        except (_Refused, _Unreachable) as error:
            if self.as_json:
                _print_json({"error": str(error)})
            else:
                click.echo(f"tensorctl: {error}", err=True)
            sys.exit(1 if isinstance(error, _Refused) else 2)

    def do(self, command: str, **words: Any) -> None:
        """Sends a command with its arguments, and prints the answer as JSON."""
        result = self.ask(command, **words)
        if result is not None or self.as_json:
            _print_json({} if result is None else result)

    def show(self, repeat_seconds: float | None, print_: Callable[[Any], None], command: str, **words: Any) -> None:
        while True:
            result = self.ask(command, **words)
            if repeat_seconds is not None:
                click.clear()
            if self.as_json:
                _print_json(result)
            else:
                print_(result)
            if repeat_seconds is None:
                return
            time.sleep(repeat_seconds)


class _Unreachable(Exception):
    """Raised if no daemon answers, or if several answer and the user has not chosen one."""


class _Refused(Exception):
    """Raised if the daemon answered a command with an error."""


def _ask(path: Path | None, question: Mapping[str, Any]) -> Any:
    """Sends a command to the control socket of a daemon, and returns the daemon's result.

    ``path``: the control socket. If it is None, the default paths are searched for the socket of a running daemon.
    Raises _Unreachable if no daemon answers. Raises _Refused if the daemon answers with an error.
    """
    sock = _connected(path) if path is not None else _found()
    try:
        with sock:
            where = sock.getpeername()
            sock.sendall(json.dumps(question).encode() + b"\n")
            with sock.makefile("rb") as lines:
                answer = lines.readline()
    except OSError:
        answer = b""
    if not answer.endswith(b"\n"):
        raise _Unreachable("the daemon stopped before it answered")
    try:
        fields = json.loads(answer)
        if "error" not in fields:
            return fields["result"]
        error = fields["error"].strip()
    except (ValueError, TypeError, LookupError, AttributeError):
        raise _Unreachable(f"what answers at '{where}' is not the control socket of a tensord") from None
    raise _Refused(error)


def _connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(path))
    except OSError as error:
        sock.close()
        raise _Unreachable(f"no tensord answers at '{path}': {error.strerror or error}") from None
    return sock


def _found() -> socket.socket:
    reasons: list[str] = []
    for folder in runtime_directory.searched(os.environ):
        answering: dict[Path, socket.socket] = {}
        for path in runtime_directory.sockets(folder, CONTROL_SOCKET):
            try:
                answering[path] = _connected(path)
            except _Unreachable as error:
                reasons.append(str(error).removeprefix("no tensord answers at "))
        if len(answering) == 1:
            return answering.popitem()[1]
        for sock in answering.values():
            sock.close()
        if answering:
            named = ", ".join(f"'{path}'" for path in answering)
            raise _Unreachable(
                f"{len(answering)} daemons of this user answer, at {named}: name one with --socket or TENSORCTL_SOCKET"
            )
    raise _Unreachable(f"no tensord answers at {'; '.join(reasons)}")


F = TypeVar("F", bound=Callable[..., Any])


def _watched(command: F) -> F:
    """Adds the option ``--watch`` to a command, whose function gets the interval, or None, as ``repeat_seconds``."""
    option = click.option(
        "--watch",
        "repeat_seconds",
        type=click.FloatRange(min=0.1),
        is_flag=False,
        flag_value=2.0,
        metavar="[SECONDS]",
        help="Show it again and again, every two seconds or so many, until Ctrl-C.",
    )
    return option(command)


def _names(command: str, read: Callable[[Any], Sequence[str]]) -> Callable[..., list[CompletionItem]]:
    """Returns a function for shell completion. It offers names that ``read`` finds in the daemon's answer to ``command``."""

    def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        parent = ctx.find_root().params
        try:
            answer = _ask(parent.get("path"), {"command": command})
        except (_Refused, _Unreachable):
            return []
        return [CompletionItem(name) for name in dict.fromkeys(read(answer)) if name.startswith(incomplete)]

    return complete


_model_name = _names("models", lambda rows: [row["name"] for row in rows])
_region_name = _names("regions", lambda rows: [row["name"] for row in rows])
_worker_name = _names("status", lambda status: [worker["name"] for worker in status["workers"]])


# -------------------------------------------------------------------------------------------------------------- the daemon


@main.command()
@_watched
@click.pass_obj
def status(daemon: _Daemon, repeat_seconds: float | None) -> None:
    """Show the daemon's processes: which are up, on which device, how often they died."""
    daemon.show(repeat_seconds, _print_status, "status")


def _print_status(result: Mapping[str, Any]) -> None:
    urls = [" and ".join(result[protocol]) or f"no {protocol}" for protocol in ("http", "grpc")]
    urls.append(result["metrics"] or "no metrics")
    click.echo(f"{result['server_name']}: {result['phase']}, {_readiness(result)}, {', '.join(urls)}")
    if result["outdated"]:
        click.echo(f"outdated: {result['outdated']}")
    clients = result["clients"]
    if clients["socket"]:
        counts = f"{clients['connections']} connected, {clients['lanes']} lanes"
        click.echo(f"clients: {counts}, on {clients['socket']}")
    for pushed in result["parameters"]["versions"]:
        of = f"{pushed['model']} {pushed['version']}"
        click.echo(f"parameters: {of}: main is number {pushed['number']}, {pushed['sets']} sets were pushed")
    processes = [*result["fronts"], *result["workers"]]
    tables.show(_PROCESS_COLUMNS, processes)
    # All of a kind are of one installation.
    for missing in {"; ".join(process["missing"]): None for process in processes if process["missing"]}:
        click.echo(f"off: {missing}")
    for model in result["not_served"]:
        served = f" (version {tables.shown(model['served'])} serves)" if model["served"] else ""
        click.echo(f"not served: {model['name']}: {tables.shown(model['reason'])}{served}")


def _readiness(result: Mapping[str, Any]) -> str:
    models = result["models"]
    return f"{'ready' if result['ready'] else 'not ready'}, {models['served']} of {models['wanted']} models served"


@main.command()
@click.pass_obj
def health(daemon: _Daemon) -> None:
    """Check whether the daemon is ready. Exit status: 0: ready; 1: not ready; 2: the daemon cannot be reached."""
    result = daemon.ask("status")
    is_ready = result["ready"] and result["phase"] == "serving"
    if daemon.as_json:
        _print_json({"ready": is_ready, "phase": result["phase"], **result["models"]})
    else:
        click.echo(f"{result['phase']}, {_readiness(result)}")
    sys.exit(0 if is_ready else 1)


@main.command()
@click.option("--all", "everything", is_flag=True, help="Keys with their default as well.")
@click.pass_obj
def config(daemon: _Daemon, everything: bool) -> None:
    """Show the configuration in force: keys that differ from their default, and where each value came from.

    With --all, keys that have their default are shown as well. The command reads files, variables and flags again: if
    they now give a key another value, the column `next` shows that value, and the column `waits` says whether a reload
    or a restart puts it in force.
    """

    def print_(result: Mapping[str, Any]) -> None:
        rows = [row for row in result["keys"] if everything or row["source"] != "default" or "waits" in row]
        for row in rows:
            row |= {field: json.dumps(row[field]) for field in ("value", "next") if field in row}
        tables.show(_CONFIG_COLUMNS, rows)
        if result["error"]:
            click.echo(f"a reload would be refused: {result['error']}")

    daemon.show(None, print_, "config")


@main.command()
@click.option("--no-wait", is_flag=True, help="Do not wait for the models that are loaded then.")
@click.pass_obj
def reload(daemon: _Daemon, no_wait: bool) -> None:
    """Read configuration and repositories again and, without --no-wait, wait until the changed models are loaded.

    The command fails if the new configuration is refused.
    """
    daemon.do("reload", wait=not no_wait)


@main.command()
@click.option(
    "--time",
    "seconds",
    type=click.FloatRange(min=0),
    help="Take requests for so many seconds, in which a balancer notices.  [default: supervisor.drain_time]",
)
@click.option(
    "--wait", is_flag=True, help="Return when nothing is in flight; fails where something is after the time of a stop."
)
@click.pass_obj
def drain(daemon: _Daemon, seconds: float | None, wait: bool) -> None:
    """Take this daemon out of service behind a load balancer: it is reported as not ready, and later refuses requests.

    It is not ready from now on. For the seconds given by --time, or supervisor.drain_time, it still takes new requests;
    then it refuses them. Accepted requests are answered, and the daemon's processes keep running. With --wait, the
    command returns when nothing is in flight. `undrain` ends this. Do not drain before a restart where there is no
    balancer: behind systemd's sockets `systemctl restart` alone loses no request, and a drain refuses some.
    """
    result = daemon.ask("drain", wait=False, **({} if seconds is None else {"seconds": seconds}))
    # A daemon that is older than this program says nothing.
    if seconds is None and result is not None and not result["seconds"]:
        click.echo(f"tensorctl: {_NO_TIME}", err=True)
    if wait:
        result = daemon.ask("drain", wait=True)
    if daemon.as_json:
        _print_json(result)


@main.command()
@click.pass_obj
def undrain(daemon: _Daemon) -> None:
    """Put a drained daemon back into service: it accepts requests again, and is ready if its models are."""
    daemon.do("undrain")


@main.command()
@click.argument("worker", shell_complete=_worker_name)
@click.pass_obj
def restart(daemon: _Daemon, worker: str) -> None:
    """Replace WORKER (such as worker-0) by a new process, and wait until the new process has loaded its models.

    The old process answers its requests first. If no other worker has a model, new requests for it wait for the new
    process. Sequences on the old process are lost.
    """
    daemon.do("restart", name=worker)


@main.command()
@click.argument("worker", shell_complete=_worker_name)
@click.argument("seconds", type=click.FloatRange(min=0, min_open=True, max=60))
@click.argument("folder", type=click.Path(file_okay=False, resolve_path=True), required=False)
@click.pass_obj
def profile(daemon: _Daemon, worker: str, seconds: float, folder: str | None) -> None:
    """Record what WORKER does for SECONDS, for XProf or Perfetto; requests are answered meanwhile.

    The daemon's user writes the profile into FOLDER, or into a folder that the daemon chooses. The folder's name is printed.
    """
    result = daemon.ask("profile", name=worker, seconds=seconds, folder=folder or "")
    if daemon.as_json:
        _print_json(result)
    else:
        click.echo(result["folder"])


@main.command()
@click.option("--info/--no-info", default=None, help="Log information.")
@click.option("--warning/--no-warning", default=None, help="Log warnings.")
@click.option("--error/--no-error", default=None, help="Log errors.")
@click.option("--verbose", type=click.IntRange(min=0), help="0: off; 1: debug messages; 2: of libraries as well.")
@click.option("--format", type=click.Choice(["default", "ISO8601", "json"]), help="The form of the lines.")
@click.pass_obj
def log(daemon: _Daemon, /, **options: Any) -> None:
    """Show the log settings, or change those that are given as options, until the next reload."""
    settings = {name: value for name, value in options.items() if value is not None}
    daemon.show(None, _print_settings, "log", settings=settings)


@main.command()
@click.argument("model", default="", shell_complete=_model_name)
@click.option("--level", type=click.Choice(["OFF", "TIMESTAMPS", "TENSORS"]), multiple=True, help="What is traced.")
@click.option("--rate", type=click.IntRange(min=1), help="Trace one request in so many.")
@click.option("--count", type=click.IntRange(min=-1), help="Traces until it stops; -1: no end.")
@click.option("--log-frequency", type=click.IntRange(min=0), help="So many traces into each file; 0: all into one.")
@click.option(
    "--inherit", is_flag=True, help="Forget the settings: a model has those of all models, these the configured ones."
)
@click.pass_obj
def trace(
    daemon: _Daemon,
    model: str,
    level: tuple[str, ...],
    rate: int | None,
    count: int | None,
    log_frequency: int | None,
    inherit: bool,
) -> None:
    """Show the trace settings of MODEL, or of all models. With options, change these settings."""
    numbers = {"trace_rate": rate, "trace_count": count, "log_frequency": log_frequency}
    settings: dict[str, list[str]] = {name: [str(value)] for name, value in numbers.items() if value is not None}
    if level:
        settings["trace_level"] = list(level)
    if inherit:
        settings = {name: [] for name in (*numbers, "trace_level")} | settings
    daemon.show(None, _print_settings, "trace", name=model, settings=settings)


def _print_settings(result: Mapping[str, Any]) -> None:
    tables.show(("setting", "value"), [{"setting": name, "value": value} for name, value in result.items()])


# ------------------------------------------------------------------------------------------------------------------ models


@main.group()
def models() -> None:
    """List the models in the repositories, and load or unload them."""


@models.command("list")
@_watched
@click.pass_obj
def models_list(daemon: _Daemon, repeat_seconds: float | None) -> None:
    """List every model version with its state, and how many bytes and programs it takes on a device."""
    daemon.show(repeat_seconds, lambda rows: tables.show(_MODEL_COLUMNS, [_with_units(row) for row in rows]), "models")


def _with_units(version: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of ``version``, a row about a model version, in which sizes in bytes are text such as "1.5 MiB"."""
    sizes = {name: tables.scaled(version[name]) for name in _SIZES if isinstance(version.get(name), int | float)}
    return {**version, **sizes}


@models.command("show")
@click.argument("name", shell_complete=_model_name)
@click.pass_obj
def models_show(daemon: _Daemon, name: str) -> None:
    """Show a model's versions: workers, programs, why requests ran slower Python code instead of C code, inputs and outputs.

    With --json everything that is known of the versions is printed.
    """
    daemon.show(None, _print_model, "model", name=name)


def _print_model(versions: Sequence[Mapping[str, Any]]) -> None:
    for version in map(_with_units, versions):
        click.echo(f"{version['name']} version {version['version']}: {version['state']}")
        for label in ("reason", "folder", "workers", "parameters", "programs", "program_bytes", "largest_batch"):
            if version.get(label) not in (None, "", []):
                click.echo(f"    {label}: {tables.shown(version[label])}")
        for worker, slow in version.get("not_in_c", {}).items():
            for why, requests in slow.items():
                click.echo(f"    not in C on {worker}: {why} (requests: {requests})")
        metadata = version["metadata"] or {}
        for kind in ("inputs", "outputs"):
            for tensor in metadata.get(kind, ()):
                click.echo(f"    {kind.removesuffix('s')} {tensor['name']}: {tensor['datatype']}{tensor['shape']}")


@models.command("load")
@click.argument("name", shell_complete=_model_name)
@click.pass_obj
def models_load(daemon: _Daemon, name: str) -> None:
    """Load or reload a model, and wait until it is loaded (only in the explicit mode of model control)."""
    daemon.do("load", name=name)


@models.command("unload")
@click.argument("name", shell_complete=_model_name)
@click.pass_obj
def models_unload(daemon: _Daemon, name: str) -> None:
    """Begin to unload a model (only in the explicit mode of model control)."""
    daemon.do("unload", name=name)


@models.command("statistics")
@click.argument("name", default="", shell_complete=_model_name)
@_watched
@click.pass_obj
def models_statistics(daemon: _Daemon, name: str, repeat_seconds: float | None) -> None:
    """Show each model version's request counts and mean durations; with --json the answer of the HTTP statistics endpoint."""
    daemon.show(
        repeat_seconds,
        lambda answer: tables.show(tables.STATISTICS, tables.statistics(answer)),
        "statistics",
        name=name,
    )


# ----------------------------------------------------------------------------------------------------------------- clients


@main.group()
def regions() -> None:
    """List and unregister the shared memory regions of clients."""


@regions.command("list")
@_watched
@click.pass_obj
def regions_list(daemon: _Daemon, repeat_seconds: float | None) -> None:
    """List every registered region: its owner, since when it is there, how it is accessed, which workers map it, its leases."""
    daemon.show(repeat_seconds, lambda rows: tables.show(_REGION_COLUMNS, rows), "regions")


@regions.command("unregister")
@click.argument("name", shell_complete=_region_name)
@click.pass_obj
def regions_unregister(daemon: _Daemon, name: str) -> None:
    """Unregister the region NAME, of whatever kind; "" unregisters all regions.

    Requests that use a region already can finish; no later request can use it.
    """
    daemon.do("unregister", name=name)


@main.command()
@_watched
@click.pass_obj
def connections(daemon: _Daemon, repeat_seconds: float | None) -> None:
    """List the connections of clients: front, owner, requests, how many bytes of arenas each connection holds, and lanes.

    At most 1,000 connections of each front are listed. Connections to the Unix socket for clients are all listed, with the
    front "clients".
    """
    daemon.show(repeat_seconds, lambda rows: tables.show(_CONNECTION_COLUMNS, rows), "connections")


@main.command()
@_watched
@click.pass_obj
def errors(daemon: _Daemon, repeat_seconds: float | None) -> None:
    """List the last errors that clients got, at most 100, newest first: when, why, and from which front or worker."""
    daemon.show(repeat_seconds, lambda rows: tables.show(_ERROR_COLUMNS, rows), "errors")


@main.command()
@_watched
@click.pass_obj
def sequences(daemon: _Daemon, repeat_seconds: float | None) -> None:
    """List live sequences by worker and model, with each one's index in the batch (slot) and its waiting requests.

    At most 1,000 sequences of each model version are listed.
    """
    daemon.show(repeat_seconds, lambda rows: tables.show(_SEQUENCE_COLUMNS, rows), "sequences")


# ---------------------------------------------------------------------------------------------------------- parameters


@main.group()
def parameters() -> None:
    """List the parameter sets of models, and push new parameters into models that are served."""


_of_version = click.option("--version", default=0, help="The model's version.  [default: the newest]")
_of_set = click.option("--set", "name", default="main", show_default=True, help="The parameter set.")


@parameters.command("list")
@click.argument("model", default="", shell_complete=_model_name)
@_watched
@click.pass_obj
def parameters_list(daemon: _Daemon, model: str, repeat_seconds: float | None) -> None:
    """List every parameter set: the number and size of its last push, when and by whom it was pushed, and where it is kept."""
    daemon.show(
        repeat_seconds, lambda rows: tables.show(_PARAMETER_COLUMNS, tables.parameters(rows)), "parameters", name=model
    )


@parameters.command("push")
@click.argument("model", shell_complete=_model_name)
@click.argument("file")
@_of_version
@_of_set
@click.option("--number", default=0, help="The number of these parameters.  [default: one more than the last]")
@click.option("--partial", is_flag=True, help="Leaves that are not in the file stay as they are.")
@click.option("--check-finite", is_flag=True, help="Refuse values that are not finite.")
@click.option("--move-sequences", is_flag=True, help="Sequences that have begun go on with the new ones.")
@click.pass_obj
def parameters_push(daemon: _Daemon, /, model: str, file: str, version: int, name: str, **options: Any) -> None:
    """Push parameters into MODEL from FILE in the model's folder: a safetensors, npz or msgpack file, or an Orbax folder."""
    daemon.do("push", name=model, version=version, set=name, push={"file": file, **options})


@parameters.command("drop")
@click.argument("model", shell_complete=_model_name)
@click.argument("name")
@_of_version
@click.pass_obj
def parameters_drop(daemon: _Daemon, model: str, name: str, version: int) -> None:
    """Drop the parameter set NAME of MODEL; the default set, main, cannot be dropped."""
    daemon.do("drop", name=model, version=version, set=name)


@parameters.command("roll-back")
@click.argument("model", shell_complete=_model_name)
@_of_version
@_of_set
@click.pass_obj
def parameters_roll_back(daemon: _Daemon, model: str, version: int, name: str) -> None:
    """Restore the parameters that a parameter set of MODEL had before the last push."""
    daemon.do("revert", name=model, version=version, set=name)


# -------------------------------------------------------------------------------------------------------------- answers


def _print_json(result: Any) -> None:
    click.echo(json.dumps(result, indent=2))


if __name__ == "__main__":
    main(prog_name="tensorctl")
