"""Regions in POSIX shared memory: a region is a range of a shared-memory object that belongs to a client.

    shared-memory object   | ...... | offset ......... offset + byte_size | ...... |
    the region                      | 0 ...................... byte_size |

``open_object`` opens only regular files directly in /dev/shm, and no named semaphores. It does not follow symbolic links. Once
a region is registered, the client may unlink the region's object or use the object's name again.

A region is used in one of three ways (docs/shared-memory.md says what each costs and promises):

    guarded    ``Region``: mapped; a missing page reads as zeros, and the request fails (``tensord.shm.guard``)
    sealed     ``Region``: mapped; a memfd that the client has sealed against resizing
    snapshot   ``SnapshotRegion``: not mapped; read and written with system calls
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import weakref

from tensord.shm import descriptors, guard
from tensord.shm.common import mapping
from tensord.shm.errors import Internal, InvalidArgument, ServingError, Unavailable

try:
    import posix_ipc
except ModuleNotFoundError:  # it has no wheel for this Python (setup.cfg)
    posix_ipc = None

_KEY = re.compile(r"/?[A-Za-z0-9_][A-Za-z0-9._-]{0,200}", re.ASCII)
#: The prefix of named semaphores, which lie in the same folder.
_REFUSED = "sem."
#: How much of a key a message shows; its owner knows the rest.
_SHOWN = 512
_DIRECTORY = "/dev/shm"
_POPULATE_LIMIT = 1 << 30
#: Offsets are at most int64, like everything on the wire.
_LIMIT = (1 << 63) - 1
#: The seals that a descriptor must have. F_SEAL_SEAL makes the set final: without it the owner could still add others.
_SEALS = {"F_SEAL_SHRINK": fcntl.F_SEAL_SHRINK, "F_SEAL_GROW": fcntl.F_SEAL_GROW, "F_SEAL_SEAL": fcntl.F_SEAL_SEAL}


def check_range(offset: int, byte_size: int, limit: int, region: str) -> None:
    """Raises InvalidArgument unless ``[offset, offset + byte_size)`` is inside a region of ``limit`` bytes.

    ``region`` is the region's name, for the error.
    """
    if 0 <= offset < limit and 0 <= byte_size <= limit - offset:
        return
    if offset < 0 or byte_size < 0 or offset > _LIMIT or byte_size > _LIMIT:
        raise InvalidArgument(f"Invalid offset {offset} or byte size {byte_size} for shared memory region: '{region}'")
    if offset >= limit:
        raise InvalidArgument(f"Invalid offset for shared memory region: '{region}'")
    raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{region}'")


def refused(name: str, why: object, error: type[ServingError] = InvalidArgument) -> ServingError:
    """Makes the error for a region ``name`` that cannot be registered. ``why`` is the reason."""
    return error(f"failed to register shared memory region '{name}': {why}")


def open_object(name: str, key: str) -> int:
    """Opens a client's shared-memory object to read and write. Returns its descriptor, which the caller must close.

    Args:
      name: the region's name, for errors.
      key: the object's name for ``shm_open``, with or without a leading slash. Errors quote the key, so they may go only to the
        client that gave it.
    Raises: InvalidArgument: clients may not register an object of this name or kind.  Internal: the object does not exist or
      cannot be opened (this is the code that Triton returns).  Unavailable: this process may open no more files.
    """
    bare = key.lstrip("/")
    if not bare or bare.startswith(_REFUSED):
        raise InvalidArgument(f"cannot register shared memory region '{name}' - invalid shm key '{key[:_SHOWN]}'")
    if not _KEY.fullmatch(key):
        raise Internal(f"Unable to open shared memory region: '{key[:_SHOWN]}'")
    try:
        with descriptors.needed(f"shared memory region '{name}'"):
            fd = _shm_open(bare)
    except (OSError, ValueError) as error:
        raise Internal(f"Unable to open shared memory region: '{key}'") from error
    try:
        os.set_inheritable(fd, False)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_dev != os.stat(_DIRECTORY).st_dev:
            raise InvalidArgument(f"shared memory region '{name}': '{key}' is not a shared-memory object")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _shm_open(bare: str) -> int:
    """Opens the shared-memory object named ``bare``, without a slash. Returns its file descriptor, or raises OSError."""
    # With O_RDWR, opening a FIFO does not block, and a directory is refused.
    if posix_ipc is None:
        # This is what shm_open of the C library does on Linux: the name is that of a file, and a symbolic link is refused.
        return os.open(f"{_DIRECTORY}/{bare}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fd: int = posix_ipc.SharedMemory("/" + bare).fd
    except posix_ipc.Error as error:  # a family of its own, beside OSError
        raise OSError(str(error)) from error
    except OSError as error:
        # posix_ipc says in words only that the process, or the system, has as many files open as it may.
        if error.errno is None and "files" in str(error):
            raise OSError(errno.EMFILE, str(error)) from error
        raise
    return fd


def check_sealed(name: str, fd: int) -> None:
    """Raises InvalidArgument unless region ``name`` has a memfd ``fd`` without huge pages, with seals SHRINK, GROW and SEAL."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        pages = os.fstatvfs(fd).f_bsize
    except OSError:
        raise refused(name, "the descriptor is not a memfd") from None
    missing = [label for label, seal in _SEALS.items() if not seals & seal]
    if missing:
        raise refused(name, f"the memfd lacks the seals {', '.join(missing)}")
    if pages != mmap.PAGESIZE:
        # Huge pages come from a pool that can be empty when a hole is touched.
        raise refused(name, f"pages of {pages} bytes, only {mmap.PAGESIZE} are accepted")


