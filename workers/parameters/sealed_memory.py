"""Copies parameters into memory that no other process can change, and fills the same memory again once nobody uses it any more.

    MemoryPool.sealed ─▶ file descriptor ─▶ other processes
        ▲                                          │
        └── no process has it or a mapping of it ──┘

Memory of at least 1 MiB is used again, because to allocate new pages takes twice as long as to copy into existing pages. It has
F_SEAL_FUTURE_WRITE: only this process can write to it, by a mapping that this process made before it set the seal. Other
processes get a read-only descriptor with a shared lock (``flock``). The kernel keeps the shared lock until no process has a
duplicate or a mapping of this descriptor. So this process may fill the memory again when it can get an exclusive lock. Other
processes must not open the memory anew, and must not call flock on it.

Smaller memory is not used again. It has F_SEAL_WRITE: no process can write to it. If ``kernel_tells`` returns False, the same
holds for memory of any size.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tensord.shm import descriptors
from tensord.shm.arrays import Array, address_of
from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.shm.segment import F_SEAL_FUTURE_WRITE

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_POPULATE_WRITE = 23  # asm-generic/mman-common.h, since Linux 5.14
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
#: The seals of memory that nobody can change any more.
_FIXED = _SIZE_SEALS | fcntl.F_SEAL_WRITE
#: The seals of memory that its maker alone can change, when nobody else uses it any more.
_RETURNING = _SIZE_SEALS | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
#: Bytes that are copied in one piece into new pages. They are still in the processor's cache when the kernel copies them.
PIECE = 1 << 20
#: Bytes from which on memory is worth two descriptors and a mapping until it comes back.
LEAST_RETURNING = 1 << 20
#: Memories that one worker fills again. A model that is trained takes three: in use, kept for a roll-back, and the next.
MOST_RETURNING = 8
#: How long memory is kept after memory of its size was last filled; and, once or twice, what is free beside it.
KEPT_NS = 10 * 10**9

#: ``copy(at, target)``: fills a UINT8 array with the bytes of a source from offset ``at`` on.
Copy = Callable[[int, Array], None]


class Part(NamedTuple):
    """A source of ``byte_size`` bytes. ``copy(at, target)`` fills the array ``target`` with the bytes from offset ``at`` on."""

    byte_size: int
    copy: Copy


def part_of(content: bytes | memoryview | Array) -> Part:
    """Returns ``content``, which must be contiguous, as a source of bytes. ``Part.copy`` reads ``content`` when called."""
    source = np.frombuffer(content, np.uint8)
    return Part(len(source), lambda at, target: np.copyto(target, source[at : at + len(target)]))


def is_sealed(fd: int) -> bool:
    """Returns whether ``fd`` refers to sealed memory that no process can change any more."""
    return _seals(fd) & _FIXED == _FIXED


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # no memfd
        return 0


class SealedMemory:
    """Sealed memory, mapped for reading. It stays mapped while arrays in it exist."""

    def __init__(self, fd: int) -> None:
        """Maps sealed memory. The caller may close ``fd`` afterwards.

        Raises InvalidArgument: the memory is not sealed, or is empty. Raises Unavailable: mapping fails, or too many files are
        open.
        """
        if not is_sealed(fd) and _seals(fd) & _RETURNING != _RETURNING:
            raise InvalidArgument("the memory of parameters is not sealed against changes")
        descriptors.check_reserve(fd, "pushed parameters cannot be mapped")
        self.byte_size = os.fstat(fd).st_size
        if not self.byte_size:
            raise InvalidArgument("the memory of parameters is empty")
        try:
            mapping = mmap.mmap(fd, self.byte_size, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise Unavailable(f"{self.byte_size} bytes of parameters cannot be mapped: {error.strerror}") from error
        self.view = memoryview(mapping)

    def populate(self) -> None:
        """Maps all pages of the memory into this process, so that later reads cause no page faults."""
        # By numpy, which leaves Python to others meanwhile.
        # Pages that were never written are zeros.
        np.frombuffer(self.view, np.uint8)[:: mmap.PAGESIZE].max()

    def __repr__(self) -> str:
        return f"<SealedMemory {self.byte_size} bytes>"


class NewMemory:
    """Memory for the parameter values that a client pushes, filled and sealed by a ``MemoryPool``."""

    def __init__(self, parts: Sequence[Part], byte_size: int) -> None:
        self.byte_size = byte_size
        #: True if the memory was free already at the last call of ``MemoryPool.expire``.
        self.is_spare = False
        mapping: mmap.mmap | None = None
        with descriptors.needed("pushed parameters"):
            self.fd = os.memfd_create("tensord-parameters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            mapping = self._mapped()
            self._write(parts)
        except BaseException:
            os.close(self.fd)
            if mapping is not None:
                # Who holds the error holds this frame.
                mapping.close()
            raise
        self._mapping = mapping
        self.content: Array = np.frombuffer(mapping, np.uint8)
        self._is_populated = False

    def _mapped(self) -> mmap.mmap:
        try:
            os.truncate(self.fd, self.byte_size)
            return mmap.mmap(self.fd, self.byte_size)
        except OSError as error:
            raise self._lacking() from error

    def _write(self, parts: Sequence[Part]) -> None:
        """Writes the contents of ``parts``, in order, to the memfd ``self.fd``. Raises Unavailable: the host lacks memory."""
        # By system calls: these do not clear new pages first, and a lack of memory is an error, not a signal.
        piece, at = np.empty(min(PIECE, self.byte_size), np.uint8), 0
        for part in parts:
            for start in range(0, part.byte_size, PIECE):
                target = piece[: min(PIECE, part.byte_size - start)]
                part.copy(start, target)
                left = target.data
                while left:
                    try:
                        count = os.pwrite(self.fd, left, at)
                    except OSError as error:
                        raise self._lacking() from error
                    at, left = at + count, left[count:]

    def _lacking(self) -> Unavailable:
        return Unavailable(f"the host has no {self.byte_size} bytes of memory for parameters")

    def fill(self, parts: Sequence[Part]) -> None:
        """Copies the bytes of ``parts``, in order, into this memory. The caller ensures that no process reads this memory."""
        if not self._is_populated:
            # In pieces, because whoever maps memory meanwhile waits. Linux before 5.14 does not know it: each page is a fault.
            for start in range(0, self.byte_size, PIECE):
                piece = self.content[start : start + PIECE]
                _madvise(address_of(piece), len(piece), _MADV_POPULATE_WRITE)
            self._is_populated = True
        at = 0
        for part in parts:
            part.copy(0, self.content[at : at + part.byte_size])
            at += part.byte_size

    def lend(self) -> int:
        """Returns a new read-only descriptor of the memory, which the caller closes. Raises OSError: none can be made."""
        if _seals(self.fd) & _RETURNING != _RETURNING:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _RETURNING)
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # The lock stays as long as a duplicate or a mapping of ``fd`` exists.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd

    @property
    def is_free(self) -> bool:
        """True if no process uses the memory by a descriptor that ``lend`` returned."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return True

    def fix(self) -> int:
        """Seals the memory, so that nobody can change it any more. Returns its file descriptor, which the caller closes.

        The caller must have dropped all arrays that refer to the memory, except ``self.content``. Raises Unavailable if another
        process can write to the memory. The file descriptor is closed then.
        """
        del self.content
        try:
            self._mapping.close()
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _FIXED | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(self.fd)
            # A child of this process that a model forked meanwhile has the mapping, too.
            raise Unavailable(f"{self.byte_size} bytes of parameters cannot be sealed: {error.strerror}") from error
        return self.fd

    def free(self) -> None:
        """Closes the descriptor and drops the mapping. Other processes can go on using the memory."""
        os.close(self.fd)
        del self.content, self._mapping

    def __repr__(self) -> str:
        return f"<NewMemory {self.byte_size} bytes>"


