"""Tells other processes when a client's connection ends, by a descriptor that becomes readable then.

    whoever serves the connection    the writing half of a pipe, closed with the connection, or by the kernel with the process
    the supervisor                   the reading half (``tensord.daemon.regions.region_record``)

The connection itself is not handed on: it would stay open as long as somebody watches it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tensord.shm.errors import Unavailable


class ConnectionEnd:
    """Signals the end of one connection by a descriptor, which is opened only once somebody asks for it."""

    __slots__ = ("_closed", "_reader", "_writer")

    def __init__(self) -> None:
        self._reader = self._writer = -1
        self._closed = False

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """Yields a descriptor, for the block, that becomes readable when the connection ends.

        Raises: Unavailable: no descriptors are left.
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
        """Notes that the connection has ended. Idempotent."""
        self._closed = True
        self._release()

    def _release(self) -> None:
        if self._reader >= 0:
            os.close(self._reader)
            os.close(self._writer)
            self._reader = self._writer = -1

    def __repr__(self) -> str:
        return f"<ConnectionEnd {'past' if self._closed else 'to come'}>"
