"""Plans answers: how they are cut out of a run's outputs, and where each of their outputs goes.

    prepared request, layout of a program's outputs ─▶ AnswerPlan, kept in the request's Preparation
    AnswerPlan ─▶ one answer (workers/dispatch/answers.py) ─▶ the C part: the same, outside of Python
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
from typing import NamedTuple

import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.messages import AnswerRecord, Parameter, PreparedAnswer, RegionSlice
from tensord.shm.prepared import Numbered
from tensord.shm.record import encoder

#: An id of as many bytes as ids can have, and one that differs from it in the first of them.
_ID, _OTHER_ID = 0x8000000000000000, 0xFF00000000000000


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
