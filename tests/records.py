"""Represents requests and answers of a lane as one value each, whatever of them was prepared, for tests to send and compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tensord.shm.messages import (
    AnswerRecord,
    Content,
    Parameter,
    Place,
    PreparedAnswer,
    PreparedRequest,
    PreparedTensor,
    RegionSlice,
    RequestedOutput,
    RequestRecord,
    SequenceId,
    Timeline,
    placed,
)
from tensord.shm.prepared import Numbered


class Tensor(NamedTuple):
    """A tensor and where its bytes are."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    place: Place


def prepared_tensors(tensors: tuple[Tensor, ...]) -> tuple[PreparedTensor, ...]:
    """Returns the parts of tensors that a prepared request or answer has."""
    return tuple(
        PreparedTensor(name, datatype, shape, place if isinstance(place, RegionSlice) else None)
        for name, datatype, shape, place in tensors
    )


def own_contents(tensors: tuple[Tensor, ...]) -> tuple[Content, ...]:
    """Returns the parts of tensors that each record has: their bytes or slices, without those in regions."""
    return tuple(tensor.place for tensor in tensors if not isinstance(tensor.place, RegionSlice))


def whole_tensors(tensors: tuple[PreparedTensor, ...], contents: tuple[Content, ...]) -> tuple[Tensor, ...]:
    """Joins prepared tensors with the contents of a record."""
    return tuple(Tensor(each.name, each.datatype, each.shape, place) for each, place in placed(tensors, contents))


@dataclass(frozen=True)
class WholeRequest:
    """A request as one value; the fields are those of ``PreparedRequest`` and ``RequestRecord``."""

    request_id: int
    model: str
    version: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    parameters: dict[str, Parameter] = field(default_factory=dict)
    client_id: str = ""
    strikes: int = 0
    deadline_ns: int = 0
    received_ns: int = 0
    priority: int = 0
    timeout_us: int = 0
    sequence_id: SequenceId = 0
    sequence_start: bool = False
    sequence_end: bool = False
    trace: int = 0
    replace_key: str = ""
    parameter_set: str = ""

    @property
    def prepared(self) -> PreparedRequest:
        """Returns the part that requests of its kind have in common."""
        return PreparedRequest(self.model, self.version, prepared_tensors(self.inputs), self.outputs, self.parameters)

    @property
    def contents(self) -> tuple[Content, ...]:
        """Returns the contents of its tensors for its record."""
        return own_contents(self.inputs)

    @property
    def record(self) -> RequestRecord:
        """Returns the record of the request with its prepared part inside."""
        return self.of(self.prepared)

    def of(self, prepared: int | PreparedRequest) -> RequestRecord:
        """Returns the record of the request with the number of its prepared part, or with the part itself."""
        own = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        for name in ("request_id", "model", "version", "inputs", "outputs", "parameters"):
            del own[name]
        return RequestRecord(self.request_id, prepared, self.contents, **own)


def whole_request(prepared: PreparedRequest, own: RequestRecord) -> WholeRequest:
    """Joins a prepared request and a record into one value.

    Raises InvalidArgument: the record has too many contents, or too few.
    """
    return WholeRequest(
        own.request_id,
        prepared.model,
        prepared.version,
        whole_tensors(prepared.inputs, own.contents),
        prepared.outputs,
        prepared.parameters,
        own.client_id,
        own.strikes,
        own.deadline_ns,
        own.received_ns,
        own.priority,
        own.timeout_us,
        own.sequence_id,
        own.sequence_start,
        own.sequence_end,
        own.trace,
        own.replace_key,
        own.parameter_set,
    )


@dataclass(frozen=True)
class WholeAnswer:
    """An answer as one value; the fields are those of ``PreparedAnswer`` and ``AnswerRecord``."""

    request_id: int
    code: str = ""
    message: str = ""
    final: bool = True
    version: int = 0
    outputs: tuple[Tensor, ...] = ()
    lease: tuple[int, int, int] | None = None
    parameters: dict[str, Parameter] = field(default_factory=dict)
    trace: Timeline | None = None

    @property
    def prepared(self) -> PreparedAnswer:
        """Returns the part that answers of its kind have in common."""
        return PreparedAnswer(self.version, prepared_tensors(self.outputs), self.parameters, self.final)

    @property
    def contents(self) -> tuple[Content, ...]:
        """Returns the contents of its tensors for its record."""
        return own_contents(self.outputs)

    @property
    def record(self) -> AnswerRecord:
        """Returns the record of the answer with its prepared part inside."""
        return self.of(self.prepared)

    def of(self, prepared: int | PreparedAnswer) -> AnswerRecord:
        """Returns the record of the answer with the number of its prepared part, or with the part itself."""
        return AnswerRecord(self.request_id, prepared, self.contents, self.lease, self.code, self.message, self.trace)


def whole_answer(prepared: PreparedAnswer, record: AnswerRecord) -> WholeAnswer:
    """Joins a prepared answer and a record into one value."""
    outputs = whole_tensors(prepared.outputs, record.contents)
    return WholeAnswer(
        record.request_id,
        record.code,
        record.message,
        prepared.final,
        prepared.version,
        outputs,
        record.lease,
        prepared.parameters,
        record.trace,
    )


def noting(sent: list[WholeAnswer]) -> Callable[..., None]:
    """Returns a stand-in for ``WorkerLane.complete`` that appends each answer, as one value, to the list."""

    def complete(record: AnswerRecord, numbered: Numbered[PreparedAnswer] | None = None) -> None:
        prepared = record.prepared if numbered is None else numbered.prepared
        assert isinstance(prepared, PreparedAnswer)
        sent.append(whole_answer(prepared, record))

    return complete


def is_numbered(record: RequestRecord | None) -> bool:
    """Returns whether a request's record has the number of its prepared part, as one that repeats another."""
    return record is not None and isinstance(record.prepared, int)
