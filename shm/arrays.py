"""Converts tensors' bytes to numpy arrays, without a copy if possible, and encodes and decodes BYTES tensors.

    BYTES element   | length u32 little-endian | length bytes |      elements follow each other without padding

Source: Triton docs/protocol/extension_binary_data.md, "Binary Tensor Request".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import ml_dtypes  # noqa: F401  # with it numpy has bfloat16
import numpy as np
import numpy.typing as npt

from tensord.shm import strings
from tensord.shm.common.datatypes import DATATYPES
from tensord.shm.datatypes import element_count
from tensord.shm.errors import InvalidArgument

Array = npt.NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(each.dtype) for name, each in DATATYPES.items()}
_DATATYPES = {dtype: name for name, dtype in DTYPES.items()}
#: Strings that are converted in one call, in which Python serves no other thread.
SLICE = 4096
#: Content of more bytes is decoded where it is used.
_LARGE = 1 << 16


class IncompleteString(InvalidArgument):
    """Raised when the content of a BYTES tensor ends within an element."""


def datatype_of(dtype: np.dtype[Any]) -> str | None:
    """Returns the protocol's datatype for a dtype, such as "FP32", or None if none fits. For strings and objects: "BYTES"."""
    return "BYTES" if dtype.kind in "SUO" else _DATATYPES.get(dtype)


def described(dtype: Any, shape: Sequence[int]) -> str:
    """Returns an array's datatype and shape as errors have them: "FP32[2, 3]". Without a datatype its dtype is named."""
    return f"{(isinstance(dtype, np.dtype) and datatype_of(dtype)) or dtype}{list(shape)}"


def array(
    content: memoryview | bytes, datatype: str, shape: Sequence[int], what: str = "tensor", whose: str = ""
) -> Array:
    """Makes an array from a tensor's ``content``: a view of the content, or new bytes objects if the datatype is BYTES.

    Args:
      what: the tensor's name in error messages, such as ``input 'x'``.
      whose: words that follow ``what`` in some error messages, such as `` for model 'm'``.
    Raises: InvalidArgument: ``content`` has more or fewer bytes or elements than the shape needs.  IncompleteString: the
      content of a BYTES tensor ends within the last element.
    """
    if datatype == "BYTES":
        return np.asarray(received_strings(bytes(content), shape, what, whose))
    dtype = DTYPES[datatype]
    needed = element_count(shape, what) * dtype.itemsize
    if len(content) != needed:
        raise InvalidArgument(f"{what}: {len(content)} bytes given, {datatype}{list(shape)} needs {needed}")
    return np.frombuffer(content, dtype).reshape(shape)


def byte_content(values: Array) -> bytes:
    """Encodes an array of bytes or str as the content of a BYTES tensor, in row-major order. A str becomes UTF-8."""
    if isinstance(values, Strings):
        return values.content
    flat = values.ravel()
    if flat.size <= SLICE:
        return encoded(flat.tolist())
    return b"".join([encoded(flat[at : at + SLICE].tolist()) for at in range(0, flat.size, SLICE)])


