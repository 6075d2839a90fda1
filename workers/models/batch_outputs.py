"""What one run computed for all of its requests, uncut: small answers are cut out of it as bytes, without an array for each.

content   | row 0 | row 1 | ... |      of each output; a request has ``rows`` of them from where its first one is
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shm.arrays import Array
from workers.models.signature import Signature

#: All outputs of a run; more are cut as arrays, so that nothing large is copied twice.
_LIMIT = 1 << 18


class Output(NamedTuple):
    """One output of all requests."""

    name: str
    datatype: str
    content: bytes
    row_byte_size: int
    #: Of one row.
    shape: tuple[int, ...]


class BatchOutputs(NamedTuple):
    """The outputs, in the order of the model."""

    outputs: tuple[Output, ...]
    #: One row of all of them.
    row_byte_size: int
    #: Whether an answer's shape begins with its number of rows: the model has a batch dimension.
    batches: bool


def uncut(signature: Signature, arrays: Mapping[str, Array], slots: bool) -> BatchOutputs | None:
    """``slots``: each array begins with a dimension for the rows of a batch, or the requests of a series; else it is one row.

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
        outputs.append(Output(name, signature.outputs[name].datatype, array.tobytes(), size, shape))
        row_byte_size += size
    return BatchOutputs(tuple(outputs), row_byte_size, signature.batches)
