"""Plans answers: how they are cut out of a run's outputs, and where each of their outputs goes.

    outputs of a run for all of its requests   | row 0 | row 1 | ... |      of one output, or of several side by side
    where each output is in them: OutputLayout, the same for every run of a program

    prepared request, layout of a program's outputs ─▶ AnswerPlan, kept in the request's Preparation
    AnswerPlan ─▶ write: one answer ─▶ the C part: the same, outside of Python (workers/dispatch/fast_path.py)
    number of the prepared answer ─▶ AnswerRows: one answer to each of many requests
                                  ─▶ answer_pieces: many answers to one request

Outputs that a program writes into a lease of the response arena are planned by ``workers/processor/single_run.py``.

Records with the same number of a prepared answer are copies of one encoded record, which costs less than encoding each of them:

    | array | tag | request id u64 | number | outputs | no lease, code, trace |      all of one size

They differ in the id and in the bytes of their outputs. Where these are is found by comparing encoded records that differ in
nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.cuda_regions import CudaRegion
from tensord.shm.messages import AnswerRecord, Parameter, PreparedAnswer, PreparedTensor, RegionSlice
from tensord.shm.prepared import Numbered
from tensord.shm.record import encoder
from tensord.workers.regions.region_table import check_intact
from tensord.workers.tensors.signature import Signature

if TYPE_CHECKING:
    from tensord.workers.requests.request import Request

#: An id of as many bytes as ids can have, and one that differs from it in the first of them.
_ID, _OTHER_ID = 0x8000000000000000, 0xFF00000000000000
#: Bytes of all outputs of a run; larger ones are cut as arrays, so that nothing large is copied twice.
UNCUT_BYTE_SIZE = 1 << 18

#: One output of all requests: name, datatype, which of the contents, start, step, byte size and shape of a row. Row n begins at
#: ``start + n * step``; if others lie between its rows, each request has one. An ordinary tuple, because every answer
#: unpacks it.
Output = tuple[str, str, int, int, int, int, tuple[int, ...]]


class OutputLayout:
    """Describes where each output of a program is in the buffers that a run returns. Layouts are compared by identity."""

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
    """Returns the layout of a program's outputs, each of which is in a buffer of its own.

    ``slots``: whether the first dimension of each array counts rows; otherwise each array is one row.
    """
    outputs: list[Output] = []
    for number, (name, array) in enumerate(arrays.items()):
        size = array.nbytes // len(array) if slots else array.nbytes
        shape = array.shape[1:] if slots else array.shape
        outputs.append((name, signature.outputs[name].datatype, number, 0, size, size, shape))
    return OutputLayout(outputs, signature.batches)


def uncut(layout: OutputLayout, contents: Sequence[Array | bytes]) -> BatchOutputs | None:
    """Returns a run's outputs as bytes with their layout, so that answers can be cut out of these bytes.

    None: the outputs have more than ``UNCUT_BYTE_SIZE`` bytes. They are to be cut as arrays, so that nothing large is copied
    twice.
    """
    if sum([len(content) if isinstance(content, bytes) else content.nbytes for content in contents]) > UNCUT_BYTE_SIZE:
        return None
    return BatchOutputs(layout, [content if isinstance(content, bytes) else content.tobytes() for content in contents])


class PlannedOutput(NamedTuple):
    """Describes where the bytes of one output are in the results of a run, and where an answer's part of them goes.

    Row n of the batch begins at ``start + n * step`` in the results. An output in a lease of the response arena begins at
    ``start`` of the lease; its program writes all its rows there.
    """

    #: Which of the run's contents.
    content: int
    start: int
    step: int
    byte_size: int
    #: None: into the record, or the lease.
    region: RegionSlice | None
    in_lease: bool = False


class AnswerPlan(NamedTuple):
    """Describes how answers are built from a run's outputs: everything about them but the bytes of the tensors.

    It holds for requests with the same prepared request.
    """

    #: As the record has it: its number, or all of it where it has none.
    said: int | PreparedAnswer
    numbered: Numbered[PreparedAnswer] | None
    #: In the order of the answer's outputs.
    parts: list[PlannedOutput]
    #: Of all parts together, for one row.
    row_byte_size: int
    #: Whether all of them go into the record.
    inside: bool
    #: What it says of the parameter set.
    told: Mapping[str, Parameter]

    def number(self, numbered: Numbered[PreparedAnswer]) -> AnswerPlan:
        """Returns a copy of the plan whose answers do not carry their constant part, but name it by its number.

        ``numbered``: that part (the prepared answer), with its number.
        """
        return self._replace(said=numbered.number, numbered=numbered)

    def write(self, request: Request, made: BatchOutputs, row: int) -> AnswerRecord | None:
        """Writes a request's outputs that go to regions, and returns the record of its answer, which has the other outputs.

        Args:
          made: the outputs of the request's batch.
          row: the batch's row at which the request begins.
        Returns: the record; None if a region of the request is GPU memory by now: nothing was written then.
        Raises: InvalidArgument: a region does not exist any more.
        """
        rows, contents = request.rows, made.contents
        parts = [
            contents[number][(at := start + row * step) : at + rows * size]
            for number, start, step, size, _, _ in self.parts
        ]
        if request.regions:
            for used in request.regions:
                if isinstance(used, CudaRegion):
                    return None
            for (*_, place, _), part in zip(self.parts, parts, strict=True):
                if place is not None and part:
                    target = request.leased(place.region)
                    assert not isinstance(target, CudaRegion)
                    target.write(place.offset, part)
            check_intact(request.regions)
            if not self.inside:
                parts = [part for (*_, place, _), part in zip(self.parts, parts, strict=True) if place is None]
        request.copied_byte_size += rows * self.row_byte_size
        return AnswerRecord(request.request_id, self.said, tuple(parts))


def plan_answer(request: Request, layout: OutputLayout, inline_byte_size: int) -> AnswerPlan | None:
    """Plans the answers to requests like this one: each output goes into the answer's record (message), or into a region.

    ``layout``: where each output is in a run's results. ``inline_byte_size``: the most bytes that all outputs of an answer may
    have.

    Returns: None if they have more bytes, if one is wanted as class labels (classification), or if one does not fit into its
    region.
    """
    rows, wishes = request.rows, request.outputs
    if rows * layout.row_byte_size > inline_byte_size:
        return None
    tensors: list[PreparedTensor] = []
    parts: list[PlannedOutput] = []
    for name, datatype, content, start, step, size, shape in layout.outputs:
        region: RegionSlice | None = None
        if wishes:
            wanted = wishes.get(name)
            if wanted is None:
                continue
            region = wanted.region
            if wanted.classification or (region is not None and region.byte_size < rows * size):
                return None
        tensors.append(PreparedTensor(name, datatype, (rows, *shape) if layout.batches else shape, region))
        parts.append(PlannedOutput(content, start, step, size, region))
    prepared = PreparedAnswer(request.version.version, tuple(tensors), dict(request.told))
    inside = all(part.region is None for part in parts)
    return AnswerPlan(prepared, None, parts, sum([part.byte_size for part in parts]), inside, request.told)


class AnswerRows:
    """Encodes answers to many requests that share one prepared answer.

    ``name`` sets the requests, then ``records`` makes their answers.
    """

    def __init__(self, number: int, sizes: Sequence[int]) -> None:
        """``number``: the number of the prepared answer. ``sizes``: how many bytes each output has."""
        self._sample, self._id_at, content = _layout(number, sizes)
        #: Of one output: a slice costs less.
        self._content: Array | slice = slice(content[0], content[-1] + 1) if len(sizes) == 1 else content
        self._rows = self._sample[None]

    def name(self, request_ids: Sequence[int]) -> None:
        """Sets the ids of the requests that the next call of ``records`` answers, in order."""
        self._rows = np.tile(self._sample, (len(request_ids), 1))
        self._rows[:, self._id_at : self._id_at + 8] = np.array(request_ids, ">u8").view(np.uint8).reshape(-1, 8)

    def records(self, contents: Array) -> list[bytes]:
        """Returns an encoded answer for each request.

        ``contents``: the bytes of each request's outputs one after the other, UINT8[requests, size].
        """
        rows, size = self._rows, len(self._sample)
        rows[:, self._content] = contents
        encoded = rows.tobytes()
        return [encoded[at : at + size] for at in range(0, len(encoded), size)]

    def __repr__(self) -> str:
        return f"<AnswerRows {self._rows.shape}>"


def answer_pieces(number: int, sizes: Sequence[int]) -> tuple[bytes, int, list[bytes]]:
    """Returns the parts of an answer's record (encoded message) that stay the same, whatever its outputs contain.

    Args:
      number: the number of the prepared answer.
      sizes: how many bytes each output has.
    Returns: the bytes before the outputs, the offset of the request id in these, and the bytes that follow each output.
    """
    sample, id_at, content = _layout(number, sizes)
    encoded, cuts, at = sample.tobytes(), [0], 0
    for size in sizes:
        # An output without bytes stands nowhere: it is with what follows.
        begin = int(content[at]) if at < len(content) else len(encoded)
        cuts += [begin, begin + size]
        at += size
    cuts.append(len(encoded))
    head, *behind = [encoded[begin:end] for begin, end in zip(cuts[::2], cuts[1::2], strict=True)]
    return head, id_at, behind


def _layout(number: int, sizes: Sequence[int]) -> tuple[Array, int, Array]:
    """Returns a sample record of an answer, the offset of the request id in it, and the offsets of all bytes of its outputs.

    ``number``: of the prepared answer. ``sizes``: how many bytes each output has.
    """
    sample = _encoded(_ID, number, [bytes(size) for size in sizes])
    id_at = int(np.argmax(sample != _encoded(_OTHER_ID, number, [bytes(size) for size in sizes])))
    return sample, id_at, np.flatnonzero(sample != _encoded(_ID, number, [b"\xff" * size for size in sizes]))


def _encoded(request_id: int, number: int, contents: list[bytes]) -> Array:
    return np.frombuffer(encoder.encode(AnswerRecord(request_id, number, tuple(contents))), np.uint8)