class Strings:
    """A BYTES tensor with many elements, which are stored in encoded form.

    It has an array's shape, dtype and size. ``numpy.asarray`` decodes the elements.
    """

    __slots__ = ("content", "shape")
    dtype = DTYPES["BYTES"]

    def __init__(self, content: bytes, shape: Sequence[int]) -> None:
        self.content = content
        self.shape = tuple(shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return len(self.content)

    def __len__(self) -> int:
        return self.shape[0]

    def reshape(self, shape: Sequence[int] | int) -> Strings:
        """Returns a tensor with the same elements in another shape. If ``shape`` is -1, the tensor has one dimension."""
        return Strings(self.content, (self.size,) if isinstance(shape, int) else shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Returns a new array of ``dtype``, or of bytes objects if ``dtype`` is None. ``copy`` is ignored."""
        values, at = np.empty(self.size, np.object_), 0
        for start in range(0, self.size, SLICE):
            elements, at = strings.decode(self.content, at, SLICE)
            values[start : start + SLICE] = np.fromiter(elements, np.object_, len(elements))
        made = values.reshape(self.shape)
        return made if dtype is None else made.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"<Strings {list(self.shape)}, {len(self.content)} bytes>"


def in_slices(array: Array) -> Array:
    """Converts a NumPy array of bytes or str to an object array, slice by slice, so that other threads can run between slices."""
    if array.dtype == np.object_:
        return array
    flat, made = array.ravel(), np.empty(array.size, np.object_)
    for at in range(0, array.size, SLICE):
        made[at : at + SLICE] = flat[at : at + SLICE]
    return made.reshape(array.shape)


def encoded_strings(array: Array) -> Array:
    """Returns an array of over 4096 strings as ``Strings``, and any other array unchanged.

    Encoding is slow. Do not call this in the thread of the worker's event loop.
    """
    if array.dtype.kind not in "SUO" or array.size <= SLICE:
        return array
    return cast(Array, Strings(byte_content(array), array.shape))


def encoded(values: list[Any]) -> bytes:
    """Encodes bytes or str values as the content of a BYTES tensor. A str becomes UTF-8."""
    try:
        return strings.encode(values)
    except TypeError:
        return strings.encode([value if isinstance(value, bytes) else str(value).encode() for value in values])


def _check_strings(content: bytes, shape: Sequence[int], what: str = "tensor", whose: str = "") -> None:
    wanted, end = element_count(shape, what), len(content)
    found, at = strings.count(content, wanted + 1)
    if at < end and found <= wanted:
        if at + 4 > end:
            raise InvalidArgument(
                f"incomplete string length indicator for inference {what}{whose}, expecting 4 bytes but only "
                f"{end - at} bytes available. Please make sure the string length indicator is in one buffer."
            )
        found += 1
        if found == wanted:
            raise IncompleteString(
                f"incomplete string data for inference {what}, expecting string of length "
                f"{int.from_bytes(content[at : at + 4], 'little')} but only {end - at - 4} bytes available"
            )
    # The elements are counted before their content is looked at, as Triton does.
    if found > wanted:
        raise InvalidArgument(
            f"unexpected number of string elements {wanted + 1} for inference {what}{whose}, expecting {wanted}"
        )
    if found < wanted:
        raise InvalidArgument(f"expected {wanted} string elements for inference {what}{whose}, got {found}")


def received_strings(content: bytes, shape: Sequence[int], what: str, whose: str) -> Array:
    """Returns the content of a BYTES tensor as an array of bytes objects, or as ``Strings`` if it has over 64 KiB.

    ``what`` is the tensor's name in errors. ``whose`` follows the name in some errors, such as `` for model 'm'``. Raises
    InvalidArgument if the content has more or fewer elements than the shape. Raises IncompleteString if the content ends within
    the last element.
    """
    _check_strings(content, shape, what, whose)
    made = Strings(content, shape)
    return cast(Array, made) if len(content) > _LARGE else np.asarray(made)


def address_of(memory: Array | memoryview) -> int:
    """Returns the memory address of the first byte of an array, or of a memoryview that is not empty."""
    array = np.frombuffer(memory, np.uint8) if isinstance(memory, memoryview) else memory
    address: int = array.__array_interface__["data"][0]
    return address


def as_strings(array: Array) -> Array:
    """Copies an array of str or bytes to a new array of bytes objects. A str becomes UTF-8."""
    return np.asarray(Strings(byte_content(array), array.shape))


def drawn(dtype: np.dtype[Any], shape: Sequence[int], random: np.random.Generator) -> Array:
    """Returns random values of ``dtype``: normal numbers, integers from 0 to 3, booleans, or digits as strings."""
    if dtype.kind not in "biuO":
        return random.normal(size=shape).astype(dtype)
    return (
        random.integers(0, 2 if dtype == np.bool_ else 4, shape)
        .astype("S1" if dtype.kind == "O" else dtype)
        .astype(dtype)
    )
