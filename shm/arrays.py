"""Tensors as numpy arrays: the datatypes' dtypes, views without copies, and the BYTES encoding.

    BYTES element   | length u32 little-endian | length bytes |      elements follow each other without padding

Source: Triton docs/protocol/extension_binary_data.md, "Binary Tensor Request".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tensord.shm.datatypes import element_count
from tensord.shm.errors import InvalidArgument

Array = npt.NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BYTES": np.dtype(np.object_),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_DATATYPES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<I")


class IncompleteString(InvalidArgument):
    """Raised when the content of a BYTES tensor ends before its last element does."""


def datatype_of(dtype: np.dtype[Any]) -> str | None:
    """Returns the protocol's datatype for a numpy dtype; None if it has none. Strings and objects are BYTES."""
    return "BYTES" if dtype.kind in "SUO" else _DATATYPES.get(dtype)


def array(
    content: memoryview | bytes, datatype: str, shape: Sequence[int], what: str = "tensor", whose: str = ""
) -> Array:
    """Makes an array from a tensor's bytes: a view for datatypes of fixed size, an object array of bytes objects for BYTES.

    Args:
      content: exactly the tensor's bytes. For BYTES it must be a snapshot nobody else can write: lengths are read from it.
      what: the tensor's name in error messages, e.g. ``input 'x'``.
      whose: words that some of Triton's messages add after the name, e.g. `` for model 'm'``.
    Raises: InvalidArgument: the size does not match datatype and shape.  IncompleteString: the content ends within its last
      element.
    """
    if datatype == "BYTES":
        return _bytes_array(bytes(content), shape, what, whose)
    dtype = DTYPES[datatype]
    needed = element_count(shape, what) * dtype.itemsize
    if len(content) != needed:
        raise InvalidArgument(f"{what}: {len(content)} bytes given, {datatype}{list(shape)} needs {needed}")
    return np.frombuffer(content, dtype).reshape(shape)


def byte_content(values: Array) -> bytes:
    """Encodes an array of bytes or str (as UTF-8) in the protocol's BYTES encoding, in row-major order."""
    pieces: list[bytes] = []
    for value in values.ravel().tolist():
        element = value if isinstance(value, bytes) else str(value).encode()
        pieces += (_LENGTH.pack(len(element)), element)
    return b"".join(pieces)


def _bytes_array(content: bytes, shape: Sequence[int], what: str, whose: str) -> Array:
    """Decodes the protocol's BYTES encoding into an object array of bytes objects.

    Raises InvalidArgument: the content ends within an element, or the number of elements is not that of the shape.
    """
    count = element_count(shape, what)
    elements: list[bytes] = []
    offset, end = 0, len(content)
    while offset < end:
        start = offset + 4
        if start > end:
            raise InvalidArgument(
                f"incomplete string length indicator for inference {what}{whose}, expecting 4 bytes but only "
                f"{end - offset} bytes available. Please make sure the string length indicator is in one buffer."
            )
        if len(elements) == count:
            raise InvalidArgument(
                f"unexpected number of string elements {count + 1} for inference {what}{whose}, expecting {count}"
            )
        (length,) = _LENGTH.unpack_from(content, offset)
        if start + length > end and len(elements) + 1 == count:
            raise IncompleteString(
                f"incomplete string data for inference {what}, expecting string of length {length} "
                f"but only {end - start} bytes available"
            )
        elements.append(content[start : start + length])
        offset = start + length
    # The elements are counted before their content is looked at, as Triton does.
    if len(elements) != count:
        raise InvalidArgument(f"expected {count} string elements for inference {what}{whose}, got {len(elements)}")
    values = np.empty(count, np.object_)
    values[:] = elements
    return values.reshape(shape)


def address_of(memory: Array | memoryview) -> int:
    """Returns the memory address of the first byte of an array, or of a memoryview that is not empty."""
    array = np.frombuffer(memory, np.uint8) if isinstance(memory, memoryview) else memory
    address: int = array.__array_interface__["data"][0]
    return address


def strings(array: Array) -> Array:
    """Copies an array of str or bytes into a new object array of bytes objects (str as UTF-8), as BYTES tensors have them."""
    made = np.empty(array.shape, np.object_)
    made.ravel()[:] = [value if isinstance(value, bytes) else str(value).encode() for value in array.ravel().tolist()]
    return made
