"""Standard error of daemons and gateways that tests start: a file, of which a test has read all that was written by then."""

from __future__ import annotations

import os
import tempfile
from typing import IO


class WrittenLog:
    """A file without a name, to which several processes append. A pipe would need a thread, which a busy machine delays."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._before = b""

    def fileno(self) -> int:
        """Returns the descriptor of the file, which is made if there is none."""
        if self._file is None:
            self._file = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115
        return self._file.fileno()

    def close(self) -> None:
        """Closes the file, and keeps what was written."""
        if self._file is not None:
            self._before = self._content()
            self._file.close()
            self._file = None

    @property
    def text(self) -> str:
        """Returns all that was written, also before ``close``."""
        return self._content().decode(errors="replace")

    def _content(self) -> bytes:
        if self._file is None:
            return self._before
        fd = self._file.fileno()
        return self._before + os.pread(fd, os.fstat(fd).st_size, 0)
