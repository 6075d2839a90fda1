"""Writes traces to JSON files, in a thread that only does this, so that no request waits for a disk.

    FILE       [ trace , trace , ... ]     without the option ``log_frequency``: all processes append under a lock (flock)
    FILE.N     [ trace , trace , ... ]     with ``log_frequency``: each file has up to ``log_frequency`` traces, N = 0, 1, ...

Three numbers are limited: the traces that wait to be written, the bytes that one process writes, and the files FILE.N. Traces
beyond a limit are dropped. The first drop is logged. Errors of writing are logged at most once a minute for each file name.
Source: Triton docs/user_guide/trace.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import queue
import threading

from tensord.shm.seldom import Seldom

_log = logging.getLogger(__name__)
#: Pieces that may wait for the thread.
_MAX_WAITING = 1024
_CLOSE_SECONDS = 2.0
_MODE = 0o640


class TraceFiles:
    """Writes the trace files of one process."""

    def __init__(self, max_byte_size: int = 0, max_files: int = 0) -> None:
        self._left = max_byte_size
        self._max_files = max_files
        #: Path -> the first number of its series whose file may not exist yet.
        self._next_index: dict[str, int] = {}
        self._max_byte_size = max_byte_size
        self._waiting: queue.SimpleQueue[tuple[str, bytes, bool] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._complained = False
        self._seldom = Seldom()

    def write(self, path: str, traces: bytes, *, indexed: bool) -> None:
        """Queues traces, which a thread writes to a file.

        Drops the traces if too many are queued, or if the option ``trace.max_byte_size`` allows no more bytes of traces.

        Args:
          path: the path of the file, or the path without ``.N`` if ``indexed`` is True.
          traces: the JSON objects of one or more traces, separated by commas.
          indexed: True to write a new file ``path``.N, or False to append to the file ``path``.
        """
        if len(traces) > self._left:
            self._complain(
                f"this process writes no more than trace.max_byte_size ({self._max_byte_size}) bytes of traces"
            )
        elif self._waiting.qsize() >= _MAX_WAITING:
            self._complain(f"{_MAX_WAITING} traces wait to be written")
        else:
            self._left -= len(traces)
            self._waiting.put((path, traces, indexed))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
                self._thread.start()

    def _complain(self, reason: str) -> None:
        if not self._complained:
            self._complained = True
            _log.warning("traces are dropped: %s", reason)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            path, traces, indexed = item
            try:
                if indexed:
                    self._create(path, traces)
                else:
                    append(path, traces)
            except (OSError, ValueError) as error:
                if self._seldom.is_due(path):
                    reason = error.strerror if isinstance(error, OSError) else error
                    _log.error("traces cannot be written to %s: %s", path, reason)

    def _create(self, path: str, traces: bytes) -> None:
        """Writes traces to the first of ``path``.0, ``path``.1, ... that does not exist."""
        for index in range(self._next_index.get(path, 0), self._max_files):
            try:
                fd = os.open(f"{path}.{index}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
            except FileExistsError:
                self._next_index[path] = index + 1
                continue
            try:
                with open(fd, "wb") as file:
                    file.write(b"[" + traces + b"]")
            except OSError:
                os.unlink(f"{path}.{index}")
                raise
            self._next_index[path] = index + 1
            return
        self._complain(f"there are trace.max_files ({self._max_files}) files {path}.N; remove them and restart")

    def close(self) -> None:
        """Ends the thread once it has written all queued traces. Waits for this at most two seconds."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(_CLOSE_SECONDS)


def append(path: str, traces: bytes) -> None:
    """Appends traces to the JSON array in the file ``path``.

    Raises OSError if writing fails, or ValueError if the file does not end with an array.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        size = os.fstat(fd).st_size
        if size == 0:
            _put(fd, b"[" + traces + b"]", 0)
        elif os.pread(fd, 1, size - 1) == b"]":
            _put(fd, b",\n" + traces + b"]", size - 1)
        else:
            raise ValueError("it holds something else")
    finally:
        os.close(fd)


def _put(fd: int, content: bytes, offset: int) -> None:
    written = 0
    try:
        written = os.pwrite(fd, content, offset)
    finally:
        if written < len(content):
            with contextlib.suppress(OSError):
                os.ftruncate(fd, offset)
                os.pwrite(fd, b"]" if offset else b"", offset)
    if written < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def begin(path: str) -> None:
    """Creates the trace file ``path``, or truncates it to 0 bytes. Raises OSError if the file cannot be written."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _MODE))
