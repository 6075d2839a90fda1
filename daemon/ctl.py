"""``tensorctl`` asks a running daemon, over its control socket, for the operator.

The socket is ``--socket``, else ``TENSORCTL_SOCKET``, else that of the one daemon that answers where they have theirs by default
(``tensord.daemon.operator.control_client``). Exit status: 0 done, 1 the daemon refused, 2 it cannot be reached.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from click.shell_completion import CompletionItem

from tensord.daemon import tables
from tensord.daemon.operator import control_client
from tensord.daemon.operator.control_client import Refused, Unreachable

_PROCESS_COLUMNS = (
    *("name", "pid", "ready", "connections", "lanes", "device", "isolated", "memory_fraction", "cores", "threads"),
    *("memory_mib", "state", "outputs", "uptime_s", "deaths", "oldest_execution", "oldest_load"),
)
_REGION_COLUMNS = (
    *("name", "kind", "key", "offset", "byte_size", "access", "state"),
    *("owner", "pid", "address", "registered", "workers", "leases"),
)
_MODEL_COLUMNS = ("name", "version", "state", "parameters", "programs", "program_bytes", "largest_batch", "reason")
_CONFIG_COLUMNS = ("key", "value", "source", "next", "waits")
_CONNECTION_COLUMNS = ("front", "owner", "pid", "requests", "idle_s", "request_bytes", "answer_bytes", "lanes")
_ERROR_COLUMNS = ("time", "front", "code", "model", "id", "client", "trace_id", "error")
_SEQUENCE_COLUMNS = ("worker", "model", "version", "id", "slot", "begun", "running", "waiting", "idle_s")
_PARAMETER_COLUMNS = (
    *("model", "version", "set", "number", "number_before", "byte_size", "kept", "pushed_at", "pushed_by"),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
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
    """Ask a running tensord, or tell it."""
    ctx.obj = _Daemon(path, as_json)


class _Daemon:
    """The daemon that is asked; prints its answers as tables or as JSON."""

    def __init__(self, path: Path | None, as_json: bool) -> None:
        """Takes the path of its control socket; None: it is looked for."""
        self._path = path
        self.as_json = as_json

    def ask(self, command: str, **words: Any) -> Any:
        """Returns the answer to a question. Ends the program where there is none."""
        try:
            return control_client.ask(self._path, os.environ, {"command": command, **words})
        except Refused as error:
            _fail(str(error), 1)
        except Unreachable as error:
            _fail(str(error), 2)

    def do(self, command: str, **words: Any) -> None:
        """Has something done; prints what there is to say of it."""
        if (result := self.ask(command, **words)) is not None:
            _print_json(result)

    def show(self, watch: float | None, print_: Callable[[Any], None], command: str, **words: Any) -> None:
        """Shows an answer, with ``watch`` again after so many seconds, until it is interrupted."""
        while True:
            result = self.ask(command, **words)
            if watch is not None:
                click.clear()
            if self.as_json:
                _print_json(result)
            else:
                print_(result)
            if watch is None:
                return
            time.sleep(watch)


F = TypeVar("F", bound=Callable[..., Any])


def _watched(command: F) -> F:
    """Gives a command that shows something ``--watch``."""
    option = click.option(
        "--watch",
        type=click.FloatRange(min=0.1),
        is_flag=False,
        flag_value=2.0,
        metavar="[SECONDS]",
        help="Show it again and again, every two seconds or so many, until Ctrl-C.",
    )
    return option(command)


def _names(command: str, read: Callable[[Any], Sequence[str]]) -> Callable[..., list[CompletionItem]]:
    """Makes what completes a name by asking the daemon."""

    def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        parent = ctx.find_root().params
        try:
            answer = control_client.ask(parent.get("path"), os.environ, {"command": command})
        except (Refused, Unreachable):
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
def status(daemon: _Daemon, watch: float | None) -> None:
    """The processes: which are up, on what device, how often they died."""
    daemon.show(watch, _print_status, "status")


def _print_status(result: Mapping[str, Any]) -> None:
    urls = [" and ".join(result[protocol]) or f"no {protocol}" for protocol in ("http", "grpc")]
    urls.append(result["metrics"] or "no metrics")
    click.echo(f"{result['server_name']}: {result['phase']}, {_readiness(result)}, {', '.join(urls)}")
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
    """Whether the daemon is ready, as its exit status: 0 it is, 1 it is not, 2 it cannot be reached."""
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
    """The configuration in force: keys that differ from their default, where each value came from, what waits for a restart.

    Files, variables and flags are read again for it: `next` is what they say now, and `waits` what puts it into force.
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
    """Read configuration and repositories again, and wait for what that loads; fails with the reason where it is refused."""
    daemon.do("reload", wait=not no_wait)


