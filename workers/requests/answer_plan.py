"""Plans answers: how they are cut out of a run's outputs, and where each of their outputs goes.

    prepared request, layout of a program's outputs ─▶ AnswerPlan, kept in the request's Preparation
    AnswerPlan ─▶ one answer (workers/dispatch/answers.py) ─▶ the C part: the same, outside of Python
    number of the prepared answer ─▶ answers: of many requests, or many to one request

Outputs that a program writes into a lease of the response arena are planned by ``workers/processor/single_run.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tensord.shm.arrays import Array
from tensord.shm.messages import AnswerRecord, Parameter, PreparedAnswer, RegionSlice
from tensord.shm.prepared import Numbered
from tensord.shm.record import encoder
from tensord.workers.native.extensions import available

if available:
    from tensord.workers.native import _native


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


def answers(number: int, request_ids: list[int], sizes: tuple[int, ...], contents: Array | bytes) -> list[bytes]:
    """Encodes an answer to each of many requests that share one prepared answer.

    Args:
      number: the number of the prepared answer.
      sizes: how many bytes each output has.
      contents: the bytes of each request's outputs one after the other, without gaps.

    Raises ValueError: the contents have more or fewer bytes.
    """
    if available:
        return _native.answers(number, request_ids, sizes, contents)
    content = contents if isinstance(contents, bytes) else contents.tobytes()
    at, made = 0, []
    if len(content) != len(request_ids) * sum(sizes):
        raise ValueError(f"{len(content)} bytes for {len(request_ids)} answers of {sum(sizes)} bytes")
    for request_id in request_ids:
        outputs = []
        for size in sizes:
            outputs.append(content[at : at + size])
            at += size
        made.append(encoder.encode(AnswerRecord(request_id, number, tuple(outputs))))
    return made
