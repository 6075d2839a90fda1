"""Keeps what a worker computes once for all requests with the same prepared part: results of checks, and plans for answers.

A plan (``AnswerPlan``) says how the outputs of a run of a model become the answer to a request.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.messages import AnswerRecord, Parameter, PreparedAnswer, PreparedRequest, RegionSlice, RequestedOutput
from tensord.shm.prepared import Numbered
from tensord.shm.record import encoder
from tensord.workers.native.extensions import available
from tensord.workers.tensors.output_layout import OutputLayout

if available:
    from tensord.workers.native import _native


class PlannedOutput(NamedTuple):
    """Says where a run of a program leaves one output of a request, and where the answer has the output.

    Row n of the output has ``byte_size`` bytes, from byte ``start + n * step`` of the run's buffer number ``content`` on.
    """

    #: The number of the content among those of the run.
    content: int
    start: int
    step: int
    byte_size: int
    #: None: into the record.
    region: RegionSlice | None


class AnswerPlan(NamedTuple):
    """Says how a run's outputs become the answer to a request. Requests with the same prepared part share the plan."""

    #: The prepared answer as the record has it: its number, or all of it where it has none.
    said: int | PreparedAnswer
    numbered: Numbered[PreparedAnswer] | None
    #: The parts of the answer, in the order of its outputs.
    parts: list[PlannedOutput]
    #: The bytes of all parts together, for one row.
    row_byte_size: int
    #: True if all of them go into the record.
    inside: bool
    #: The parameters by which the answer says which parameter set it was computed with.
    told: Mapping[str, Parameter]

    def number(self, numbered: Numbered[PreparedAnswer]) -> AnswerPlan:
        """Returns a copy of this plan whose answers contain ``numbered.number`` in place of the outputs' names and shapes."""
        return self._replace(said=numbered.number, numbered=numbered)


def answers(number: int, request_ids: list[int], sizes: tuple[int, ...], contents: Array | bytes) -> list[bytes]:
    """Encodes one answer for each request in ``request_ids``. All these answers have the same prepared part.

    ``number``: the number of the prepared part. ``sizes``: how many bytes each output has in one answer.
    ``contents``: all outputs of the first request, then all outputs of the second request, and so on, without gaps.
    Raises ValueError if the length of ``contents`` is not ``len(request_ids) * sum(sizes)`` bytes.
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


#: Kinds of inputs remembered for one load, and plans for one number.
_MAX_CHECKED = 256
_MAX_PLANS = 64
#: Stands in place of a number for an output that is inside the record.
INLINE = -1

#: (name, datatype, shape) of each input, in the order of the request.
Inputs = tuple[tuple[str, str, tuple[int, ...]], ...]


class Checked(NamedTuple):
    """The result of checking the names, datatypes and shapes of a request's inputs, valid until the model is loaded again."""

    #: The value that requests must have in common to run together.
    key: Hashable
    rows: int
    #: True if the bytes of all of them are the arrays as the model takes them; then their dtypes and sizes are here.
    plain: bool
    dtypes: list[np.dtype[Any]]
    sizes: list[int]


class CheckedInputs(dict[Inputs, Checked]):
    """A bounded cache of check results for one load of a model version. Its keys are names, datatypes and shapes of inputs."""

    __slots__ = ()

    def learn(self, inputs: Inputs, checked: Checked) -> None:
        """Stores the result of checking valid inputs. If the cache is full, clears it first."""
        if len(self) >= _MAX_CHECKED:
            self.clear()
        self[inputs] = checked


class Preparation:
    """Stores results of checks, and plans for answers, for all requests with the same prepared part, to save repeated work.

    The stored results are valid for one load of the model.
    """

    __slots__ = ("checked", "large", "load", "number", "outputs", "own", "plans", "prepared")

    def __init__(self, prepared: PreparedRequest, number: int = INLINE) -> None:
        """Makes a ``Preparation`` for all requests whose prepared part is ``prepared``. No request has been checked yet.

        ``number``: the number of the prepared part on its lane, or ``INLINE`` if the prepared part has no number.
        """
        self.number = number
        self.prepared = prepared
        #: True if all of its tensors are each request's own, and none lies in a region.
        self.own = not [tensor for tensor in prepared.inputs if tensor.region is not None]
        #: Stands for the load whose requests they are, without keeping the model; None: none was validated so far.
        self.load: CheckedInputs | None = None
        #: The result of checking their inputs; None: each has another shape.
        self.checked: Checked | None = None
        #: The outputs that they ask for, by name; None: they name regions, which must be looked at each time.
        self.outputs: Mapping[str, RequestedOutput] | None = None
        #: The plans of answers, by how a run's outputs lie.
        self.plans: dict[OutputLayout, AnswerPlan] = {}
        #: The number of the last answer with large outputs.
        self.large: Numbered[PreparedAnswer] | None = None

    def learn(self, load: CheckedInputs, checked: Checked | None, outputs: Mapping[str, RequestedOutput]) -> None:
        """Stores what checks of a valid request found, for later requests with the same prepared part.

        ``load``: the attribute ``checked`` of the request's model version. ``checked``: the result of checking the inputs;
        None: the inputs of each later request must be checked again. ``outputs``: the requested outputs by name.
        """
        self.load, self.checked = load, checked
        self.outputs = outputs if not any(output.region is not None for output in outputs.values()) else None
        self.plans = {}
        self.large = None

    def plan(self, layout: OutputLayout, plan: AnswerPlan) -> None:
        """Stores the plan for answers whose outputs have this layout. First drops all earlier plans if there are too many."""
        if len(self.plans) >= _MAX_PLANS:
            self.plans.clear()
        self.plans[layout] = plan

    def __repr__(self) -> str:
        return f"<Preparation for {self.prepared.model!r}, {len(self.plans)} plans>"
