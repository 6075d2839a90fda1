"""Reads and writes parameters in safetensors' layout (https://github.com/huggingface/safetensors#format) in sealed memory.

    | length of the header u64 | header: JSON, padded with spaces | tensors, one behind the other, without holes |
    header   {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {...}}

The header is checked as if an attacker had written it. This module writes the tensors whose size is a multiple of ``ALIGNMENT``
first, so that each of them begins at a multiple of ``ALIGNMENT``. XLA uses aligned tensors without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from tensord.shm.arena import ALIGNMENT
from tensord.shm.arrays import Array
from tensord.shm.datatypes import element_count
from tensord.shm.errors import InvalidArgument
from tensord.workers.parameters.leaves import DTYPES, Leaves
from tensord.workers.parameters.sealed_memory import Copy, Part, part_of

#: Bytes of the length of the header, which come first.
LENGTH = 8
#: Bytes of a header for what is no leaf: metadata, and spaces. They are decoded in one call, in which Python serves nobody else.
_MAX_METADATA = 256 << 10
_MAX_METADATA_ENTRIES = 1000
#: Bytes of a leaf's entry in the header, besides its name and shape.
_ENTRY = 160
#: Dimensions of a leaf at most.
MAX_RANK = 32
_MAX_NAME = 1024
_METADATA = "__metadata__"
#: safetensors' names of element types.
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder = msgspec.json.Decoder(_Entry)
_metadata_decoder = msgspec.json.Decoder(dict[str, str])


class LaidLeaf(NamedTuple):
    """The name, dtype and shape of a leaf that is to be written to memory."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def byte_size(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class Place(NamedTuple):
    """A tensor in a safetensors file. Its bytes lie from ``begin`` to ``end``, counted from the start of the file."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


def read(content: memoryview, what: str, leaves: Leaves | None = None) -> dict[str, Array]:
    """Reads parameters in safetensors' layout. Returns leaf name -> array. The arrays are views of ``content``.

    This function does not check that the elements of boolean arrays are 0 or 1.
    Args:
      content: the parameters' memory, which must not change any more.
      what: names the parameters in errors.
      leaves: the leaves of the model's tree of parameters, which also limit the header's size. If it is None, the parameters
        are not compared with a model, and the header may have any size.
    Raises InvalidArgument if ``content`` is not in safetensors' layout, or a datatype or number of dimensions is unsupported.
    Raises InvalidArgument if the model has no leaf with a parameter's name, or has it with another datatype or shape.
    """
    length = header_length(bytes(content[:LENGTH]), len(content), what, leaves)
    found = places(content[LENGTH : LENGTH + length], len(content), what, leaves)
    return {
        name: np.frombuffer(content[begin:end] if end > begin else b"", dtype).reshape(shape)
        for name, dtype, shape, begin, end in found.values()
    }


def header_length(head: bytes, byte_size: int, what: str, leaves: Leaves | None = None) -> int:
    """Returns the length of safetensors' header in bytes.

    Args:
      head: the first 8 bytes of the parameters, or all of them if they are fewer.
      byte_size: the number of bytes of the parameters.
      what: names the parameters in errors.
      leaves: the model's leaves, which bound the header's size; None: there is no bound.
    Raises InvalidArgument: the parameters are too short, or the header is too long.
    """
    if len(head) < LENGTH:
        raise InvalidArgument(f"{what}: {len(head)} bytes are too few for safetensors' layout")
    most = byte_size - LENGTH
    if leaves is not None:
        entries = [_ENTRY + 6 * len(leaf.name.encode()) + 24 * len(leaf.shape) for leaf in leaves]
        entries += [_ENTRY + 6 * len(name.encode()) for name in leaves.fixed]
        most = min(most, sum(entries) + _MAX_METADATA)
    length = int.from_bytes(head, "little")
    if length > most:
        raise InvalidArgument(f"{what}: its header would have {length} bytes, at most {most} are possible")
    return length


def places(header: bytes | memoryview, byte_size: int, what: str, leaves: Leaves | None = None) -> dict[str, Place]:
    """Reads a safetensors header. Returns leaf name -> where the leaf's bytes are, sorted by offset.

    Args:
      header: the header's bytes, without the length in front of them.
      byte_size: the number of bytes of the length, the header and the tensors together.
      what: names the parameters in errors.
      leaves: the leaves of the model's tree of parameters. If it is None, the tensors are not compared with a model.
    Raises InvalidArgument if the header is not in safetensors' layout, or if a datatype or number of dimensions is unsupported.
    Raises InvalidArgument if the tensors overlap, leave a byte after the header unused, or end after ``byte_size``.
    Raises InvalidArgument if the model has no leaf with a tensor's name, or has it with another datatype or shape.
    """
    first = at = LENGTH + len(header)
    found: dict[str, Place] = {}
    for name, entry in sorted(_entries(header, what, leaves).items(), key=lambda named: named[1].data_offsets):
        dtype, leaf = DTYPES.get(entry.dtype), f"{what}: leaf '{name[:_MAX_NAME]}'"
        if dtype is None:
            raise InvalidArgument(f"{leaf} has elements of '{entry.dtype[:32]}', which have no name here")
        if len(entry.shape) > MAX_RANK:
            raise InvalidArgument(f"{leaf} has {len(entry.shape)} dimensions, at most {MAX_RANK} are possible")
        start, end = entry.data_offsets
        needed = dtype.itemsize * math.prod(entry.shape)
        if first + start != at or end - start != needed:
            raise InvalidArgument(
                f"{leaf} has bytes {start} to {end}; {entry.dtype}{list(entry.shape)} needs {needed}, "
                f"and {at - first} is where the one before it ends"
            )
        if first + end > byte_size:
            raise InvalidArgument(f"{leaf} ends at byte {first + end} of {byte_size}")
        element_count(entry.shape, leaf)
        at += needed
        found[name] = Place(name, dtype, entry.shape, at - needed, at)
    if at != byte_size:
        raise InvalidArgument(f"{what}: its leaves end at byte {at} of {byte_size}")
    if leaves is not None:
        leaves.check_known(found, what)
    return found


def _entries(header: bytes | memoryview, what: str, leaves: Leaves | None) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    try:
        texts = _decoder.decode(header)
        metadata = texts.pop(_METADATA, None)
        if metadata is not None and (count := len(_metadata_decoder.decode(metadata))) > _MAX_METADATA_ENTRIES:
            raise InvalidArgument(
                f"{what}: its metadata has {count} entries, at most {_MAX_METADATA_ENTRIES} are allowed"
            )
        if leaves is not None and len(texts) > len(leaves) + len(leaves.fixed):
            # Before each is decoded: unknown ones are named.
            leaves.check_names(texts, what)
        for name, text in texts.items():
            entries[name] = _entry_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{what}: its header is not that of safetensors' layout: {str(error)[:256]}") from None
    return entries


def check_truth(arrays: Mapping[str, Array], what: str) -> None:
    """Raises InvalidArgument if a BOOL array has an element other than 0 or 1. The error's text begins with ``what``."""
    for name, array in arrays.items():
        if array.dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
            raise InvalidArgument(f"{what}: leaf '{name[:_MAX_NAME]}' has a truth value that is neither 0 nor 1")


def leaf_of(name: str, array: Array) -> tuple[LaidLeaf, Copy]:
    """Returns a leaf with this name and the array's dtype and shape, and a function that copies the bytes of ``array``.

    ``function(at, target)`` fills the UINT8 array ``target`` with the bytes from offset ``at`` on.
    """
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.nbytes and array.dtype in _NAMES else b""
    return LaidLeaf(name, array.dtype, tuple(array.shape)), part_of(content).copy


def laid_out(leaves: Sequence[tuple[LaidLeaf, Copy]], limit: int, what: str) -> list[Part]:
    """Arranges leaves in safetensors format. Returns the parts of the content: the header, and then a part for each leaf.

    Args:
      leaves: each leaf, and the function that copies the leaf's bytes.
      limit: the most bytes that the parts may have together.
      what: names the leaves in errors.
    Raises InvalidArgument if the parts have too many bytes, or if safetensors has no name for a leaf's dtype.
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
    """Raises InvalidArgument if pushed parameters have more than ``limit`` bytes. ``what`` names them in the error."""
    if byte_size > limit:
        raise InvalidArgument(f"{what} would have {byte_size} bytes, workers.max_parameter_byte_size allows {limit}")
