"""Converts datatypes of tensors, such as "FP32", to numpy dtypes and back, and encodes and decodes BYTES tensors.

Each element of a BYTES tensor is its length in bytes, as an unsigned 32-bit little-endian integer, and then its bytes.
numpy has no dtype for BF16. If ``ml_dtypes`` is installed, BF16 arrays have the dtype ``ml_dtypes.bfloat16``. If not, BF16
arrays are uint16 arrays of the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import strings
from .datatypes import DATATYPES
from .errors import InvalidArgument

Array = np.ndarray[Any, Any]
#: The dtypes of those datatypes for which the installed numpy is sure to have one.
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(each.dtype) for name, each in DATATYPES.items() if name not in ("BYTES", "BF16")
}
#: The dtypes that need no conversion: numbers in this host's byte order.
NATIVE = frozenset(DTYPES.values())
_DATATYPES = {dtype: name for name, dtype in DTYPES.items()}
_UINT16 = DTYPES["UINT16"]


def dtype_of(datatype: str) -> np.dtype:
    """Returns the numpy dtype of a datatype, such as "FP32". For BYTES it is object.

    Raises: InvalidArgument: there is no such datatype.
    """
    found = DTYPES.get(datatype)
    if found is not None:
        return found
    if datatype == "BYTES":
        return np.dtype(object)
    if datatype == "BF16":
        return _bfloat16()
    raise InvalidArgument(f"'{datatype}' is no datatype of the protocol")


def _bfloat16() -> np.dtype:
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        return _UINT16
    found: np.dtype = np.dtype(bfloat16)
    return found


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Rounds float32 numbers to BF16. Returns their bits as a uint16 array."""
    bits = values.view(np.uint32)
    return np.asarray((bits + 0x7FFF + (bits >> 16 & 1)) >> 16, np.uint16)


def datatype_of(dtype: np.dtype, declared: str = "") -> str | None:
    """Returns the datatype, such as "FP32", for a numpy dtype of any byte order, or None if no datatype fits.

    ``declared`` is the datatype in the model's metadata, or "". If it is "BF16", a uint16 array in this host's byte
    order is BF16.
    """
    found = _DATATYPES.get(dtype)
    if found is not None:
        return "BF16" if declared == "BF16" and found == "UINT16" else found
    if dtype.kind in "SUO":
        return "BYTES"
    if dtype.name == "bfloat16":
        return "BF16"
    # Another byte order has the same datatype once it was copied.
    return _DATATYPES.get(dtype.newbyteorder("="))


def encode_strings(array: np.ndarray) -> bytes:
    """Encodes an array of bytes or str as the content of a BYTES tensor, in row-major order. A str becomes UTF-8.

    Elements of other types are encoded as ``str(element)``. Raises: InvalidArgument: an element is None or not valid Unicode.
    """
    values = array.ravel().tolist()
    try:
        return strings.encode(values)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"an element of a BYTES tensor is not valid Unicode: {error}") from None
    except TypeError:
        if any(value is None for value in values):
            raise InvalidArgument("an element of a BYTES tensor is None, bytes or str is expected") from None
    return encode_strings(np.array([value if isinstance(value, bytes) else str(value) for value in values], object))


def decode_strings(content: Any, shape: Sequence[int]) -> np.ndarray:
    """Decodes BYTES content to an object array of ``bytes``. Raises ValueError if ``content`` does not fit the shape."""
    content = bytes(content)
    values, end = strings.decode(content, 0, len(content))
    if end < len(content):
        raise ValueError(f"a BYTES tensor ends within {'a length' if end + 4 > len(content) else 'an element'}")
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made.reshape(tuple(shape))


def decode(content: Any, datatype: str, shape: Sequence[int]) -> np.ndarray:
    """Makes an array of a tensor's bytes. The array is a view of them, or a copy if the datatype is BYTES.

    Raises: ValueError: ``content`` has another number of bytes than the shape needs.  InvalidArgument: there is no such
      datatype.
    """
    if datatype == "BYTES":
        return decode_strings(content, shape)
    return np.frombuffer(content, dtype_of(datatype)).reshape(tuple(shape))


def array_at(address: int, shape: tuple[int, ...], dtype: np.dtype, owner: Any, read_only: bool = False) -> np.ndarray:
    """Makes an array of the memory at ``address``, without a copy. The array keeps ``owner`` alive.

    Sets the attribute ``__array_interface__`` of ``owner``.
    """
    # numpy reads the name of bfloat16 as that of a struct: the array is made of raw bytes first.
    is_raw = dtype.kind == "V" and dtype.names is None
    kind = f"|V{dtype.itemsize}" if is_raw else dtype.str
    owner.__array_interface__ = {"version": 3, "shape": shape, "typestr": kind, "data": (address, read_only)}
    array = np.asarray(owner)
    return array.view(dtype) if is_raw else array
