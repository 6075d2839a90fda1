"""Formats the tables that tensord and tensorctl print: reports with a line for each row, and the list of commands in --help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click

#: Characters of a command's first sentence; click's own bound cuts most of ours.
_MAX_SENTENCE = 240


def show(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table: a line with the names of the columns, and a line for each row. A missing value is left blank."""
    cells = [[shown(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in [list(columns), *cells]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def shown(value: Any) -> str:
    """Returns a value as the text of a table's cell, on one line.

    A mapping must have the keys "model", "version" and "seconds". The text of a mapping is, for example, "digits 2, 3.0 s".
    """
    if value is None:
        return ""
    if isinstance(value, Mapping):
        # What a worker is at, and for how long.
        value = f"{value['model']} {value['version']}, {value['seconds']:.1f} s"
    if isinstance(value, list):
        value = ",".join(map(str, value))
    return " ".join(str(value).split())


def scaled(byte_size: float) -> str:
    """Returns a number of bytes as text with a unit, such as "1.5 MiB" or "1003 B"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if byte_size < 1024 or unit == "TiB":
            break
        byte_size /= 1024
    return f"{byte_size:.3g} {unit}" if byte_size < 999.5 else f"{byte_size:.0f} {unit}"  # .3g would write 1e+03


def plot(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], drawn: str) -> None:
    """Prints ``rows`` as a table, with bars for the numbers in the column ``drawn``."""
    most = max(row[drawn] for row in rows) or 1
    show((*columns, ""), [{**row, "": "#" * round(24 * row[drawn] / most)} for row in rows])


def parameters(sets: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns copies of the descriptions of parameter sets, with the time of each set's last push in ISO 8601 format."""
    return [
        {**row, "pushed_at": datetime.fromtimestamp(row["pushed_at"], UTC).isoformat(timespec="seconds")}
        if row.get("pushed_at")
        else dict(row)
        for row in sets
    ]


def statistics(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each version in an answer of the HTTP statistics endpoint: its counts, and mean durations in us."""
    rows = []
    for entry in answer["model_stats"]:
        of = entry["inference_stats"]
        rows.append(
            {
                "name": entry["name"],
                "version": entry["version"],
                "requests": _count(of, "success"),
                "failed": _count(of, "fail"),
                "inferences": entry["inference_count"],
                "executions": entry["execution_count"],
                "request_us": _mean(of, "success"),
                "queue_us": _mean(of, "queue"),
                "input_us": _mean(of, "compute_input"),
                "infer_us": _mean(of, "compute_infer"),
                "output_us": _mean(of, "compute_output"),
                "cache_hits": _count(of, "cache_hit"),
            }
        )
    return rows


#: The columns of ``statistics``.
STATISTICS = (
    *("name", "version", "requests", "failed", "inferences", "executions"),
    *("request_us", "queue_us", "input_us", "infer_us", "output_us", "cache_hits"),
)


def _count(durations: Mapping[str, Any], what: str) -> int:
    return int(durations.get(what, {}).get("count", 0))


def _mean(durations: Mapping[str, Any], what: str) -> str:
    count = _count(durations, what)
    return f"{durations[what]['ns'] / count / 1000:.0f}" if count else ""


class CommandGroup(click.Group):
    """A group of click commands, whose help lists each command with the whole first sentence of its help."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the section "Commands" of the group's help to ``formatter``."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, command.get_short_help_str(_MAX_SENTENCE)) for name, command in found if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
