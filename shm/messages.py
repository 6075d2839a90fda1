"""The records of a lane: requests and their answers between a submitter and a worker, and where their tensors are.

Pure values, no I/O: ``tensord.shm.channel`` carries them; ``tensord.shm.record`` says what they all are,
``tensord.shm.control_records`` what travels between the supervisor and its children.

                submitter --> worker                     worker --> submitter
    lane        SegmentOpened, -Closed, -Refused         SegmentOpened, -Closed, -Refused
                Submit RequestForm FormSubmit            Completion AnswerForm FormCompletion
                Release Taken Cancel
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from tensord.shm.record import Record

Parameter = bool | int | float | str
#: Which sequence a request belongs to; 0 and "": to none. 5 and "5" are two. A string has at most that many bytes.
MAX_SEQUENCE_ID = 128
SequenceId = int | Annotated[str, msgspec.Meta(max_length=MAX_SEQUENCE_ID)]


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


class Inline(Record, frozen=True, tag="i"):
    """A tensor so small that a slot would cost more than the bytes."""

    content: bytes


Place = Slice | RegionSlice | Inline
#: What a request or an answer of a form has of its own of a tensor.
Content = bytes | Slice
#: Bytes as they are, or a view of them.
Buffer = bytes | memoryview


class Tensor(Record, frozen=True, tag="t"):
    """One named tensor and where its bytes are. BYTES content is length-prefixed (u32 little-endian) wherever it lies."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    place: Place


class RequestedOutput(Record, frozen=True, tag="o"):
    """An output the client asked for. ``region`` is where it goes, None for the response arena."""

    name: str
    region: RegionSlice | None = None
    #: 0: the tensor itself; k > 0: its k top classes as BYTES "value:index[:label]".
    classification: int = 0


# --------------------------------------------------------------------------------------------------------------- lanes


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


class Timeline(Record, frozen=True, tag="tl"):
    """What a traced request met in the worker: names and CLOCK_MONOTONIC ns, and its tensors."""

    moments: tuple[tuple[str, int], ...]
    tensors: tuple[TracedTensor, ...] = ()
    #: Of a request that was made inside the worker for the traced one: what it was for, and which load of it.
    model: str = ""
    version: int = 0
    #: Those of requests that were made for this one.
    children: tuple[Timeline, ...] = ()


class Submit(Record, frozen=True, tag="Q"):
    """One request. ``request_id`` is the submitter's, never reused on any lane of that submitter."""

    request_id: int
    model: str
    #: 0: the newest ready version.
    version: int
    inputs: tuple[Tensor, ...]
    #: Empty: all outputs.
    outputs: tuple[RequestedOutput, ...] = ()
    #: Reserved keys (sequence_*, priority, timeout, binary_data_output) are taken out before this.
    parameters: dict[str, Parameter] = msgspec.field(default_factory=dict)
    #: The client's ``id``, "" when none was given.
    client_id: str = ""
    #: How often workers have died under this request; above 0 it is run alone, so that it cannot take others with it.
    strikes: int = 0
    #: The submitter gives up then; 0: never. A request whose deadline passed in the queue is not run.
    deadline_ns: int = 0
    #: When the front had the whole request; the queue duration counts from here.
    received_ns: int = 0
    priority: int = 0
    timeout_us: int = 0
    sequence_id: SequenceId = 0
    sequence_start: bool = False
    sequence_end: bool = False
    #: What to note of it: 1 when it was where, 2 its tensors, or the sum; 0: nothing, as of nearly every request.
    trace: int = 0


class Release(Record, frozen=True, tag="L"):
    """Response-arena leases the submitter is done with: (segment, offset, generation) each."""

    leases: tuple[tuple[int, int, int], ...]


class Taken(Record, frozen=True, tag="T"):
    """Its client has taken responses of a request: so many bytes (``response_byte_size``) since that was last told.

    Told by and by: who sends responses waits only where much of them was not taken.
    """

    request_id: int
    byte_size: int


class Cancel(Record, frozen=True, tag="X"):
    """Nobody waits for this request any more. If it still queues it is dropped; a final Completion comes either way."""

    request_id: int


class Completion(Record, frozen=True, tag="C"):
    """An answer. Exactly one with ``final`` per Submit; of models with several responses, in their order.

    A last one may be no response (``is_mark``).
    """

    request_id: int
    #: "" or a ``ServingError.code``; with a code, ``message`` is the sentence for the client.
    code: str = ""
    message: str = ""
    final: bool = True
    version: int = 0
    outputs: tuple[Tensor, ...] = ()
    #: The response-arena lease that holds every Slice among ``outputs``: (segment, offset, generation).
    lease: tuple[int, int, int] | None = None
    parameters: dict[str, Parameter] = msgspec.field(default_factory=dict)
    #: Of a request that asked for it.
    trace: Timeline | None = None

    @property
    def is_mark(self) -> bool:
        """Whether it is no response, and says only that none comes any more."""
        return self.final and not (self.code or self.version or self.outputs)


class RequestForm(Record, frozen=True, tag="Q+"):
    """What requests of one kind have in common (``tensord.shm.forms``); from now on the number stands for it.

    ``submit`` is one of them without what each has of its own: everything that a FormSubmit says.
    """

    number: int
    submit: Submit


class FormSubmit(Record, frozen=True, tag="q"):
    """A request of a form: what it has of its own, as in Submit."""

    request_id: int
    form: int
    #: Of the inputs that lie in no region, in their order: their bytes, or where those are.
    contents: tuple[Content, ...]
    client_id: str = ""
    deadline_ns: int = 0
    received_ns: int = 0
    priority: int = 0
    timeout_us: int = 0
    sequence_id: SequenceId = 0
    sequence_start: bool = False
    sequence_end: bool = False
    trace: int = 0


class AnswerForm(Record, frozen=True, tag="C+"):
    """What answers of one kind have in common; ``completion`` is one of them without its id and the tensors in no region."""

    number: int
    completion: Completion


class FormCompletion(Record, frozen=True, tag="c"):
    """An answer of a form, and good; whether it is the last one the form says."""

    request_id: int
    form: int
    #: Of the outputs that lie in no region, in their order: their bytes, or where those are.
    contents: tuple[Content, ...]
    #: As in Completion.
    lease: tuple[int, int, int] | None = None


ToWorker = SegmentOpened | SegmentClosed | SegmentRefused | Submit | RequestForm | FormSubmit | Release | Taken | Cancel
ToSubmitter = SegmentOpened | SegmentClosed | SegmentRefused | Completion | AnswerForm | FormCompletion


#: What a response counts beside its tensors where those that nobody has taken are bounded.
_RESPONSE_BYTE_SIZE = 256


def response_byte_size(response: Completion | FormCompletion) -> int:
    """What it counts where a request's responses that nobody has taken are bounded: both ends of a lane come to the same."""
    size = _RESPONSE_BYTE_SIZE
    if type(response) is FormCompletion:
        for content in response.contents:
            size += content.byte_size if type(content) is Slice else len(content)  # type: ignore[arg-type]
        return size
    for tensor in response.outputs:  # type: ignore[union-attr]
        place = tensor.place
        size += len(place.content) if type(place) is Inline else place.byte_size if type(place) is Slice else 0
    return size
