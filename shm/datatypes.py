"""Names and element sizes of the protocol's datatypes, and functions on shapes. This module does not import numpy.

Check every size that comes from a client with ``element_count`` or ``byte_size`` before you allocate memory for it. They refuse
sizes above fixed limits, so their results fit into 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensord.shm import strings
from tensord.shm.common.datatypes import DATATYPES
from tensord.shm.errors import InvalidArgument

#: Bytes per element; None where an element's length varies (BYTES: u32 little-endian length, then the bytes).
ELEMENT_SIZES = {name: each.byte_size for name, each in DATATYPES.items()}

#: KServe's other name for BYTES: its schema of requests has both.
_BYTES_ALIAS = "STRING"

#: numpy's own limit since 2.0 is 64; no model needs half of it.
MAX_RANK = 32
#: The largest element has 8 bytes, so every byte size is an int64 as the protocol wants it, and a size numpy takes.
MAX_ELEMENTS = (1 << 60) - 1
#: The size of an open dimension, which is computed from the data. Source: KServe's schema of inference requests.
OPEN = -1


def wire_name(datatype: str) -> str:
    """Returns a datatype's name in records: "BYTES" for "STRING", and any other text unchanged."""
    return "BYTES" if datatype == _BYTES_ALIAS else datatype


def from_model_config(data_type: str) -> str:
    """Converts ``TYPE_FP32`` to ``FP32``, and ``TYPE_STRING`` to ``BYTES``. Raises InvalidArgument if the datatype is unknown."""
    name = "BYTES" if data_type == "TYPE_STRING" else data_type.removeprefix("TYPE_")
    if not data_type.startswith("TYPE_") or name not in ELEMENT_SIZES:
        raise InvalidArgument(f"unknown data type '{data_type}'")
    return name


def to_model_config(datatype: str) -> str:
    """Converts ``FP32`` to ``TYPE_FP32``, and ``BYTES`` to ``TYPE_STRING``. It does not check whether the datatype exists."""
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def element_count(shape: Sequence[int], what: str = "shape") -> int:
    """Returns the number of elements of a shape. ``what`` names the shape in errors.

    Raises InvalidArgument if a dimension is negative, if there are more than ``MAX_RANK`` dimensions, or if the product of
    all dimensions above 0 exceeds ``MAX_ELEMENTS``.
    """
    if len(shape) > MAX_RANK:
        raise InvalidArgument(f"{what}: {len(shape)} dimensions given, at most {MAX_RANK} are allowed")
    count, empty = 1, False
    for dim in shape:
        if dim > 0:
            count *= dim
        elif dim == 0:
            empty = True
        else:
            raise InvalidArgument(f"{what}: dimension {dim} is negative")
    if count > MAX_ELEMENTS:
        raise InvalidArgument(f"{what}: {count} elements given, at most {MAX_ELEMENTS} are allowed")
    return 0 if empty else count


def byte_size(datatype: str, shape: Sequence[int], what: str = "shape") -> int | None:
    """Returns a tensor's size in bytes, or None for BYTES. ``what`` names the tensor in errors.

    Raises InvalidArgument if the datatype is unknown or the shape is not valid.
    """
    try:
        size = ELEMENT_SIZES[datatype]
    except KeyError:
        raise InvalidArgument(f"{what}: invalid datatype '{datatype}'") from None
    count = element_count(shape, what)
    return None if size is None else count * size


def is_open(shape: Sequence[int]) -> bool:
    """Returns whether a dimension of the shape is variable (-1)."""
    return OPEN in shape


def check_shape(shape: Sequence[int], what: str) -> None:
    """Raises InvalidArgument if a shape has more than one variable dimension (-1), or a dimension below -1.

    Also raises it for more than ``MAX_RANK`` dimensions besides -1, or if the product of the positive dimensions is above
    ``MAX_ELEMENTS``. ``what`` names the shape in the error.
    """
    if shape.count(OPEN) > 1:
        raise InvalidArgument(
            f"{what} {_shown(shape)} has {shape.count(OPEN)} dimensions of -1, at most 1 can be found from the data"
        )
    element_count([dim for dim in shape if dim != OPEN], what)


def closed(shape: Sequence[int], count: int, what: str) -> tuple[int, ...]:
    """Replaces the -1 in a shape by the size with which an array of that shape has ``count`` elements. Returns the shape.

    ``what`` names the shape in errors. Raises InvalidArgument if no size gives ``count`` elements.
    """
    check_shape(shape, what)
    given = element_count([dim for dim in shape if dim != OPEN], what)
    if not given or count % given:
        raise InvalidArgument(f"{what} {_shown(shape)} cannot have the {count} elements that are given")
    return tuple([count // given if dim == OPEN else dim for dim in shape])


def elements(datatype: str, content: bytes | memoryview, what: str) -> int:
    """Returns how many elements of ``datatype`` a tensor's content has. ``what`` names the tensor in errors.

    An incomplete element at the end of a BYTES tensor counts as one. Raises InvalidArgument if the content ends within an
    element of fixed size.
    """
    size = ELEMENT_SIZES[datatype]
    if size is not None:
        if len(content) % size:
            raise InvalidArgument(f"{what}: {len(content)} bytes are no whole number of {datatype}")
        return len(content) // size
    # Elements that are cut short are refused, in better words, by whoever reads them.
    count, at = strings.count(content, len(content))
    return count + (len(content) - at >= 4)


def _shown(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
