"""Tells other processes when a client's connection ends, by a file descriptor that becomes readable then.

    the front with the connection    the writing half of a pipe, closed with the connection, or by the kernel with the process
    the supervisor                   the reading half (``tensord.daemon.regions.region_record``)

The connection's own socket is not passed on: it would stay open as long as another process watches it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tensord.shm.errors import Unavailable


class ConnectionEnd:
    """Shows the end of one client connection, also to other processes, by a file descriptor that is created when first needed."""

    __slots__ = ("_closed", "_reader", "_writer")

    def __init__(self) -> None:
        self._reader = self._writer = -1
        self._closed = False

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """Yields a file descriptor, valid in the ``with`` block, that becomes readable when the connection ends.

        Raises: Unavailable: no file descriptors are left.
        """
        try:
            if self._reader < 0:
                self._reader, self._writer = os.pipe2(os.O_CLOEXEC)
            reader = os.dup(self._reader)
        except OSError as error:
            raise Unavailable(f"the connection cannot be watched now: {os.strerror(error.errno or 0)}") from error
        if self._closed:
            self._release()
        try:
            yield reader
        finally:
            os.close(reader)

    def close(self) -> None:
        """Signals that the connection has ended. Idempotent."""
        self._closed = True
        self._release()

    def _release(self) -> None:
        if self._reader >= 0:
            os.close(self._reader)
            os.close(self._writer)
            self._reader = self._writer = -1

    def __repr__(self) -> str:
        return f"<ConnectionEnd {'past' if self._closed else 'to come'}>"