class MemoryPool:
    """Allocates memory for parameter values. Reuses memory from earlier calls if no process uses that memory any more.

    Only one thread may use the pool.
    """

    def __init__(self) -> None:
        self._returns = kernel_tells()
        #: Memory that may be filled again, free or in use by others, in the order in which it was last filled.
        self._memories: list[NewMemory] = []
        #: Size -> when memory of this size was last filled, CLOCK_MONOTONIC.
        self._filled_ns: dict[int, int] = {}

    def sealed(self, parts: Iterable[Part], check: Callable[[Array], None] = lambda _: None) -> int:
        """Copies ``parts``, in order, into memory, and seals it. Returns a file descriptor of it, which the caller closes.

        ``check``: gets the copy, UINT8[bytes], before it is sealed, and must not keep it. Raises Unavailable: no memory is left,
        or no file can be opened. Errors of copying and of ``check`` are raised unchanged, and the memory can be filled again.
        """
        parts = [part for part in parts if part.byte_size]
        byte_size = sum([part.byte_size for part in parts])
        memory = next((each for each in reversed(self._memories) if each.byte_size == byte_size and each.is_free), None)
        is_new = memory is None
        if memory is None:
            memory = self._new(parts, byte_size)
        else:
            self._memories.remove(memory)
        try:
            if not is_new:
                memory.fill(parts)
            check(memory.content)
        except BaseException:
            self._give_back(memory)
            raise
        return self._seal(memory)

    def _new(self, parts: Sequence[Part], byte_size: int) -> NewMemory:
        """Returns new memory with copies of ``parts``."""
        try:
            return NewMemory(parts, byte_size)
        except Unavailable:
            # The host has too little: the unused memory of the pool is freed.
            free = [each for each in self._memories if each.is_free]
            if not free:
                raise
            self._forget(free)
        return NewMemory(parts, byte_size)

    def _forget(self, memories: Sequence[NewMemory]) -> None:
        """Drops memory from the pool. Memory in use is freed when its last user is done."""
        self._memories = [each for each in self._memories if each not in memories]
        for each in memories:
            each.free()

    def _seal(self, memory: NewMemory) -> int:
        if memory.byte_size < LEAST_RETURNING or not self._returns:
            return memory.fix()
        self._filled_ns[memory.byte_size] = time.monotonic_ns()
        self._give_back(memory)
        with descriptors.needed("pushed parameters"):
            return memory.lend()

    def _give_back(self, memory: NewMemory) -> None:
        """Keeps ``memory`` for reuse if memory of its size was filled in the last 10 seconds. Otherwise frees it."""
        if memory.byte_size not in self._filled_ns:
            memory.free()
            return
        memory.is_spare = False
        self._memories.append(memory)
        self._forget(self._memories[:-MOST_RETURNING])

    def expire(self, now_ns: int) -> bool:
        """Drops memory that was not used lately from the pool. Returns True if a later call may drop more.

        Dropped memory is freed when its last user is done. ``now_ns``: the time of CLOCK_MONOTONIC.
        """
        self._filled_ns = {size: at_ns for size, at_ns in self._filled_ns.items() if at_ns + KEPT_NS > now_ns}
        gone: list[NewMemory] = []
        for each in self._memories:
            is_free = each.is_free
            if each.byte_size not in self._filled_ns or (is_free and each.is_spare):
                gone.append(each)
            each.is_spare = is_free
        self._forget(gone)
        return bool(self._filled_ns)

    def __repr__(self) -> str:
        return f"<MemoryPool {sorted(each.byte_size for each in self._memories)}>"


def kernel_tells() -> bool:
    """Returns whether, on this kernel, a ``MemoryPool`` can use memory again after all other processes have dropped it."""
    memory, fd = NewMemory([Part(mmap.PAGESIZE, lambda at, target: target.fill(0))], mmap.PAGESIZE), -1
    try:
        fd = memory.lend()
        lent = not memory.is_free
        os.close(fd)
        fd = -1
        return lent and memory.is_free and not _is_written(memory.fd)
    except OSError:
        return False
    finally:
        if fd >= 0:
            os.close(fd)
        memory.free()


def _is_written(fd: int) -> bool:
    try:
        os.pwrite(fd, b"x", 0)
    except OSError:
        return False
    return True