@main.command()
@click.option(
    "--wait", is_flag=True, help="Return when nothing is in flight; fails where something is after the time of a stop."
)
@click.pass_obj
def drain(daemon: _Daemon, wait: bool) -> None:
    """Take this daemon out of service: not ready at once, after supervisor.drain_time no new requests, then none in flight.

    Its processes stay. `undrain` takes requests again.
    """
    daemon.do("drain", wait=wait)


@main.command()
@click.pass_obj
def undrain(daemon: _Daemon) -> None:
    """Take requests again, and be ready as far as the models are."""
    daemon.do("undrain")


@main.command()
@click.argument("worker", shell_complete=_worker_name)
@click.pass_obj
def restart(daemon: _Daemon, worker: str) -> None:
    """Replace WORKER (such as worker-0) by a new process, and wait until that has its models.

    What it was asked is answered first; requests for models that no other worker has wait. Sequences on it are lost.
    """
    daemon.do("restart", name=worker)


@main.command()
@click.argument("worker", shell_complete=_worker_name)
@click.argument("seconds", type=click.FloatRange(min=0, min_open=True, max=60))
@click.argument("folder", type=click.Path(file_okay=False, resolve_path=True), required=False)
@click.pass_obj
def profile(daemon: _Daemon, worker: str, seconds: float, folder: str | None) -> None:
    """Record what WORKER does for SECONDS, for XProf or Perfetto; requests are answered meanwhile.

    Written by the daemon's user into FOLDER, or one of the daemon's own, whose name is printed.
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
def log(daemon: _Daemon, /, **given: Any) -> None:
    """Show what is logged, or change it until the next reload."""
    settings = {name: value for name, value in given.items() if value is not None}
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
    """Show which requests are traced, of MODEL or of all models, or change it."""
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
    """What the repositories hold and what is loaded."""


@models.command("list")
@_watched
@click.pass_obj
def models_list(daemon: _Daemon, watch: float | None) -> None:
    """Every model and version with its state, and what it takes on a device: bytes, and the number of its programs."""
    daemon.show(watch, lambda rows: tables.show(_MODEL_COLUMNS, rows), "models")


@models.command("show")
@click.argument("name", shell_complete=_model_name)
@click.pass_obj
def models_show(daemon: _Daemon, name: str) -> None:
    """A model's versions: where each is, what it takes, its inputs and outputs; with --json its whole configuration."""
    daemon.show(None, _print_model, "model", name=name)


def _print_model(versions: Sequence[Mapping[str, Any]]) -> None:
    for version in versions:
        click.echo(f"{version['name']} version {version['version']}: {version['state']}")
        for label in ("reason", "folder", "workers", "parameters", "programs", "program_bytes", "largest_batch"):
            if version.get(label) not in (None, "", []):
                click.echo(f"    {label}: {tables.shown(version[label])}")
        metadata = version["metadata"] or {}
        for kind in ("inputs", "outputs"):
            for tensor in metadata.get(kind, ()):
                click.echo(f"    {kind.removesuffix('s')} {tensor['name']}: {tensor['datatype']}{tensor['shape']}")


@models.command("load")
@click.argument("name", shell_complete=_model_name)
@click.pass_obj
def models_load(daemon: _Daemon, name: str) -> None:
    """Load or reload a model and wait for it (explicit mode)."""
    daemon.do("load", name=name)


@models.command("unload")
@click.argument("name", shell_complete=_model_name)
@click.pass_obj
def models_unload(daemon: _Daemon, name: str) -> None:
    """Begin to unload a model (explicit mode)."""
    daemon.do("unload", name=name)


