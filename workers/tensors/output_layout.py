"""Describes where each output of a program is in the buffers that a run of the program returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tensord.shm.arrays import Array
from tensord.workers.tensors.signature import Signature

#: Bytes of all outputs of a run; larger ones are cut as arrays, so that nothing large is copied twice.
UNCUT_BYTE_SIZE = 1 << 18

#: One output of all requests: name, datatype, which of the contents, start, step, byte size and shape of a row. Row n begins at
#: ``start + n * step``; if others lie between its rows, each request has one. An ordinary tuple, because every answer
#: unpacks it.
Output = tuple[str, str, int, int, int, int, tuple[int, ...]]


class OutputLayout:
    """Says where each output of a program lies in the buffers of a run. Layouts are compared by identity."""

    __slots__ = ("batches", "outputs", "row_byte_size")

    def __init__(self, outputs: Sequence[Output], batches: bool) -> None:
        #: Outputs in the model's order.
        self.outputs = tuple(outputs)
        #: Bytes of one row of all outputs.
        self.row_byte_size = sum([size for _, _, _, _, _, size, _ in outputs])
        #: True if an answer's shape begins with its number of rows: the model has a batch dimension.
        self.batches = batches

    def __repr__(self) -> str:
        return f"<OutputLayout {len(self.outputs)} outputs, {self.row_byte_size} bytes a row>"


class BatchOutputs(NamedTuple):
    """The outputs of a batch's run as bytes. ``layout`` says where the bytes of each request are."""

    layout: OutputLayout
    contents: list[bytes]


def layout_of(signature: Signature, arrays: Mapping[str, Array], slots: bool) -> OutputLayout:
    """Returns the layout of a run's outputs, if the run returns each output as a separate array.

    ``arrays``: output name -> array. ``slots``: whether the first dimension of each array counts rows; False: one row.
    """
    outputs: list[Output] = []
    for number, (name, array) in enumerate(arrays.items()):
        size = array.nbytes // len(array) if slots else array.nbytes
        shape = array.shape[1:] if slots else array.shape
        outputs.append((name, signature.outputs[name].datatype, number, 0, size, size, shape))
    return OutputLayout(outputs, signature.batches)


def uncut(layout: OutputLayout, contents: Sequence[Array | bytes]) -> BatchOutputs | None:
    """Returns a run's outputs as bytes, with ``layout``. Returns None if the outputs exceed ``UNCUT_BYTE_SIZE`` bytes.

    ``contents``: the buffers that the run returned. ``layout``: says in which buffer each output is, and where in the buffer.
    """
    if sum([len(content) if isinstance(content, bytes) else content.nbytes for content in contents]) > UNCUT_BYTE_SIZE:
        return None
    return BatchOutputs(layout, [content if isinstance(content, bytes) else content.tobytes() for content in contents])
