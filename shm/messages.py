"""The records that a submitter and a worker exchange on a lane: requests, answers, and where their tensors are.

``tensord.shm.channel`` sends and receives records. ``tensord.shm.prepared`` assigns numbers to prepared requests and answers.

    submitter --> worker                        worker --> submitter
      WireVersion                                 WireVersion
      SegmentOpened SegmentClosed SegmentRefused  SegmentOpened SegmentClosed SegmentRefused
      Prepare TraceContext RequestRecord          PrepareAnswer AnswerRecord
      Release Taken Cancel EndSequence

A PreparedRequest is the part of a request that later requests may repeat. A Prepare sends the PreparedRequest once and gives
it a number. Each RequestRecord then has this number instead of the PreparedRequest. A PreparedRequest that is not repeated is
inside the RequestRecord. An answer is sent in the same way, as PreparedAnswer, PrepareAnswer and AnswerRecord.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from tensord.shm.common.scheduling import MAX_SEQUENCE_ID, SET_PARAMETER, Scheduling
from tensord.shm.errors import InvalidArgument
from tensord.shm.record import Record

#: The edition of these records; another one whenever any of them changes.
WIRE_VERSION = 3
Parameter = bool | int | float | str
#: The bit of ``RequestRecord.trace`` that asks for ``AnswerRecord.timing``.
TIMING = 4
#: The request parameter with which answers say which parameter set they are of.
TELLING_PARAMETER = "tensord_parameters"
#: The id of the sequence that a request belongs to; 0 and "": it belongs to none. 5 and "5" are two.
SequenceId = Annotated[int, msgspec.Meta(ge=0)] | Annotated[str, msgspec.Meta(max_length=MAX_SEQUENCE_ID)]
#: An integer that cannot be negative, in records whose sender need not be one of ours.
_Natural = Annotated[int, msgspec.Meta(ge=0)]


# --------------------------------------------------------------------------------------------------- places of tensors


class Slice(Record, frozen=True, tag="a"):
    """A range of bytes in a segment of an arena. The arena is that of the record's sender."""

    segment: int
    offset: int
    byte_size: int


class RegionSlice(Record, frozen=True, tag="r"):
    """A range of bytes in a client's region. For an output, ``byte_size`` is the most bytes that may be written."""

    region: str
    offset: int
    byte_size: int


#: The bytes of a small tensor, or where those of a larger one are.
Content = bytes | Slice
Place = Content | RegionSlice
#: Bytes as they are, or a view of them.
Buffer = bytes | memoryview


class PreparedTensor(Record, frozen=True, tag="t"):
    """The name, datatype, shape and region of a tensor in a prepared request or answer, but not the tensor's content."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    #: Where it lies; None: each request, or answer, has its own content.
    region: RegionSlice | None = None


class RequestedOutput(Record, frozen=True, tag="o"):
    """An output that a client asks for. It is written to ``region``, or is part of the answer if ``region`` is None."""

    name: str
    region: RegionSlice | None = None
    #: 0: the tensor itself; k > 0: its k top classes as BYTES "value:index[:label]".
    classification: _Natural = 0


# --------------------------------------------------------------------------------------------------------------- lanes


class WireVersion(Record, frozen=True, tag="V"):
    """The version of the record format that the sender uses. Each side of a lane sends this record first."""

    number: int


class SegmentOpened(Record, frozen=True, tag="S+"):
    """Announces a new sealed segment of the sender's arena. The segment's file descriptor comes with the record."""

    segment: int
    byte_size: int


class SegmentClosed(Record, frozen=True, tag="S-"):
    """Tells the other end of the lane to unmap a segment of the sender's arena. No later record names the segment."""

    segment: int


class SegmentRefused(Record, frozen=True, tag="S!"):
    """Says that the sender could not map a segment. The receiver sends SegmentOpened again before it next uses the segment."""

    segment: int


class TracedTensor(Record, frozen=True, tag="tt"):
    """A traced request's tensor as text. ``content`` has its elements in row-major order, joined by commas.

    If ``truncated`` is true, ``content`` has only the first elements.
    """

    activity: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    content: str
    truncated: bool


