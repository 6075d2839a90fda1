"""Reads and writes parameters in the form in which processes pass them on: safetensors' layout in sealed memory.

    | length of the header u64 | header: JSON, padded with spaces | tensors, one behind the other, without holes |
    header   {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {...}}

The header is checked as if an attacker had written it. In memory that is laid out here the tensors begin at a multiple of
``ALIGNMENT``, and so does each tensor except the few behind the first whose size is not a multiple: XLA uses aligned tensors
without a copy.

Source: safetensors' format, https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np

from tensord.shm.arena import ALIGNMENT
from tensord.shm.arrays import Array
from tensord.shm.errors import InvalidArgument
from tensord.workers.parameters.sealed_memory import Copy, Part, part_of

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


def leaf_of(name: str, array: Array) -> tuple[LaidLeaf, Copy]:
    """Describes an array as a leaf for ``laid_out``. Returns the description, and a function that copies the array's bytes."""
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.nbytes and array.dtype in _NAMES else b""
    return LaidLeaf(name, array.dtype, tuple(array.shape)), part_of(content).copy


def laid_out(leaves: Sequence[tuple[LaidLeaf, Copy]], limit: int, what: str) -> list[Part]:
    """Lays leaves (arrays) out in safetensors' layout. Returns the parts that memory is to be filled with, in their order.

    Args:
      leaves: each leaf, and the function that copies its bytes.
      limit: how many bytes the memory may have.
      what: names the parameters in errors.
    Raises InvalidArgument: the leaves need more bytes, or have an element type without a name in the layout.
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
    return [head, *(Part(leaf.byte_size, copy) for leaf, copy in ordered)]


def check_size(byte_size: int, limit: int, what: str) -> None:
    """Checks the size of pushed parameters. Raises InvalidArgument: they have more than ``limit`` bytes.

    ``what``: names the parameters in the error.
    """
    if byte_size > limit:
        raise InvalidArgument(f"{what} would have {byte_size} bytes, workers.max_parameter_byte_size allows {limit}")
