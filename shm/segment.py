"""A segment is a sealed memfd. One process creates it and allocates tensors in it; other processes map it and read them.

A memfd has no name that a client could guess or register, and the kernel frees it with its last descriptor, however processes
end. It is sealed before another process gets the descriptor:

    F_SEAL_SHRINK, F_SEAL_GROW   nobody can truncate it, so a reader gets no SIGBUS
    F_SEAL_FUTURE_WRITE          only the creator's mapping, which exists before the seal, can write
    F_SEAL_SEAL                  nobody can change the seals

If the reader has a GPU, F_SEAL_FUTURE_WRITE is left out, because CUDA page-locks only memory that the process may write to.
Such a reader maps the segment writable, but makes only read-only views of it.

All pages are allocated when the segment is created. If the host has too little memory, creating the segment fails, and no later
access does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable

from tensord.shm import descriptors
from tensord.shm.common.mapping import mapped, shared
from tensord.shm.errors import InvalidArgument, Unavailable

F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h, since 5.1; the fcntl module has no name for it
_READER_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Segment:
    """A memfd that is mapped in this process. If another process created the memfd, ``view`` is read-only."""

    #: The view of the whole mapping.
    view: memoryview
    #: Called once before the mapping ends, by whoever did more with it than read and write.
    before_close: Callable[[], None] | None = None

    def __init__(self, fd: int, byte_size: int, view: memoryview) -> None:
        #: The descriptor is owned by this object; peers get it from ``share``.
        self.fd = fd
        self.byte_size = byte_size
        self._shared = False
        self.view = view

    @classmethod
    @descriptors.needed("another arena segment")
    def create(cls, byte_size: int) -> Segment:
        """Creates and maps a segment. Raises Unavailable if the host has no memory left or no more files may be opened."""
        try:
            fd, view = shared("tensord", byte_size, _READER_SEALS)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise Unavailable(f"the host has no {byte_size} bytes of memory for another arena segment") from error
            raise
        return cls(fd, byte_size, view)

    def share(self, writable: bool) -> int:
        """Returns the segment's file descriptor, which the caller sends to another process. The first call seals the segment.

        ``writable``: whether other processes may write to the segment. Only the first call's value counts.
        """
        if not self._shared:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | (0 if writable else F_SEAL_FUTURE_WRITE))
            self._shared = True
        return self.fd

    @classmethod
    def attach(cls, fd: int, byte_size: int, writable: bool = False) -> Segment:
        """Maps a segment that another process has created, and returns it. Takes ownership of ``fd``, also if it raises.

        ``writable``: whether pages are mapped writable, as page-locking for a GPU needs. The ``view`` is read-only in any case.

        Raises: InvalidArgument: the segment is not sealed against resizing, does not have ``byte_size`` bytes, or may not be
          mapped writable.  Unavailable: the segment cannot be mapped now.
        """
        try:
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError:
                seals = 0
            if seals & _READER_SEALS != _READER_SEALS:
                raise InvalidArgument("segment is not sealed against resizing")
            actual = os.fstat(fd).st_size
            if byte_size <= 0 or actual != byte_size:
                raise InvalidArgument(f"segment has {actual} bytes, {byte_size} were announced")
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            try:
                view = mapped(fd, byte_size, prot)
            except PermissionError as error:
                raise InvalidArgument("segment is sealed against mapping it writable") from error
        except OSError as error:  # as many mappings, or as much address space, as a process may have
            os.close(fd)
            raise Unavailable(f"an arena segment of {byte_size} bytes cannot be mapped: {error.strerror}") from error
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, byte_size, view.toreadonly())

    def close(self) -> None:
        """Closes the descriptor, and unmaps the memory once no view of it is in use. Idempotent."""
        if self.fd < 0:
            return
        if self.before_close is not None:
            self.before_close()
            self.before_close = None
        os.close(self.fd)
        self.fd = -1
        with contextlib.suppress(BufferError):
            self.view.release()

    def __repr__(self) -> str:
        return f"<Segment {self.byte_size} bytes{' closed' if self.fd < 0 else ''}>"


class Page:
    """A shared array of 64-bit words, which one worker writes and other processes read. Base class of the worker's pages."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._words = segment.view.cast("Q")

    @property
    def fd(self) -> int:
        return self._segment.fd

    def close(self) -> None:
        self._words.release()
        self._segment.close()