class OwnSpan(Record, frozen=True, tag="os"):
    """A span that the model's code has made within a traced request by ``tensord.models.span``."""

    name: str
    #: CLOCK_MONOTONIC ns.
    began_ns: int
    ended_ns: int
    attributes: dict[str, Parameter] = msgspec.field(default_factory=dict)
    #: Its place among the spans of the request that it is a part of, counted from 1; 0: of the run itself.
    parent: int = 0
    #: The kind of exception that left it; "": none did.
    error: str = ""
    #: Places, counted from 0, among the requests that were made for that request, of those that were made within it.
    calls: tuple[int, ...] = ()


class Timeline(Record, frozen=True, tag="tl"):
    """Times of a traced request's events in a worker (CLOCK_MONOTONIC ns), its tensors, and the spans that model code made."""

    moments: tuple[tuple[str, int], ...]
    tensors: tuple[TracedTensor, ...] = ()
    #: The model and version whose request this was, if it was made inside the worker for the traced one; "": it is the traced
    #: one.
    model: str = ""
    version: int = 0
    #: The timelines of requests that were made for this one.
    children: tuple[Timeline, ...] = ()
    #: Name and number of the pushed parameter set that it was computed with; None: of none.
    parameters: tuple[str, int] | None = None
    #: The spans that the model's code has named, each behind the one that it is a part of.
    spans: tuple[OwnSpan, ...] = ()


class PreparedRequest(Record, frozen=True, tag="P"):
    """The part of a request that many requests share: model, inputs without their contents, outputs, parameters."""

    model: str
    #: 0: the newest ready version.
    version: int = 0
    inputs: tuple[PreparedTensor, ...] = ()
    #: Empty: all outputs.
    outputs: tuple[RequestedOutput, ...] = ()
    #: The parameters without the reserved keys: those that schedule (``shm.common.scheduling``), and binary_data_output.
    parameters: dict[str, Parameter] = msgspec.field(default_factory=dict)


class Prepare(Record, frozen=True, tag="Q+"):
    """Assigns a number to a prepared request. Later records on this lane name the prepared request by the number."""

    number: int
    prepared: PreparedRequest


class TraceContext(Record, frozen=True, tag="tc"):
    """Names the trace to which the next request on the same lane belongs.

    The worker ignores a TraceContext whose ``request_id`` is not the id of the next request. A front sends the ids of the span
    that the front records for the request. A client sends the ids in the request's W3C ``traceparent`` if it says "sampled".
    """

    request_id: int
    #: The trace's id, in hexadecimal digits as W3C Trace Context has it, or the number of the trace in its file.
    trace_id: Annotated[str, msgspec.Meta(max_length=32)]
    #: "": there is no span, because the trace goes to a file alone.
    span_id: Annotated[str, msgspec.Meta(max_length=16)] = ""


class RequestRecord(Record, frozen=True, tag="q"):
    """An inference request on a lane. Two requests of one submitter never have the same ``request_id``."""

    request_id: _Natural
    #: The prepared request's number, or the prepared request itself where it has none.
    prepared: int | PreparedRequest
    #: The contents of the inputs that lie in no region, in their order.
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
    #: A sum of what its answer says besides: 1 its moments, 2 its tensors (``AnswerRecord.trace``; a client's lane ignores both),
    #: 4 how long it waited and ran and what was copied (``AnswerRecord.timing``).
    trace: _Natural = 0
    #: How often workers have died under this request; above 0 it is run alone, so that it cannot take others with it. A client's
    #: lane ignores it.
    strikes: _Natural = 0
    #: The next request of the same key and model version takes the place of this one while it waits; "": it has no key.
    replace_key: str = ""
    #: The parameter set that the request is to be computed with; "": the model's main set.
    parameter_set: str = ""

    @classmethod
    def scheduled(
        cls,
        scheduling: Scheduling,
        request_id: int,
        prepared: int | PreparedRequest,
        contents: tuple[Content, ...] = (),
        client_id: str = "",
        deadline_ns: int = 0,
        received_ns: int = 0,
        trace: int = 0,
    ) -> RequestRecord:
        """Makes the record of a request. ``scheduling`` has the request's scheduling parameters.

        Args:
          prepared: the part of the request that later requests may repeat, or its number if it was sent before.
          contents: the bytes or the arena slice of each input tensor that is not in a region.
          client_id: the id that the client gave the request, or "".
          deadline_ns: when the submitter gives up (CLOCK_MONOTONIC), or 0 for no deadline.
          received_ns: when the request was complete, or 0 for the time at which the worker gets the record.
          trace: what answers also report: a sum of 1 for times of events, 2 for tensors, and 4 for durations, or 0 for nothing.
        """
        first, last = scheduling[:5], scheduling[5:]
        return cls(request_id, prepared, contents, client_id, deadline_ns, received_ns, *first, trace, 0, *last)


