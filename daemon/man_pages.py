"""Manual pages of the commands, made by click-man of the commands themselves."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import click
from click_man import core

from tensord import __version__


def write(commands: Mapping[str, click.Command], folder: Path) -> list[Path]:
    """Writes a page for each command and those below it into a folder, which is made; returns the files. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.1")}
    for name, command in commands.items():
        described = _described(command, click.Context(command, info_name=name))
        core.write_man_pages(name, described, version=__version__, target_dir=str(folder))
    return sorted(path for path in folder.glob("*.1") if before.get(path) != path.stat().st_mtime_ns)


def _described(command: click.Command, ctx: click.Context) -> click.Command:
    """Returns a copy of a command as click-man reads it: with all of its parameters, and a first sentence that is not cut."""
    described = copy.copy(command)
    described.params = command.get_params(ctx)
    described.short_help = " ".join((command.help or "").strip().partition("\n\n")[0].split()).removesuffix(".")
    if isinstance(command, click.Group):
        assert isinstance(described, click.Group)
        described.commands = {
            name: _described(each, click.Context(each, ctx, info_name=name)) for name, each in command.commands.items()
        }
    return described
