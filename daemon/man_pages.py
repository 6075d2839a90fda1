"""Writes the manual pages of tensord and tensorctl, which click-man makes from the commands' help."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import click
from click_man import core

from tensord import __version__


def write(commands: Mapping[str, click.Command], folder: Path) -> list[Path]:
    """Writes a manual page for each command and each of its subcommands into a folder, which is made if it is missing.

    Returns the files that were written. Raises OSError: the folder or a file cannot be written.

    Args:
      commands: name -> command.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.1")}
    for name, command in commands.items():
        described = _described(command, click.Context(command, info_name=name))
        core.write_man_pages(name, described, version=__version__, target_dir=str(folder))
    return sorted(path for path in folder.glob("*.1") if before.get(path) != path.stat().st_mtime_ns)


def _described(command: click.Command, ctx: click.Context) -> click.Command:
    """Returns a copy of a command for click-man: with all of its parameters, and its first help sentence in full length."""
    described = copy.copy(command)
    described.params = command.get_params(ctx)
    described.short_help = " ".join((command.help or "").strip().partition("\n\n")[0].split()).removesuffix(".")
    if isinstance(command, click.Group):
        assert isinstance(described, click.Group)
        described.commands = {
            name: _described(each, click.Context(each, ctx, info_name=name)) for name, each in command.commands.items()
        }
    return described