class Release(Record, frozen=True, tag="L"):
    """Gives leases of the worker's response arena back to the worker. Each lease is (segment, offset, generation)."""

    leases: tuple[tuple[int, int, int], ...]


class Taken(Record, frozen=True, tag="T"):
    """Tells the worker that the client has read ``byte_size`` more bytes of a request's responses."""

    request_id: int
    byte_size: _Natural


class Cancel(Record, frozen=True, tag="X"):
    """Tells the worker that nobody waits for a request. A queued request is then not run, but still gets a final answer."""

    request_id: int


class EndSequence(Record, frozen=True, tag="E"):
    """Tells the worker to end a sequence, because the client sends no more requests of it. The worker does not answer.

    The worker first runs the sequence's waiting requests. It ignores the record if the sequence's latest request came over
    another lane.
    """

    model: str
    sequence_id: SequenceId


class PreparedAnswer(Record, frozen=True, tag="A"):
    """The part of an answer that many answers share: version, outputs without their contents, parameters."""

    version: int = 0
    outputs: tuple[PreparedTensor, ...] = ()
    parameters: dict[str, Parameter] = msgspec.field(default_factory=dict)
    #: Exactly one answer to each request is final; of models with several responses they come in their order.
    final: bool = True


class PrepareAnswer(Record, frozen=True, tag="C+"):
    """Assigns a number to a prepared answer. Later records on this lane name the prepared answer by the number."""

    number: int
    prepared: PreparedAnswer


class AnswerRecord(Record, frozen=True, tag="c"):
    """One answer to a request: outputs, or an error with ``code`` and ``message``."""

    request_id: int
    #: The prepared answer's number, or the prepared answer itself where it has none.
    prepared: int | PreparedAnswer
    #: The contents of the outputs that lie in no region, in their order.
    contents: tuple[Content, ...] = ()
    #: The response-arena lease that holds every Slice among the contents: (segment, offset, generation).
    lease: tuple[int, int, int] | None = None
    #: "" or a ``ServingError.code``; with a code, ``message`` is the sentence for the client.
    code: str = ""
    message: str = ""
    #: The timeline of a request that asked for it.
    trace: Timeline | None = None
    #: The timing of a request that asked for it and ran: ns in the queue and in its run, and bytes that were copied for it.
    timing: tuple[int, int, int] | None = None


#: Says with ``AnswerRecord.code`` that a request failed, and without one that no response comes any more.
LAST = PreparedAnswer()


def is_mark(prepared: PreparedAnswer, answer: AnswerRecord) -> bool:
    """Returns whether an answer only says that no more responses come. ``prepared`` is the answer's prepared part."""
    return prepared.final and not (answer.code or prepared.version or prepared.outputs)


def is_one_of_several(prepared: PreparedAnswer, answer: AnswerRecord) -> bool:
    """Returns whether an answer shows that its model may send several responses to one request.

    Returns True if more answers to the same request follow, or if the answer only says that no more responses come.
    """
    return not prepared.final or (not prepared.version and is_mark(prepared, answer))


def all_parameters(prepared: PreparedRequest, own: RequestRecord) -> dict[str, Parameter]:
    """Returns all parameters of a request: those in ``prepared`` and, if ``own`` has it, the name of the parameter set."""
    return {**prepared.parameters, SET_PARAMETER: own.parameter_set} if own.parameter_set else prepared.parameters


_ToBoth = WireVersion | SegmentOpened | SegmentClosed | SegmentRefused
#: The records for a worker's dispatcher; the lane itself takes the others.
ForDispatcher = RequestRecord | Prepare | Cancel | Taken | TraceContext | EndSequence
ToWorker = _ToBoth | ForDispatcher | Release
ToSubmitter = _ToBoth | PrepareAnswer | AnswerRecord


def placed(tensors: tuple[PreparedTensor, ...], contents: tuple[Content, ...]) -> list[tuple[PreparedTensor, Place]]:
    """Returns each tensor with the place of its bytes: its region, or the next item of ``contents`` if it has no region.

    Raises InvalidArgument unless ``contents`` has as many items as there are tensors without a region.
    """
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
