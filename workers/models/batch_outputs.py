"""What one run computed for all of its requests, uncut: small answers are cut out of it as bytes, without an array for each.

content   | row 0 | row 1 | ... |      of one output, or of several whose rows are side by side
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shm.arrays import Array
from workers.models.packing import Packing
from workers.models.signature import Signature

#: All outputs of a run; more are cut as arrays, so that nothing large is copied twice.
_LIMIT = 1 << 18


#: One output of all requests: name, datatype, content, start, step, byte size and shape of a row. Row n begins at
#: ``start + n * step``; if others lie between its rows, each request has one. Without names for its parts, because it is
#: taken apart for every answer.
Output = tuple[str, str, bytes, int, int, int, tuple[int, ...]]


class BatchOutputs(NamedTuple):
    """The outputs, in the order of the model."""

    outputs: tuple[Output, ...]
    #: One row of all of them.
    row_byte_size: int
    #: Whether an answer's shape begins with its number of rows: the model has a batch dimension.
    batches: bool


def uncut(signature: Signature, arrays: Mapping[str, Array], slots: bool) -> BatchOutputs | None:
    """``slots``: each array begins with a dimension for the rows of a batch; else it is one row.

    None: they are too large for this.
    """
    outputs: list[Output] = []
    left, row_byte_size = _LIMIT, 0
    for name, array in arrays.items():
        left -= array.nbytes
        if left < 0:
            return None
        size = array.nbytes // len(array) if slots else array.nbytes
        shape = array.shape[1:] if slots else array.shape
        outputs.append((name, signature.outputs[name].datatype, array.tobytes(), 0, size, size, shape))
        row_byte_size += size
    return BatchOutputs(tuple(outputs), row_byte_size, signature.batches)


def uncut_rows(signature: Signature, packing: Packing, stacks: Sequence[Array]) -> BatchOutputs | None:
    """``stacks``: packed outputs, a row for each request. None: they are too large for this."""
    if sum([stack.nbytes for stack in stacks]) > _LIMIT:
        return None
    rows = [(stack.tobytes(), stack.itemsize, stack.shape[1] * stack.itemsize) for stack in stacks]
    outputs: list[Output] = []
    for name, row, start, stop, shape in packing.parts:
        content, item, step = rows[row]
        datatype = signature.outputs[name].datatype
        outputs.append((name, datatype, content, start * item, step, (stop - start) * item, shape))
    return BatchOutputs(tuple(outputs), sum([step for _, _, step in rows]), signature.batches)