class Leased:
    """Base class of clients' regions. It counts the uses of a region, which may be closed when ``leases`` is 0."""

    #: The number of tensors of requests that are in the region now; each counts until its request has ended.
    leases = 0
    #: True if only one lane can name it: its name says nothing to anybody else.
    private = False
    #: True once its name was unregistered, and not only renewed.
    unregistered = False

    def lease(self) -> None:
        """Counts one more use of the region. The region stays open until ``unlease``."""
        self.leases += 1

    def unlease(self) -> None:
        """Ends one use of the region, which ``lease`` began. The region may be closed when no use is left."""
        self.leases -= 1


class _ObjectRegion(Leased):
    """Base class of regions that are a range of a POSIX shared-memory object or memfd."""

    def __init__(self, name: str, fd: int, offset: int, byte_size: int) -> None:
        found = os.fstat(fd)
        if byte_size <= 0 or offset < 0 or offset + byte_size > found.st_size:
            os.close(fd)
            raise refused(name, f"invalid args: {byte_size} bytes at offset {offset}, the object has {found.st_size}")
        self.name = name
        self.fd = fd
        #: Identifies the object, whatever names it has: two regions can be of the same memory.
        self.file = (found.st_dev, found.st_ino)
        self.offset = offset
        self.byte_size = byte_size

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self.offset}+{self.byte_size} leases={self.leases}>"


