"""Shows how many models have been loaded, as one line at the bottom of a terminal, which later output overwrites.

[#########-----------]  3/7 models  compiling minilm 4/9, 2 from the cache
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

_WIDTH = 20


class ProgressBar:
    """Draws a progress bar on a terminal, and nothing elsewhere. ``stream`` None means stderr."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._drawn = ""
        self._on = self._stream.isatty()

    def draw(self, done: int, total: int, doing: str) -> None:
        """Draws the bar: ``done`` of ``total`` models are loaded. ``doing``: what is done now, such as ``compiling m 3/9``."""
        if not self._on or not total:
            return
        filled = _WIDTH * done // total
        line = f"[{'#' * filled}{'-' * (_WIDTH - filled)}]  {done}/{total} models  {doing}"
        # The cursor goes back to the line's beginning, so that a line of the log takes its place. One that wraps would stay.
        line = line[: self._columns() - 1]
        if line != self._drawn:
            self._drawn = line
            self._write(f"\r\x1b[K{line}\r")

    def clear(self) -> None:
        """Removes the bar from the terminal."""
        if self._drawn:
            self._drawn = ""
            self._write("\r\x1b[K")

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            # The terminal is gone.
            self._on = False
