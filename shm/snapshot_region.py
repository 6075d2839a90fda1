"""A client's region that is never mapped: it is read and written with system calls, so its owner cannot truncate mapped memory.

    read    preadv into memory of ours; a short count is an error
    write   pwritev, after a look at the object's size: writing beyond its end would make it grow

Bytes that were read are a copy, which the owner cannot change any more. A read is not atomic: if the owner writes meanwhile,
the copy is a mixture of the bytes before and after.
"""

from __future__ import annotations

import os

from tensord.shm.errors import InvalidArgument
from tensord.shm.regions import Leased, check_object_range, check_range


class SnapshotRegion(Leased):
    """A registered range of a client's shared-memory object, read and written through its descriptor and never mapped.

    Used for the access "snapshot"; ``tensord.shm.regions.Region`` is for the others.
    """

    #: Always 0: no memory is mapped that could go missing, and every call finds out for itself.
    faults = 0

    def __init__(self, name: str, key: str, fd: int, offset: int, byte_size: int) -> None:
        """Takes the descriptor over; if it raises, it closes the descriptor. ``key``: the name of the shared-memory object.

        Raises InvalidArgument: the range is empty, or not inside the object.
        """
        try:
            found = check_object_range(name, fd, offset, byte_size)
        except BaseException:
            os.close(fd)
            raise
        self.name = name
        self.key = key
        self.fd = fd
        #: Identifies the object, as in ``tensord.shm.regions.Region``.
        self.file = (found.st_dev, found.st_ino)
        self.offset = offset
        self.byte_size = byte_size

    def check(self, offset: int, byte_size: int) -> None:
        """Raises InvalidArgument if a range, counted from the region's start, is not wholly inside the region."""
        check_range(offset, byte_size, self.byte_size, self.name)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills ``buffer`` (contiguous bytes) from ``offset`` on, counted from the region's start.

        Raises InvalidArgument: the range is outside the region, or the object was truncated.
        """
        size = buffer.nbytes
        self.check(offset, size)
        at = self.offset + offset
        done = 0
        while done < size:
            # One call takes at most 2 GiB.
            count = os.preadv(self.fd, [buffer[done:]], at + done)
            if count == 0:
                raise self._short("read", done, size)
            done += count

    def read(self, offset: int, byte_size: int) -> bytes:
        """Returns a copy of a range, counted from the region's start.

        Raises InvalidArgument: the range is outside the region, or the object was truncated.
        """
        self.check(offset, byte_size)
        made = bytearray(byte_size)
        self.read_into(offset, memoryview(made))
        return bytes(made)

    def write(self, offset: int, content: memoryview | bytes) -> None:
        """Writes contiguous bytes at ``offset`` from the region's start.

        Raises InvalidArgument: the range is outside the region, the object was truncated, or the host has no memory left for it.
        """
        content = memoryview(content)
        size = content.nbytes
        self.check(offset, size)
        at = self.offset + offset
        done = 0
        while done < size:
            left = os.fstat(self.fd).st_size - at - done
            if left <= 0:
                raise self._short("written", done, size)
            try:
                count = os.pwritev(self.fd, [content[done : done + left]], at + done)
            except OSError:
                count = 0  # no space left
            if count == 0:
                raise self._short("written", done, size)
            done += count

    def _short(self, verb: str, done: int, size: int) -> InvalidArgument:
        return InvalidArgument(
            f"shared memory region '{self.name}': {done} of {size} bytes could be {verb}: its object was truncated, or the host "
            "has no memory left for it"
        )

    def close(self) -> None:
        """Closes the object's descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __repr__(self) -> str:
        return f"<SnapshotRegion {self.name!r} {self.offset}+{self.byte_size} leases={self.leases}>"