class Region(_ObjectRegion):
    """A client's registered range of a shared-memory object, mapped in this process."""

    def __init__(self, name: str, fd: int, offset: int, byte_size: int, populate: int = _POPULATE_LIMIT) -> None:
        """Maps ``byte_size`` bytes from ``offset`` of a shared-memory object, and takes ownership of the object's ``fd``.

        If all pages of the object exist and ``byte_size`` is at most ``populate``, the pages are mapped at once. Otherwise each
        page is mapped at its first use. If this method raises an error, it closes ``fd``.

        Raises: InvalidArgument: ``byte_size`` is not positive, ``offset`` is not a multiple of the page size, the bytes are not
          inside the object, or this process may not write to the object.  Unavailable: the kernel cannot map the bytes now,
          or ``tensord.shm.guard`` already protects as many mappings as it can.
        """
        guard.install()
        super().__init__(name, fd, offset, byte_size)
        try:
            self._whole = self._map(populate)
            self._guard = guard.Guarded(self._whole)
            # It is guarded as long as something refers to it, such as an array that a model keeps, and no longer: the handler
            # would put zeros over whatever is mapped at its address then. So this does not depend on who closes the region.
            weakref.finalize(self._whole.obj, self._guard.release).atexit = False
        except OverflowError as error:
            os.close(fd)
            raise refused(name, error, Unavailable) from None
        except BaseException:
            os.close(fd)
            raise

    def _map(self, populate: int) -> memoryview:
        offset, byte_size = self.offset, self.byte_size
        if offset % mmap.PAGESIZE:
            raise refused(self.name, f"offset {offset} is not a multiple of the page size {mmap.PAGESIZE}")
        try:
            view = mapping.mapped(self.fd, byte_size, offset=offset)
        except ValueError:  # its owner has cut the object down since we did
            needs = f"offset {offset} and byte_size {byte_size} need {offset + byte_size}"
            raise refused(self.name, f"its object has {os.fstat(self.fd).st_size} bytes now, {needs}") from None
        except OSError as error:
            # Sealed against writing; or there is no address space or descriptor left, which passes.
            kind = InvalidArgument if error.errno in (errno.EPERM, errno.EACCES) else Unavailable
            raise refused(self.name, f"it cannot be mapped: {os.strerror(error.errno or 0)}", kind) from None
        # Only existing pages are mapped: populating a sparse object would allocate memory nobody asked for.
        if self.backed and byte_size <= populate:
            mapping.populate(view)
        return view

    def view(self, offset: int, byte_size: int) -> memoryview:
        """Returns a range of the region as a writable view. Raises InvalidArgument if the range is outside."""
        check_range(offset, byte_size, self.byte_size, self.name)
        return self._whole[offset : offset + byte_size]

    @property
    def backed(self) -> bool:
        """Returns whether all pages of the shared-memory object exist. Reads and writes then allocate no memory."""
        found = os.fstat(self.fd)
        return found.st_blocks * 512 >= found.st_size

    @property
    def faults(self) -> int:
        """Returns 0 until this process reads or writes a missing page of the region, and more than 0 afterwards.

        A page is missing if a client has truncated the shared-memory object, or if the host has no memory for a new page. If
        the result is not 0, the region's bytes are not valid. If ``tensord.shm.guard.available`` is False, a read or write of a
        missing page kills the process.
        """
        return self._guard.faults

    def hold(self, held: bool) -> None:
        """Records whether a GPU's driver has page-locked the region. See ``guard.Guarded.hold``."""
        self._guard.hold(held)

    def write(self, offset: int, content: memoryview | bytes) -> None:
        """Writes ``content`` at ``offset``. Raises InvalidArgument if the range is outside the region."""
        byte_size = len(content)
        check_range(offset, byte_size, self.byte_size, self.name)
        self._whole[offset : offset + byte_size] = content

    def read(self, offset: int, byte_size: int) -> bytes:
        """Returns a copy of a range of the region. Raises InvalidArgument if the range is outside."""
        return bytes(self.view(offset, byte_size))

    def close(self) -> None:
        """Closes the region's descriptor. Unmaps the region once no memoryview of the region is in use. Idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._whole.release()


class SnapshotRegion(_ObjectRegion):
    """A client's registered range of a shared-memory object. System calls read and write the range, which is never mapped.

    If the client writes to the range during a read, the read may return a mixture of old and new bytes.
    """

    #: Always 0: no memory is mapped that could go missing, and every call finds out for itself.
    faults = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills ``buffer`` with the region's bytes from ``offset`` on.

        Raises InvalidArgument if these bytes are outside the region, or if the client has truncated the shared-memory object.
        """
        size = buffer.nbytes
        check_range(offset, size, self.byte_size, self.name)
        at = self.offset + offset
        done = 0
        while done < size:
            # One call takes at most 2 GiB.
            count = os.preadv(self.fd, [buffer[done:]], at + done)
            if count == 0:
                raise self._short("read", done, size)
            done += count

    def read(self, offset: int, byte_size: int) -> bytes:
        """Returns a copy of a range. Raises InvalidArgument if the range is outside the region or the object was truncated."""
        check_range(offset, byte_size, self.byte_size, self.name)
        made = bytearray(byte_size)
        self.read_into(offset, memoryview(made))
        return bytes(made)

    def write(self, offset: int, content: memoryview | bytes) -> None:
        """Writes ``content`` at byte ``offset`` of the region.

        Raises InvalidArgument if ``content`` goes beyond the region's end, if a client has truncated the region's memory, or if
        the host has no memory left.
        """
        content = memoryview(content)
        size = content.nbytes
        check_range(offset, size, self.byte_size, self.name)
        at = self.offset + offset
        done = 0
        while done < size:
            # Writing beyond the object's end would make it grow.
            left = os.fstat(self.fd).st_size - at - done
            count = 0
            with contextlib.suppress(OSError):  # no space left
                count = os.pwritev(self.fd, [content[done : done + left]], at + done) if left > 0 else 0
            if count == 0:
                raise self._short("written", done, size)
            done += count

    def _short(self, verb: str, done: int, size: int) -> InvalidArgument:
        return InvalidArgument(
            f"shared memory region '{self.name}': {done} of {size} bytes could be {verb}: its object was truncated, or the host "
            "has no memory left for it"
        )

    def close(self) -> None:
        """Closes the descriptor of the shared-memory object. May be called again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
