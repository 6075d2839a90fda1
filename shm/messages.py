"""The records of a lane: requests and their answers between a submitter and a worker, and where their tensors are.

Pure values, no I/O: ``tensord.shm.channel`` carries them; ``tensord.shm.record`` says what they all are,
``tensord.shm.control_records`` what travels between the supervisor and its children.

                submitter --> worker                     worker --> submitter
    lane        WireVersion                              WireVersion
                SegmentOpened, -Closed, -Refused         SegmentOpened, -Closed, -Refused
                Prepare TraceContext RequestRecord       PrepareAnswer AnswerRecord
                Release Taken Cancel

A request is what is said once (``PreparedRequest``: model, names, datatypes, shapes, regions, outputs, parameters) and what is
its own (``RequestRecord``: ids, tensors, schedule, deadline, strikes, trace); likewise an answer. What repeats itself is sent
once with a number (``Prepare``), which then stands for it (``tensord.shm.prepared``); what does not travels inside the record.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from tensord.shm.errors import InvalidArgument
from tensord.shm.record import Record

#: The edition of these records; another one whenever any of them changes.
WIRE_VERSION = 2
Parameter = bool | int | float | str
#: The bit of ``RequestRecord.trace`` that asks for ``AnswerRecord.timing``.
TIMING = 4
#: The request parameter that names a parameter set, and the one with which answers say which set they are of.
SET_PARAMETER, TELLING_PARAMETER = "parameter_set", "tensord_parameters"
#: A key by which waiting requests replace one another has at most so many bytes.
MAX_REPLACE_KEY = 128
#: Which sequence a request belongs to; 0 and "": to none. 5 and "5" are two. A string has at most that many bytes.
MAX_SEQUENCE_ID = 128
SequenceId = Annotated[int, msgspec.Meta(ge=0)] | Annotated[str, msgspec.Meta(max_length=MAX_SEQUENCE_ID)]
#: An integer that cannot be negative, in records whose sender need not be one of ours.
_Natural = Annotated[int, msgspec.Meta(ge=0)]


# --------------------------------------------------------------------------------------------------- places of tensors


class Slice(Record, frozen=True, tag="a"):
    """Bytes in an arena of the lane: ``[offset, offset + byte_size)`` of segment ``segment``."""

    segment: int
    offset: int
    byte_size: int


class RegionSlice(Record, frozen=True, tag="r"):
    """Bytes in a client's registered region. For outputs ``byte_size`` is the room, not the size written."""

    region: str
    offset: int
    byte_size: int


#: The bytes of a small tensor, or where those of a larger one are.
Content = bytes | Slice
Place = Content | RegionSlice
#: Bytes as they are, or a view of them.
Buffer = bytes | memoryview


class PreparedTensor(Record, frozen=True, tag="t"):
    """One named tensor but for its bytes, which are length-prefixed (u32 little-endian) where they are BYTES."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    #: Where it lies; None: each request, or answer, has its own content.
    region: RegionSlice | None = None


class RequestedOutput(Record, frozen=True, tag="o"):
    """An output the client asked for. ``region`` is where it goes, None for the response arena."""

    name: str
    region: RegionSlice | None = None
    #: 0: the tensor itself; k > 0: its k top classes as BYTES "value:index[:label]".
    classification: _Natural = 0


# --------------------------------------------------------------------------------------------------------------- lanes


class WireVersion(Record, frozen=True, tag="V"):
    """The first record on a lane in each direction: which edition of these records its sender speaks.

    This one never changes, so whoever speaks another edition can read it and say so.
    """

    number: int


class SegmentOpened(Record, frozen=True, tag="S+"):
    """The sender's arena grew by a sealed segment; its descriptor travels with this record."""

    segment: int
    byte_size: int


class SegmentClosed(Record, frozen=True, tag="S-"):
    """The sender will not refer to this segment again: unmap it."""

    segment: int


class SegmentRefused(Record, frozen=True, tag="S!"):
    """The peer could not map this segment of the receiver's arena: it is to be announced again before its next use."""

    segment: int


