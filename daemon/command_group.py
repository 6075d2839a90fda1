"""Defines the command groups of ``tensord`` and ``tensorctl``: their help shows the first sentence of each command in full."""

from __future__ import annotations

import click

#: Characters of a command's first sentence; click's own bound cuts most of ours.
_MAX_SENTENCE = 240


class CommandGroup(click.Group):
    """A group of commands whose help lists each with its first sentence, over several lines where one is too short."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the section "Commands" of the group's help."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, command.get_short_help_str(_MAX_SENTENCE)) for name, command in found if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
