"""The outputs of one run for all of its requests: small answers are cut out of them as bytes, without an array for each request.

content   | row 0 | row 1 | ... |      of one output, or of several whose rows are side by side

Every run of a program has its outputs at the same places. These places are its ``OutputLayout``, by which answers are planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tensord.shm.arrays import Array
from tensord.workers.tensors.signature import Signature

#: Bytes of all outputs of a run; larger ones are cut as arrays, so that nothing large is copied twice.
LIMIT = 1 << 18


class PackedTensor(NamedTuple):
    """Where a ``Packing`` puts one tensor: in which row (one array for each dtype), and in which of its elements."""

    name: str
    #: The number of its row.
    row: int
    #: In elements of the row.
    start: int
    stop: int
    shape: tuple[int, ...]


class Packing:
    """Packs a request's tensors into one array (row) for each dtype, in which they lie side by side.

    FP32    | a: 3 elements | b: 2 elements |
    INT64   | n: 1 element |

    Calling a program costs more with each argument and each result.
    """

    __slots__ = ("parts", "rows")

    def __init__(self, tensors: Iterable[tuple[str, tuple[int, ...], np.dtype[Any]]]) -> None:
        """Plans the rows. ``tensors``: name, shape and dtype of each tensor, in the order in which they are packed."""
        numbers: dict[np.dtype[Any], int] = {}
        sizes: list[int] = []
        #: Places of the tensors, in the order in which they were given.
        self.parts: list[PackedTensor] = []
        for name, shape, dtype in tensors:
            number = numbers.setdefault(dtype, len(numbers))
            if number == len(sizes):
                sizes.append(0)
            start = sizes[number]
            sizes[number] += int(np.prod(shape, dtype=np.int64))
            self.parts.append(PackedTensor(name, number, start, sizes[number], shape))
        #: dtype and number of elements of each row.
        self.rows = list(zip(numbers, sizes, strict=True))

    def pack(self, tensors: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns rows that hold these tensors; called while a function is traced."""
        rows: list[list[Any]] = [[] for _ in self.rows]
        for part in self.parts:
            rows[part.row].append(jnp.ravel(tensors[part.name]))
        return tuple([jnp.concatenate(tensors_of_row) for tensors_of_row in rows])

    def unpack(self, rows: Any) -> dict[str, Any]:
        """Returns the tensors in these rows, by name. In numpy rows the tensors are views; the rows may also be traced."""
        return {part.name: rows[part.row][part.start : part.stop].reshape(part.shape) for part in self.parts}

    def __repr__(self) -> str:
        return f"<Packing {len(self.parts)} tensors in {len(self.rows)} rows>"


#: One output of all requests: name, datatype, which of the contents, start, step, byte size and shape of a row. Row n begins at
#: ``start + n * step``; if others lie between its rows, each request has one. An ordinary tuple, because every answer
#: unpacks it.
Output = tuple[str, str, int, int, int, int, tuple[int, ...]]


class OutputLayout:
    """Says where each output of a program is in the buffers that a run returns; layouts are equal only if they are one object."""

    __slots__ = ("batches", "outputs", "row_byte_size")

    def __init__(self, outputs: Sequence[Output], batches: bool) -> None:
        #: Outputs in the model's order.
        self.outputs = tuple(outputs)
        #: Bytes of one row of all outputs.
        self.row_byte_size = sum([size for _, _, _, _, _, size, _ in outputs])
        #: Whether an answer's shape begins with its number of rows: the model has a batch dimension.
        self.batches = batches

    def __repr__(self) -> str:
        return f"<OutputLayout {len(self.outputs)} outputs, {self.row_byte_size} bytes a row>"


class BatchOutputs(NamedTuple):
    """The outputs of a run as bytes, with the layout that says where each output is in them."""

    layout: OutputLayout
    contents: list[bytes]


def layout_of(signature: Signature, arrays: Mapping[str, Array], slots: bool) -> OutputLayout:
    """Returns the layout of a program's outputs if each output is in a buffer of its own.

    ``slots``: whether the first dimension of each array counts rows; otherwise each array is one row.
    """
    outputs: list[Output] = []
    for number, (name, array) in enumerate(arrays.items()):
        size = array.nbytes // len(array) if slots else array.nbytes
        shape = array.shape[1:] if slots else array.shape
        outputs.append((name, signature.outputs[name].datatype, number, 0, size, size, shape))
    return OutputLayout(outputs, signature.batches)


def layout_of_rows(signature: Signature, packing: Packing) -> OutputLayout:
    """Returns the layout of a program's packed outputs. Each buffer holds all outputs of one dtype, one row for each request."""
    outputs: list[Output] = []
    for name, row, start, stop, shape in packing.parts:
        dtype, elements = packing.rows[row]
        item = dtype.itemsize
        datatype = signature.outputs[name].datatype
        outputs.append((name, datatype, row, start * item, elements * item, (stop - start) * item, shape))
    return OutputLayout(outputs, signature.batches)


def uncut(layout: OutputLayout, contents: Sequence[Array | bytes]) -> BatchOutputs | None:
    """Returns a run's outputs as bytes with their layout, so that answers can be cut out of them as bytes.

    None: they have more than ``LIMIT`` bytes, and are to be cut as arrays, so that nothing large is copied twice.
    """
    if sum([len(content) if isinstance(content, bytes) else content.nbytes for content in contents]) > LIMIT:
        return None
    return BatchOutputs(layout, [content if isinstance(content, bytes) else content.tobytes() for content in contents])
