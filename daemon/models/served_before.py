"""Keeps the names of the models that a daemon has served in a file, for the daemon that follows it after a crash.

A start waits for all models that are wanted. After a crash that would be too many: a model that came later and was refused has
never been served, and would keep the host not ready for good. The file lies in the folder that the service manager keeps over a
restart; a daemon that stops in order removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Set
from pathlib import Path

_FILE = "served.json"


class ServedBefore:
    """Reads which models the daemon before this one had served when it crashed, and writes which ones this daemon has served."""

    def __init__(self, folder: Path | None) -> None:
        """Reads the file in ``folder``; None: no service manager keeps a folder, so nothing is read or written."""
        self._path = None if folder is None else folder / _FILE
        #: What the daemon before had served; empty: it did not crash, or had never been ready.
        self.names: frozenset[str] = frozenset()
        self._wanted: Set[str] = self.names
        #: Held while the file changes; nothing is written after ``forget``.
        self._lock = threading.Lock()
        self._forgotten = False
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError, TypeError):
                self.names = frozenset(map(str, json.loads(self._path.read_bytes())))

    def note(self, names: Set[str]) -> None:
        """Has the names of all models that have been served written, beside the event loop, if they have changed."""
        if self._path is not None and names != self._wanted:
            self._wanted = frozenset(names)
            asyncio.get_running_loop().run_in_executor(None, self._write, self._path)

    def _write(self, path: Path) -> None:
        with self._lock, contextlib.suppress(OSError):
            if not self._forgotten:
                new = path.with_suffix(".new")
                new.write_text(json.dumps(sorted(self._wanted)))
                os.replace(new, path)

    def forget(self) -> None:
        """Removes the file: the daemon stops in order."""
        with self._lock, contextlib.suppress(OSError):
            self._forgotten = True
            if self._path is not None:
                self._path.unlink()

    def __repr__(self) -> str:
        return f"<ServedBefore {len(self.names)} models>"