class TracedTensor(Record, frozen=True, tag="tt"):
    """A tensor of a traced request as text: elements in row-major order, comma-separated, the first ones of a large tensor."""

    activity: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    content: str
    truncated: bool


class OwnSpan(Record, frozen=True, tag="os"):
    """A part of a traced request's run that its model's code has named (``tensord.models.span``)."""

    name: str
    #: CLOCK_MONOTONIC ns.
    began_ns: int
    ended_ns: int
    attributes: dict[str, Parameter] = msgspec.field(default_factory=dict)
    #: Its place among the spans of the request that it is a part of, counted from 1; 0: of the run itself.
    parent: int = 0
    #: The kind of exception that left it; "": none did.
    error: str = ""


class Timeline(Record, frozen=True, tag="tl"):
    """What a traced request met in the worker: names and CLOCK_MONOTONIC ns, and its tensors."""

    moments: tuple[tuple[str, int], ...]
    tensors: tuple[TracedTensor, ...] = ()
    #: Of a request that was made inside the worker for the traced one: what it was for, and which load of it.
    model: str = ""
    version: int = 0
    #: Those of requests that were made for this one.
    children: tuple[Timeline, ...] = ()
    #: Name and number of the pushed parameter set that it was computed with; None: of none.
    parameters: tuple[str, int] | None = None
    #: What the model's code has named, each behind what it is a part of.
    spans: tuple[OwnSpan, ...] = ()


class PreparedRequest(Record, frozen=True, tag="P"):
    """Holds what requests of one kind have in common."""

    model: str
    #: 0: the newest ready version.
    version: int = 0
    inputs: tuple[PreparedTensor, ...] = ()
    #: Empty: all outputs.
    outputs: tuple[RequestedOutput, ...] = ()
    #: Reserved keys (sequence_*, priority, timeout, tensord_replace, binary_data_output) are taken out before this.
    parameters: dict[str, Parameter] = msgspec.field(default_factory=dict)


class Prepare(Record, frozen=True, tag="Q+"):
    """Assigns a number on this lane to what it carries, from now on."""

    number: int
    prepared: PreparedRequest


class TraceContext(Record, frozen=True, tag="tc"):
    """Says which trace the request belongs to that follows, if it has this id. From fronts, of traced requests alone."""

    request_id: int
    #: In hexadecimal digits as W3C Trace Context has it, or the number of the trace in its file.
    trace_id: Annotated[str, msgspec.Meta(max_length=32)]
    #: Of the request's own span; "": it has none, because the trace goes to a file alone.
    span_id: Annotated[str, msgspec.Meta(max_length=16)] = ""


class RequestRecord(Record, frozen=True, tag="q"):
    """One request. ``request_id`` is the submitter's, never reused on any lane of that submitter."""

    request_id: _Natural
    #: By its number, or as it is where it has none.
    prepared: int | PreparedRequest
    #: Of the inputs that lie in no region, in their order.
    contents: tuple[Content, ...] = ()
    #: The client's ``id``, "" when none was given.
    client_id: str = ""
    #: The submitter gives up then; 0: never. A request whose deadline passed in the queue is not run.
    deadline_ns: _Natural = 0
    #: When the front had the whole request; the queue duration counts from here. On a client's lane the worker's own clock says.
    received_ns: _Natural = 0
    priority: _Natural = 0
    timeout_us: _Natural = 0
    sequence_id: SequenceId = 0
    sequence_start: bool = False
    sequence_end: bool = False
    #: What its answer says besides, as a sum: 1 when it was where, 2 its tensors (``AnswerRecord.trace``; a client's lane ignores
    #: both), 4 what it waited, computed and copied (``AnswerRecord.timing``).
    trace: _Natural = 0
    #: How often workers have died under this request; above 0 it is run alone, so that it cannot take others with it. A client's
    #: lane ignores it.
    strikes: _Natural = 0
    #: The next request of the same key and model version takes the place of this one while it waits; "": it has no key.
    replace_key: str = ""


