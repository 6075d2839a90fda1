"""Reads and writes parameters in the form in which processes pass them on: safetensors' layout in a sealed memfd.

    | length of the header u64 | header: JSON, padded with spaces | tensors, one behind the other, without holes |
    header   {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {...}}

The seals ensure that no process can change the memory any more. The header is checked as if an attacker had written it. In memory
that is written here the tensors begin at a multiple of ``ALIGNMENT``, and so does each tensor except the few behind the first
whose size is not a multiple: XLA uses aligned tensors without a copy.

Source: safetensors' format, https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import fcntl
import itertools
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np

from tensord.shm import descriptors
from tensord.shm.arena import ALIGNMENT
from tensord.shm.arrays import Array, address_of
from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.workers.parameters.slices import in_slices, threads_for

#: By ctypes, which lets go of Python's lock meanwhile, as the mmap module does not.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_POPULATE_WRITE = 23  # asm-generic/mman-common.h, since Linux 5.14
#: The seals of memory that nobody can change any more, and those that such memory is made with.
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_ALL = _FIXED | fcntl.F_SEAL_SEAL
#: Bytes of the length of the header, which come first.
LENGTH = 8
_MAX_HEADER = 32 << 20
#: Dimensions of a leaf at most.
MAX_RANK = 32
_MAX_NAME = 1024
_METADATA = "__metadata__"
#: safetensors' names of element types.
_DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "C64": np.dtype(np.complex64),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder = msgspec.json.Decoder(_Entry)
_metadata_decoder = msgspec.json.Decoder(dict[str, str])


class LaidLeaf(NamedTuple):
    """Name, dtype and shape of a leaf (an array of a model's parameters) that is to be written to memory."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def byte_size(self) -> int:
        """The bytes that the leaf's elements need in memory."""
        return self.dtype.itemsize * math.prod(self.shape)


def read(content: memoryview, what: str) -> dict[str, Array]:
    """Reads parameters in safetensors' layout. Returns leaf name -> array; the arrays lie in the given memory, without a copy.

    Args:
      content: the memory, which must not change any more.
      what: names the parameters in errors.
    Raises: InvalidArgument: the memory is not in safetensors' layout, or a leaf has an unsupported type.
    """
    begin, entries = _header(content, what)
    at, found = begin, dict[str, Array]()
    for name, entry in sorted(entries.items(), key=lambda named: named[1].data_offsets):
        dtype, leaf = _DTYPES.get(entry.dtype), f"{what}: leaf '{name[:_MAX_NAME]}'"
        if dtype is None:
            raise InvalidArgument(f"{leaf} has elements of '{entry.dtype[:32]}', which have no name here")
        if len(entry.shape) > MAX_RANK:
            raise InvalidArgument(f"{leaf} has {len(entry.shape)} dimensions, at most {MAX_RANK} are possible")
        start, end = entry.data_offsets
        needed = dtype.itemsize * math.prod(entry.shape)
        if begin + start != at or end - start != needed:
            raise InvalidArgument(
                f"{leaf} has bytes {start} to {end}; {entry.dtype}{list(entry.shape)} needs {needed}, "
                f"and {at - begin} is where the one before it ends"
            )
        if begin + end > len(content):
            raise InvalidArgument(f"{leaf} ends at byte {begin + end} of {len(content)}")
        at += needed
        array = np.frombuffer(content[begin + start : at] if needed else b"", dtype)
        if dtype == np.bool_ and needed and array.view(np.uint8).max() > 1:
            # In memory a truth value may only be 0 or 1.
            raise InvalidArgument(f"{leaf} has a truth value that is neither 0 nor 1")
        found[name] = array.reshape(entry.shape)
    if at != len(content):
        raise InvalidArgument(f"{what}: its leaves end at byte {at} of {len(content)}")
    return found


def _header(content: memoryview, what: str) -> tuple[int, dict[str, _Entry]]:
    """Reads the header of parameters in safetensors' layout. Returns where the tensors begin, and leaf name -> entry.

    The former is an offset in ``content``. An entry says dtype, shape, and the bytes of the leaf, counted from that offset.

    ``content``: the complete parameters. ``what``: names them in errors.

    Raises InvalidArgument: the header is not that of safetensors' layout.
    """
    if len(content) < LENGTH:
        raise InvalidArgument(f"{what}: {len(content)} bytes are too few for safetensors' layout")
    length = int.from_bytes(content[:LENGTH], "little")
    if length > min(_MAX_HEADER, len(content) - LENGTH):
        raise InvalidArgument(
            f"{what}: its header would have {length} bytes, at most {min(_MAX_HEADER, len(content) - LENGTH)} are possible"
        )
    entries: dict[str, _Entry] = {}
    try:
        for name, text in _decoder.decode(content[LENGTH : LENGTH + length]).items():
            if name == _METADATA:
                _metadata_decoder.decode(text)
            else:
                entries[name] = _entry_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{what}: its header is not that of safetensors' layout: {str(error)[:256]}") from None
    return LENGTH + length, entries


def padding(head: bytes, byte_size: int) -> int:
    """Returns how many spaces have to follow safetensors' header so that the tensors begin at a multiple of ``ALIGNMENT``.

    Returns 0 for content that is not in safetensors' layout, which is reported later.

    Args:
      head: the first bytes of the content, with the length of its header.
      byte_size: of the complete content.
    """
    length = int.from_bytes(head, "little")
    if len(head) < LENGTH or length > min(_MAX_HEADER, byte_size - LENGTH):
        return 0
    return -(LENGTH + length) % ALIGNMENT


class SealedMemory:
    """Sealed memory, which no process can change any more, mapped for reading. It stays mapped while arrays in it exist."""

    def __init__(self, fd: int) -> None:
        """Maps sealed memory. The caller keeps the file descriptor ``fd`` and may close it; the mapping does not depend on it.

        Raises InvalidArgument: the memory is not sealed, or empty; Unavailable: it cannot be mapped now, or so many files are
        open that the remaining file descriptors are reserved for requests.
        """
        if not is_sealed(fd):
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
        content = np.frombuffer(self.view, np.uint8)
        # Its pages are mapped here, or the first batch would meet the faults; by numpy, which leaves Python to others meanwhile.
        in_slices(self.byte_size, lambda start, end: content[start : end : mmap.PAGESIZE].max())

    def __repr__(self) -> str:
        return f"<SealedMemory {self.byte_size} bytes>"


def _populate(content: Array) -> int:
    """Asks the kernel to allocate all pages of ``content``, which begins with a page. Returns the error number; 0: none."""
    return ctypes.get_errno() if _madvise(address_of(content), len(content), _MADV_POPULATE_WRITE) else 0


def is_sealed(fd: int) -> bool:
    """Returns whether a file descriptor refers to sealed memory, which no process can change any more."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FIXED == _FIXED
    except OSError:  # no memfd
        return False


#: ``copy(at, target)``: fills a UINT8 array with the bytes of a source from offset ``at`` on. Several threads call it at once.
Copy = Callable[[int, Array], None]


class Part(NamedTuple):
    """Describes bytes that new memory is filled with: how many, and the function that copies them from their source."""

    byte_size: int
    copy: Copy
    #: The bytes, where they lie in this process' memory.
    lies: memoryview | None = None


def part_of(content: bytes | memoryview | Array) -> Part:
    """Returns a ``Part`` whose bytes are copied from contiguous memory of this process."""
    source = np.frombuffer(content, np.uint8)
    return Part(len(source), lambda at, target: np.copyto(target, source[at : at + len(target)]), source.data)


def leaf_of(name: str, array: Array) -> tuple[LaidLeaf, Copy]:
    """Describes an array as a leaf for ``laid_out``. Returns the description, and a function that copies the array's bytes."""
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.nbytes and array.dtype in _NAMES else b""
    return LaidLeaf(name, array.dtype, tuple(array.shape)), part_of(content).copy


class NewMemory:
    """Memory that is filled with parameters and then sealed, so that no process can change it any more.

    Its owner calls ``sealed``, and in any case ``close``.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        """Allocates memory, and fills it with parts, one behind the other, by several threads.

        Raises Unavailable: the host has no memory left, or the process no file descriptor; or whatever copying a part raises.
        """
        self._parts = [part for part in parts if part.byte_size]
        #: Where each part begins, and where the last one ends.
        self._starts = [0, *itertools.accumulate(part.byte_size for part in self._parts)]
        self.byte_size = self._starts[-1]
        with descriptors.needed("pushed parameters"):
            self._fd = os.memfd_create("tensord-parameters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self._mapping = self._mapped()
            #: The bytes, while the memory is not sealed.
            self.content: Array = np.frombuffer(self._mapping, np.uint8)
            self._alone = threads_for(self.byte_size) == 1
            in_slices(self.byte_size, self._fill)
        except BaseException:
            self.close()
            raise

    def _mapped(self) -> mmap.mmap:
        """Maps the memory; its pages are allocated later. Raises Unavailable: the host cannot map so many bytes."""
        try:
            os.truncate(self._fd, self.byte_size)
            return mmap.mmap(self._fd, self.byte_size)
        except OSError as error:
            raise self._lacking() from error

    def _fill(self, start: int, end: int) -> None:
        """Allocates the bytes ``[start, end)`` of the memory and fills them from the parts. ``start``: where a page begins."""
        if self._alone and self._written(start, end):
            return
        self._allocate(start, end)
        for at, stop, part, offset in self._pieces(start, end):
            part.copy(offset, self.content[at:stop])

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int, Part, int]]:
        """Divides the bytes ``[start, end)`` by part. Yields for each piece: start, end, part, and its offset in the part."""
        at, index = start, bisect.bisect(self._starts, start) - 1
        while at < end:
            stop = min(end, self._starts[index + 1])
            yield at, stop, self._parts[index], at - self._starts[index]
            at, index = stop, index + 1

    def _written(self, start: int, end: int) -> bool:
        """Writes the bytes ``[start, end)`` by system calls. Returns False if a part is not in memory or cannot be read any more.

        The kernel copies into new pages in one pass, and clears none first: 46 ms of processor time for 100 MiB where to
        populate and copy takes 73. But of several threads that write to a file each waits for the others.

        Raises Unavailable: there is no memory.
        """
        for at, stop, part, offset in self._pieces(start, end):
            if part.lies is None:
                return False
            while at < stop:
                try:
                    count = os.pwrite(self._fd, part.lies[offset : offset + stop - at], at)
                except OSError as error:
                    if error.errno != errno.EFAULT:
                        raise self._lacking() from error
                    count = 0
                if not count:
                    return False
                at, offset = at + count, offset + count
        return True

    def _allocate(self, start: int, end: int) -> None:
        """Allocates and maps the pages of ``[start, end)``, so that writing to them raises no signal for lack of memory.

        Raises Unavailable: there is no memory.
        """
        error = _populate(self.content[start:end])
        try:
            if error == errno.EINVAL:
                # Linux before 5.14. The threads take turns here.
                os.posix_fallocate(self._fd, start, end - start)
            elif error:
                raise OSError(error, os.strerror(error))
        except OSError as lacking:
            raise self._lacking() from lacking

    def _lacking(self) -> Unavailable:
        return Unavailable(f"the host has no {self.byte_size} bytes of memory for parameters")

    def sealed(self) -> int:
        """Seals the memory; no array may refer to it any more. Returns its file descriptor, which the caller closes."""
        del self.content
        self._mapping.close()
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _ALL)
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        """Frees the memory if ``sealed`` was not called. May be called more than once."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __repr__(self) -> str:
        return f"<NewMemory {self.byte_size} bytes>"


def laid_out(leaves: Sequence[tuple[LaidLeaf, Copy]], limit: int, what: str) -> NewMemory:
    """Writes leaves (arrays) to new memory in safetensors' layout and returns the memory, which the caller seals and closes.

    Args:
      leaves: each leaf, and the function that copies its bytes.
      limit: how many bytes the memory may have.
      what: names the parameters in errors.
    Raises InvalidArgument: the leaves need more bytes, or have an element type without a name in the layout; Unavailable: the
    host has no memory left; or whatever copying a leaf raises.
    """
    # Whole multiples of the alignment come first, so that all of them are aligned.
    ordered = sorted(leaves, key=lambda each: each[0].byte_size % ALIGNMENT != 0)
    entries: dict[str, _Entry] = {}
    at = 0
    for leaf, _ in ordered:
        if leaf.dtype not in _NAMES:
            raise InvalidArgument(f"{what}: leaf '{leaf.name}' has elements of {leaf.dtype}, which have no name here")
        entries[leaf.name] = _Entry(_NAMES[leaf.dtype], leaf.shape, (at, at + leaf.byte_size))
        at += leaf.byte_size
    header = msgspec.json.encode(entries)
    header += b" " * (-(LENGTH + len(header)) % ALIGNMENT)
    check_size(LENGTH + len(header) + at, limit, what)
    head = part_of(len(header).to_bytes(LENGTH, "little") + header)
    return NewMemory([head, *(Part(leaf.byte_size, copy) for leaf, copy in ordered)])


def check_size(byte_size: int, limit: int, what: str) -> None:
    """Checks the size of pushed parameters. Raises InvalidArgument: they have more than ``limit`` bytes.

    ``what``: names the parameters in the error.
    """
    if byte_size > limit:
        raise InvalidArgument(f"{what} would have {byte_size} bytes, workers.max_parameter_byte_size allows {limit}")
