"""``tensorctl`` asks a running daemon, over its control socket, for the operator.

The socket is ``--socket``, else ``TENSORCTL_SOCKET``, else the first that answers where daemons have theirs by default
(``tensord.daemon.control.runtime_directory``). Exit status: 0 done, 1 the daemon refused, 2 it cannot be reached.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from tensord.daemon.control.runtime_directory import searched

_PROCESS_COLUMNS = (
    *(
        "name",
        "pid",
        "ready",
        "connections",
        "lanes",
        "device",
        "isolated",
        "memory_fraction",
        "cores",
        "threads",
        "memory_mib",
    ),
    *("state", "outputs", "uptime_s", "deaths", "oldest_execution", "oldest_load"),
)
_REGION_COLUMNS = (
    *("name", "kind", "key", "offset", "byte_size", "access", "state"),
    *("owner", "pid", "address", "registered", "workers", "leases"),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--socket",
    "path",
    type=click.Path(path_type=Path),
    envvar="TENSORCTL_SOCKET",
    help="The daemon's control socket.  [default: that of the user's own daemon, else that of the service]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@click.pass_context
def main(ctx: click.Context, path: Path | None, as_json: bool) -> None:
    """Ask a running tensord, or tell it."""
    paths = [folder / "control.sock" for folder in searched(os.environ)] if path is None else [path]
    ctx.obj = _Printer(paths, as_json)


class _Printer:
    """Asks the daemon and prints the answer, as a table or as JSON."""

    def __init__(self, paths: Sequence[Path], as_json: bool) -> None:
        """Takes the paths to try; the first one where a daemon listens is used."""
        self._paths = paths
        self._as_json = as_json

    def run(self, columns: Sequence[str], **question: str) -> None:
        result = self._ask(question)
        if self._as_json:
            click.echo(json.dumps(result, indent=2))
        elif isinstance(result, list):
            _print_table(columns, result)
        elif result is not None:
            click.echo(json.dumps(result, indent=2))

    def status(self) -> None:
        result = self._ask({"command": "status"})
        if self._as_json:
            click.echo(json.dumps(result, indent=2))
            return
        urls = [" and ".join(result[protocol]) or f"no {protocol}" for protocol in ("http", "grpc")]
        urls.append(result["metrics"] or "no metrics")
        models = result["models"]
        ready = f"{'ready' if result['ready'] else 'not ready'}, {models['served']} of {models['wanted']} models served"
        click.echo(f"{result['server_name']}: {result['phase']}, {ready}, {', '.join(urls)}")
        clients = result["clients"]
        if clients["socket"]:
            counts = f"{clients['connections']} connected, {clients['lanes']} lanes"
            click.echo(f"clients: {counts}, on {clients['socket']}")
        processes = [*result["fronts"], *result["workers"]]
        _print_table(_PROCESS_COLUMNS, processes)
        # All of a kind are of one installation.
        for missing in {"; ".join(process["missing"]): None for process in processes if process["missing"]}:
            click.echo(f"off: {missing}")
        for model in result["not_served"]:
            served = f" (version {_shown(model['served'])} serves)" if model["served"] else ""
            click.echo(f"not served: {model['name']}: {_shown(model['reason'])}{served}")

    def _ask(self, question: dict[str, str]) -> Any:
        sock = self._connected()
        try:
            with sock:
                sock.sendall(json.dumps(question).encode() + b"\n")
                with sock.makefile("rb") as lines:
                    answer = lines.readline()
        except OSError:
            answer = b""
        if not answer.endswith(b"\n"):
            _fail("the daemon stopped before it answered", 2)
        fields = json.loads(answer)
        if "error" in fields:
            _fail(fields["error"].strip(), 1)
        return fields["result"]

    def _connected(self) -> socket.socket:
        reasons: list[str] = []
        for path in self._paths:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(str(path))
                return sock
            except OSError as error:
                sock.close()
                reasons.append(f"'{path}': {error.strerror or error}")
        return _fail(f"no tensord answers at {'; '.join(reasons)}", 2)


@main.command()
@click.pass_obj
def status(printer: _Printer) -> None:
    """The processes: which are up, on what device, how often they died."""
    printer.status()


@main.group()
def models() -> None:
    """What the repositories hold and what is loaded."""


@models.command("list")
@click.pass_obj
def models_list(printer: _Printer) -> None:
    """Every model and version with its state, and what it takes on a device: bytes, and the number of its programs."""
    columns = ("name", "version", "state", "parameters", "programs", "program_bytes", "largest_batch", "reason")
    printer.run(columns, command="models")


@models.command("load")
@click.argument("name")
@click.pass_obj
def models_load(printer: _Printer, name: str) -> None:
    """Load or reload a model and wait for it (explicit mode)."""
    printer.run((), command="load", name=name)


@models.command("unload")
@click.argument("name")
@click.pass_obj
def models_unload(printer: _Printer, name: str) -> None:
    """Begin to unload a model (explicit mode)."""
    printer.run((), command="unload", name=name)


@models.command("statistics")
@click.argument("name", default="")
@click.pass_obj
def models_statistics(printer: _Printer, name: str) -> None:
    """Request counts and durations, as the HTTP statistics answer has them."""
    printer.run((), command="statistics", name=name)


@main.group()
def regions() -> None:
    """Shared memory that clients registered."""


@regions.command("list")
@click.pass_obj
def regions_list(printer: _Printer) -> None:
    """Every registered region: whose, since when, used how, mapped where, and how many tensors of requests are in it."""
    printer.run(_REGION_COLUMNS, command="regions")


@regions.command("unregister")
@click.argument("name")
@click.pass_obj
def regions_unregister(printer: _Printer, name: str) -> None:
    """Forget a region, of whatever kind, once no request uses it; "" is all of them."""
    printer.run((), command="unregister", name=name)


def _print_table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    cells = [[_shown(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in [list(columns), *cells]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        # What a worker is at, and for how long.
        value = f"{value['model']} {value['version']}, {value['seconds']:.1f} s"
    if isinstance(value, list):
        value = ",".join(map(str, value))
    # One line a row, whatever a reason holds.
    return " ".join(str(value).split())


def _fail(message: str, status: int) -> NoReturn:
    click.echo(f"tensorctl: {message}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main(prog_name="tensorctl")