class Release(Record, frozen=True, tag="L"):
    """Response-arena leases the submitter is done with: (segment, offset, generation) each."""

    leases: tuple[tuple[int, int, int], ...]


class Taken(Record, frozen=True, tag="T"):
    """Its client has taken responses of a request: so many bytes (``response_byte_size``) since that was last told.

    Told by and by: who sends responses waits only where much of them was not taken.
    """

    request_id: int
    byte_size: _Natural


class Cancel(Record, frozen=True, tag="X"):
    """Nobody waits for this request any more. If it still queues it is dropped; a final answer comes either way."""

    request_id: int


class PreparedAnswer(Record, frozen=True, tag="A"):
    """Holds what answers of one kind have in common."""

    version: int = 0
    outputs: tuple[PreparedTensor, ...] = ()
    parameters: dict[str, Parameter] = msgspec.field(default_factory=dict)
    #: Exactly one answer to each request is final; of models with several responses they come in their order.
    final: bool = True


class PrepareAnswer(Record, frozen=True, tag="C+"):
    """Assigns a number on this lane to what it carries, from now on."""

    number: int
    prepared: PreparedAnswer


class AnswerRecord(Record, frozen=True, tag="c"):
    """One answer, or what went wrong."""

    request_id: int
    #: By its number, or as it is where it has none.
    prepared: int | PreparedAnswer
    #: Of the outputs that lie in no region, in their order.
    contents: tuple[Content, ...] = ()
    #: The response-arena lease that holds every Slice among the contents: (segment, offset, generation).
    lease: tuple[int, int, int] | None = None
    #: "" or a ``ServingError.code``; with a code, ``message`` is the sentence for the client.
    code: str = ""
    message: str = ""
    #: Of a request that asked for it.
    trace: Timeline | None = None
    #: Of a request that asked for it and ran: nanoseconds in the queue and in its run, and bytes that were copied for it.
    timing: tuple[int, int, int] | None = None


#: Says with ``AnswerRecord.code`` that a request failed, and without one that no response comes any more.
LAST = PreparedAnswer()
#: Says with ``AnswerRecord.code`` that a response failed and others may follow.
NOT_LAST = PreparedAnswer(final=False)


def is_mark(prepared: PreparedAnswer, answer: AnswerRecord) -> bool:
    """Returns whether an answer is no response, and says only that none comes any more."""
    return prepared.final and not (answer.code or prepared.version or prepared.outputs)


ToWorker = (
    WireVersion
    | SegmentOpened
    | SegmentClosed
    | SegmentRefused
    | Prepare
    | TraceContext
    | RequestRecord
    | Release
    | Taken
    | Cancel
)
ToSubmitter = WireVersion | SegmentOpened | SegmentClosed | SegmentRefused | PrepareAnswer | AnswerRecord


def placed(tensors: tuple[PreparedTensor, ...], contents: tuple[Content, ...]) -> list[tuple[PreparedTensor, Place]]:
    """Puts each tensor beside where its bytes are. Raises InvalidArgument: the record has too many contents, or too few."""
    rest = iter(contents)
    found: list[tuple[PreparedTensor, Place]] = []
    for tensor in tensors:
        place = next(rest, None) if tensor.region is None else tensor.region
        if place is not None:
            found.append((tensor, place))
    if len(found) < len(tensors) or next(rest, None) is not None:
        own = len([tensor for tensor in tensors if tensor.region is None])
        raise InvalidArgument(f"{len(contents)} tensors came in a record that was prepared for {own}")
    return found


#: What a response counts beside its tensors where those that nobody has taken are bounded.
_RESPONSE_BYTE_SIZE = 256


def response_byte_size(contents: tuple[Content, ...]) -> int:
    """Counts a response where those of a request that nobody has taken are bounded: both ends of a lane come to the same."""
    size = _RESPONSE_BYTE_SIZE
    for content in contents:
        size += content.byte_size if type(content) is Slice else len(content)  # type: ignore[arg-type]
    return size