@models.command("statistics")
@click.argument("name", default="", shell_complete=_model_name)
@_watched
@click.pass_obj
def models_statistics(daemon: _Daemon, name: str, watch: float | None) -> None:
    """Request counts and mean durations; with --json as the HTTP statistics answer has them."""
    daemon.show(
        watch, lambda answer: tables.show(tables.STATISTICS, tables.statistics(answer)), "statistics", name=name
    )


# ----------------------------------------------------------------------------------------------------------------- clients


@main.group()
def regions() -> None:
    """Shared memory that clients registered."""


@regions.command("list")
@_watched
@click.pass_obj
def regions_list(daemon: _Daemon, watch: float | None) -> None:
    """Every registered region: whose, since when, used how, mapped where, and how many tensors of requests are in it."""
    daemon.show(watch, lambda rows: tables.show(_REGION_COLUMNS, rows), "regions")


@regions.command("unregister")
@click.argument("name", shell_complete=_region_name)
@click.pass_obj
def regions_unregister(daemon: _Daemon, name: str) -> None:
    """Forget a region, of whatever kind, once no request uses it; "" is all of them."""
    daemon.do("unregister", name=name)


@main.command()
@_watched
@click.pass_obj
def connections(daemon: _Daemon, watch: float | None) -> None:
    """Clients, by the front that serves them: whose, requests and bytes they hold, lanes; 1,000 of each front."""
    daemon.show(watch, lambda rows: tables.show(_CONNECTION_COLUMNS, rows), "connections")


@main.command()
@_watched
@click.pass_obj
def errors(daemon: _Daemon, watch: float | None) -> None:
    """The last errors that clients got, the latest first: when, from which front, for which model, the sentence; 100 at most."""
    daemon.show(watch, lambda rows: tables.show(_ERROR_COLUMNS, rows), "errors")


@main.command()
@_watched
@click.pass_obj
def sequences(daemon: _Daemon, watch: float | None) -> None:
    """Sequences that live, by worker and model: their slots and what waits; 1,000 of each model version."""
    daemon.show(watch, lambda rows: tables.show(_SEQUENCE_COLUMNS, rows), "sequences")


# ---------------------------------------------------------------------------------------------------------- parameters


@main.group()
def parameters() -> None:
    """Parameter sets of models, and new ones into models that are served."""


_of_version = click.option("--version", default=0, help="The model's version.  [default: the newest]")
_of_set = click.option("--set", "name", default="main", show_default=True, help="The parameter set.")


@parameters.command("list")
@click.argument("model", default="", shell_complete=_model_name)
@_watched
@click.pass_obj
def parameters_list(daemon: _Daemon, model: str, watch: float | None) -> None:
    """Every parameter set: its number, its bytes, when it was pushed and by whom, and what is kept of it."""
    daemon.show(watch, lambda rows: tables.show(_PARAMETER_COLUMNS, rows), "parameters", name=model)


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
def parameters_push(daemon: _Daemon, /, model: str, file: str, version: int, name: str, **fields: Any) -> None:
    """Push the parameters in FILE, which lies beside the model: safetensors, npz, msgpack or an Orbax folder."""
    daemon.do("push", name=model, version=version, set=name, push={"file": file, **fields})


@parameters.command("drop")
@click.argument("model", shell_complete=_model_name)
@click.argument("name")
@_of_version
@click.pass_obj
def parameters_drop(daemon: _Daemon, model: str, name: str, version: int) -> None:
    """Drop the parameter set NAME, which is not main."""
    daemon.do("drop", name=model, version=version, set=name)


@parameters.command("roll-back")
@click.argument("model", shell_complete=_model_name)
@_of_version
@_of_set
@click.pass_obj
def parameters_roll_back(daemon: _Daemon, model: str, version: int, name: str) -> None:
    """Use the parameters again that a set had before its last ones."""
    daemon.do("revert", name=model, version=version, set=name)


# -------------------------------------------------------------------------------------------------------------- answers


def _print_json(result: Any) -> None:
    click.echo(json.dumps(result, indent=2))


def _fail(message: str, status: int) -> NoReturn:
    click.echo(f"tensorctl: {message}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main(prog_name="tensorctl")
