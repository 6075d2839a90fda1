"""Reads and writes parameters in the form in which processes pass them on: safetensors' layout in a sealed memfd.

    | length of the header u64 | header: JSON, padded with spaces | tensors, one behind the other, without holes |
    header   {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {...}}

The seals ensure that no process can change the memory any more. The header is checked as if an attacker had written it. In memory
that is written here the tensors begin at a multiple of ``ALIGNMENT``, and so does each tensor except the few behind the first
whose size is not a multiple: XLA uses aligned tensors without a copy.

Source: safetensors' format, https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np

from tensord.shm import descriptors
from tensord.shm.arena import ALIGNMENT
from tensord.shm.arrays import Array
from tensord.shm.errors import InvalidArgument, Unavailable

#: The seals of memory that nobody can change any more, and those that such memory is made with.
_FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_ALL = _FIXED | fcntl.F_SEAL_SEAL
#: Bytes of the length of the header, which come first.
LENGTH = 8
#: Bytes that are written in one piece.
_PIECE = 4 << 20
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


class _Unreadable(Exception):
    """Raised if bytes that were to be written cannot be read any more, because the memory of a region has shrunk."""


def _written(fd: int, content: memoryview, at: int) -> int:
    """Writes bytes to a file at offset ``at``. Returns how many were written, at least one.

    Raises _Unreadable: ``content`` cannot be read; OSError: the write failed, for instance because there is no memory.
    """
    try:
        count = os.pwrite(fd, content, at)
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        count = 0
    if not count:
        raise _Unreadable
    return count


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
        # Its pages are mapped here, or the first batch would meet the faults; by numpy, which leaves Python to others meanwhile.
        np.frombuffer(self.view, np.uint8)[:: mmap.PAGESIZE].max()

    def __repr__(self) -> str:
        return f"<SealedMemory {self.byte_size} bytes>"


def is_sealed(fd: int) -> bool:
    """Returns whether a file descriptor refers to sealed memory, which no process can change any more."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FIXED == _FIXED
    except OSError:  # no memfd
        return False


class NewMemory:
    """New memory that parameters are written to and that is then sealed: nobody can change it any more.

    Its owner calls ``sealed`` once the parameters are complete, and in any case ``close``.
    """

    def __init__(self, byte_size: int, parts: Sequence[memoryview] = ()) -> None:
        """Allocates memory. Raises Unavailable: the host has no memory left, or the process no file descriptor.

        Args:
          byte_size: of the memory.
          parts: bytes to fill the memory with, one part behind the other, ``byte_size`` in total; empty: it is filled later.
        """
        self.byte_size = byte_size
        with descriptors.needed("pushed parameters"):
            self._fd = os.memfd_create("tensord-parameters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            written = self._write(parts) if parts else 0
            if written < byte_size:
                os.posix_fallocate(self._fd, 0, byte_size)
            self._mapping: mmap.mmap | None = mmap.mmap(self._fd, byte_size)
            #: The bytes, while it is not sealed.
            self.content: Array = np.frombuffer(self._mapping, np.uint8)
        except OSError as error:
            os.close(self._fd)
            raise Unavailable(f"the host has no {byte_size} bytes of memory for parameters") from error
        at = 0
        for part in parts if written < byte_size else ():
            np.copyto(self.content[at : at + len(part)], np.frombuffer(part, np.uint8))
            at += len(part)

    def _write(self, parts: Sequence[memoryview]) -> int:
        """Writes bytes to the memory, from its beginning. Returns how many: fewer than given if some cannot be read any more.

        The kernel copies the bytes into new pages in one pass, whereas memory that was allocated before is cleared first.

        Raises OSError: there is no memory.
        """
        os.truncate(self._fd, self.byte_size)
        at = 0
        with contextlib.suppress(_Unreadable):
            for part in parts:
                end = at + len(part)
                while at < end:
                    start = len(part) - (end - at)
                    at += _written(self._fd, part[start : start + _PIECE], at)
        return at

    @classmethod
    def laid_out(cls, leaves: list[LaidLeaf], limit: int, what: str) -> tuple[NewMemory, dict[str, Array]]:
        """Makes memory for leaves, and writes their header. Returns it, and leaf name -> array in it, which the caller fills.

        Args:
          limit: how many bytes the memory may have.
          what: names the parameters in errors.
        Raises InvalidArgument: the leaves need more bytes, or have an element type without a name in the layout; Unavailable:
        the host has no memory left.
        """
        # Whole multiples of the alignment come first, so that all of them are aligned.
        ordered = sorted(leaves, key=lambda leaf: leaf.byte_size % ALIGNMENT != 0)
        entries: dict[str, _Entry] = {}
        at = 0
        for leaf in ordered:
            if leaf.dtype not in _NAMES:
                raise InvalidArgument(
                    f"{what}: leaf '{leaf.name}' has elements of {leaf.dtype}, which have no name here"
                )
            entries[leaf.name] = _Entry(_NAMES[leaf.dtype], leaf.shape, (at, at + leaf.byte_size))
            at += leaf.byte_size
        header = msgspec.json.encode(entries)
        header += b" " * (-(LENGTH + len(header)) % ALIGNMENT)
        begin = LENGTH + len(header)
        check_size(begin + at, limit, what)
        memory = cls(begin + at)
        memory.content[:LENGTH] = np.frombuffer(len(header).to_bytes(LENGTH, "little"), np.uint8)
        memory.content[LENGTH:begin] = np.frombuffer(header, np.uint8)
        places: dict[str, Array] = {}
        for leaf in ordered:
            start, end = (begin + offset for offset in entries[leaf.name].data_offsets)
            places[leaf.name] = memory.content[start:end].view(leaf.dtype).reshape(leaf.shape)
        return memory, places

    def sealed(self) -> int:
        """Seals the memory; no array may refer to it any more. Returns its file descriptor, which the caller closes."""
        self._unmap()
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _ALL)
        fd, self._fd = self._fd, -1
        return fd

    def _unmap(self) -> None:
        del self.content
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    def close(self) -> None:
        """Frees the memory if ``sealed`` was not called. May be called more than once."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __repr__(self) -> str:
        return f"<NewMemory {self.byte_size} bytes>"


def check_size(byte_size: int, limit: int, what: str) -> None:
    """Checks the size of pushed parameters. Raises InvalidArgument: they have more than ``limit`` bytes.

    ``what``: names the parameters in the error.
    """
    if byte_size > limit:
        raise InvalidArgument(f"{what} would have {byte_size} bytes, workers.max_parameter_byte_size allows {limit}")
