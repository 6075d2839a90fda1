"""``tensorctl``: the operator's questions to a running daemon, over its control socket.

The socket is ``--socket``, else ``TENSORCTL_SOCKET``, else systemd's /run/tensord/control.sock. Exit status: 0 done, 1 the daemon
refused, 2 it cannot be reached.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

_REGION_COLUMNS = (
    *("name", "kind", "key", "offset", "byte_size", "access", "state"),
    *("owner", "pid", "address", "registered", "workers", "leases"),
)
_DEFAULT_SOCKET = Path("/run/tensord/control.sock")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--socket",
    "path",
    type=click.Path(path_type=Path),
    envvar="TENSORCTL_SOCKET",
    default=_DEFAULT_SOCKET,
    show_default=True,
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@click.pass_context
def main(ctx: click.Context, path: Path, as_json: bool) -> None:
    """Ask a running tensord, or tell it."""
    ctx.obj = _Printer(path, as_json)


class _Printer:
    """Asks and prints, as a table or as JSON."""

    def __init__(self, path: Path, as_json: bool) -> None:
        self._path = path
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
        click.echo(f"{result['server_name']}: {result['phase']}, {result['http'] or 'no http'}")
        _print_table(
            ("name", "pid", "ready", "device", "state", "uptime_s", "deaths"), [*result["fronts"], *result["workers"]]
        )
        for name, reason in result["refused"].items():
            click.echo(f"not served: {name}: {reason}")

    def _ask(self, question: dict[str, str]) -> Any:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.connect(str(self._path))
                sock.sendall(json.dumps(question).encode() + b"\n")
                with sock.makefile("rb") as lines:
                    answer = lines.readline()
        except OSError as error:
            _fail(f"no tensord answers at '{self._path}': {error.strerror}", 2)
        if not answer.endswith(b"\n"):
            _fail("the daemon stopped before it answered", 2)
        fields = json.loads(answer)
        if "error" in fields:
            _fail(fields["error"].strip(), 1)
        return fields["result"]


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
    """Every model and version with its state."""
    printer.run(("name", "version", "state", "reason"), command="models")


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
    if isinstance(value, list):
        value = ",".join(map(str, value))
    # One line a row, whatever a reason holds.
    return " ".join(str(value).split())


def _fail(message: str, status: int) -> NoReturn:
    click.echo(f"tensorctl: {message}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main(prog_name="tensorctl")
