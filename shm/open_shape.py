"""Shapes with one open dimension, -1, whose size is computed from the data. Pure functions.

Source: KServe's schema of inference requests, "Use -1 for variable-length or batch dimensions".
"""

from __future__ import annotations

from collections.abc import Sequence

from tensord.shm import strings
from tensord.shm.datatypes import ELEMENT_SIZES, element_count
from tensord.shm.errors import InvalidArgument

OPEN = -1


def is_open(shape: Sequence[int]) -> bool:
    """Returns whether a dimension of the shape is open (-1)."""
    return OPEN in shape


def check(shape: Sequence[int], what: str) -> None:
    """Raises InvalidArgument if more than one dimension is open (-1), or the other dimensions are not a valid shape.

    ``what`` names the shape in errors.
    """
    if shape.count(OPEN) > 1:
        raise InvalidArgument(
            f"{what} {_shown(shape)} has {shape.count(OPEN)} dimensions of -1, at most 1 can be found from the data"
        )
    element_count([dim for dim in shape if dim != OPEN], what)


def closed(shape: Sequence[int], count: int, what: str) -> tuple[int, ...]:
    """Returns the shape with its open dimension (-1) replaced by the size that gives the shape ``count`` elements.

    ``what`` names the shape in errors. Raises InvalidArgument: no size of the open dimension gives ``count`` elements.
    """
    check(shape, what)
    given = element_count([dim for dim in shape if dim != OPEN], what)
    if not given or count % given:
        raise InvalidArgument(f"{what} {_shown(shape)} cannot have the {count} elements that are given")
    return tuple([count // given if dim == OPEN else dim for dim in shape])


def elements(datatype: str, content: bytes | memoryview, what: str) -> int:
    """Returns how many elements a tensor's content holds, as it came over the protocol; ``what`` names the tensor in errors.

    A last element of BYTES that is cut short counts. Raises InvalidArgument: the content ends within an element of fixed size.
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
