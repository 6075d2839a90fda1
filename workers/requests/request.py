"""One request inside the worker: validated, with its tensors in reach, from the queue to its answer.

Made by ``tensord.workers.requests.prepared``, owned by the worker's loop; models only read it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
import numpy as np

from tensord.shm.arrays import DTYPES, Array
from tensord.shm.messages import TIMING, AnswerRecord, PreparedRequest, RequestedOutput, RequestRecord
from tensord.shm.refusals import Refusal
from tensord.workers.regions.region_table import AnyRegion
from tensord.workers.regions.region_tensor import LateTensor
from tensord.workers.requests.response_cache import Question
from tensord.workers.requests.response_sender import ResponseSender, Sent
from tensord.workers.requests.result import Result
from tensord.workers.requests.submitter import Submitter
from tensord.workers.requests.timeline import RequestTimeline
from tensord.workers.scheduling.planner import Planner
from tensord.workers.scheduling.sequence import Controls, Sequenced
from tensord.workers.tensors.signature import Signature

if TYPE_CHECKING:
    from tensord.workers.requests.prepared import CheckedInputs, Preparation

#: When a run began, had its inputs, had computed; in ns.
Moments = tuple[int, int, int]
#: Takes what becomes of a request, on the worker's loop: a response (without moments where it never ran), and whether it is the
#: last; None with the last: there is no further one.
Sink = Callable[["Request", "Result | None", "Moments | None", bool], None]
_NONE: Mapping[str, Array] = {}


class Counts(Protocol):
    """What is counted of requests when they are answered."""

    #: Bytes of a request's tensors that were copied for it alone.
    copied_byte_size: int

    @property
    def refused(self) -> MutableMapping[Refusal, int]:
        """For want of room or time."""

    def failed(self, lasted_ns: int, why: Any) -> None:
        """A request was accepted and never ran."""

    def responded(self, sender: ResponseSender[Request], result: Sent, now_ns: int, placed_ns: int) -> None:
        """A response came at ``now_ns``, and is placed: its sender is told, too."""

    def responded_more(self, sender: ResponseSender[Request], count: int, now_ns: int) -> None:
        """So many good ones came behind others at ``now_ns``, and are placed."""

    def streamed(self, sender: ResponseSender[Request], now_ns: int, failure: Any) -> None:
        """A request is at its end that was answered by its sender."""


class Version(Protocol):
    """The model version that a request is for, as far as its answer needs it."""

    name: str
    version: int
    #: Batches given to instances and not done.
    executing: int
    signature: Signature
    checked: CheckedInputs
    planner: Planner[Request]
    #: Whether a request may be run again, by itself, where its batch has failed.
    repeatable: bool
    #: Whether answers leave in the order in which requests were taken.
    ordered: bool

    #: Of requests that are answered by senders, and are not at their end.
    senders: dict[Request, ResponseSender[Request]]

    @property
    def statistics(self) -> Counts:
        """What is counted of it."""

    def __hash__(self) -> int:
        """It is known by being itself."""


class Request(Sequenced):
    """One client's request."""

    __slots__ = (
        "_added",
        "_arrays",
        "asked",
        "cancelled",
        "client_id",
        "contents",
        "copied_byte_size",
        "outputs",
        "own",
        "preparation",
        "prepared",
        "ran",
        "regions",
        "request_id",
        "submitter",
        "timeline",
        "version",
    )

    #: Who takes what becomes of it, where that is not its submitter (``tensord.workers.requests.inner_request``).
    sink: Sink | None = None
    #: Of a version with a response cache: what was looked up there, and for how long, in ns. Others do without.
    asked: tuple[Question, int]
    #: Of a request that asked for its timing and has run: nanoseconds in the queue and in its run, and bytes gathered for it.
    #: Others do without.
    ran: tuple[int, int, int]

    def __init__(
        self,
        version: Version,
        submitter: Submitter[Request],
        prepared: PreparedRequest,
        own: RequestRecord,
        key: Hashable,
        rows: int,
        arrays: dict[str, Array] | None,
        outputs: Mapping[str, RequestedOutput],
        regions: list[AnyRegion],
        now_ns: int,
        copied_byte_size: int = 0,
        contents: Mapping[str, bytes | memoryview | LateTensor] | None = None,
        preparation: Preparation | None = None,
    ) -> None:
        """``arrays`` or ``contents`` are given; these where the tensors are plain, so that their bytes are the arrays'.

        ``preparation``: what is known of it; None: it repeats nothing.
        """
        #: What it says of itself: ids, moments, priority, timeout, sequence, strikes.
        self.own = own
        # As Waiting.__init__, which is another call for every request.
        self.key = key
        self.rows = rows
        self.arrived_ns = own.received_ns or now_ns
        self.line = -1
        self.sequence = 0
        self.version = version
        self.submitter = submitter
        self.request_id = own.request_id
        self.client_id = own.client_id
        #: What it has in common with others.
        self.prepared = prepared
        self.preparation = preparation
        self._arrays = arrays
        #: Inputs that are not of the client.
        self._added: Mapping[str, Array] = _NONE
        #: Input name -> its bytes, where they say it all.
        self.contents = contents
        #: What was asked for, by name; empty: everything.
        self.outputs = outputs
        #: Client regions in use until the completion, once per tensor.
        self.regions = regions
        #: Bytes of its tensors that were copied for it alone: before they are gathered, and when the outputs are placed.
        self.copied_byte_size = copied_byte_size
        #: The submitter no longer waits.
        self.cancelled = False
        self.deadline_ns = own.deadline_ns
        self.timeout_ns = own.timeout_us * 1000
        self.priority = own.priority
        #: Of a sampled request.
        self.timeline = RequestTimeline(own.trace & ~TIMING, now_ns) if own.trace & ~TIMING else None

    @property
    def arrays(self) -> dict[str, Array]:
        """Input name -> array of the model's shape (after a configured reshape).

        A ``LateTensor`` of GPU memory and snapshot regions; else views of the submitter's arena or of a client's region
        wherever that is possible: nobody writes to them.
        """
        if self._arrays is None:
            # Made only for who asks: what is gathered into a batch goes there as bytes.
            assert self.contents is not None
            self._arrays = {
                tensor.name: _array(self.contents[tensor.name], tensor.datatype, tensor.shape)
                for tensor in self.prepared.inputs
            }
            self._arrays.update(self._added)
        return self._arrays

    def keep(self, arrays: dict[str, Array]) -> None:
        """Its tensors are these from now on."""
        self._arrays, self.contents = arrays, None

    def add(self, inputs: Mapping[str, Array]) -> None:
        """Further inputs, besides those of the client."""
        if self.contents is None or any(array.dtype == np.object_ for array in inputs.values()):
            self._arrays, self.contents = {**self.arrays, **inputs}, None
            return
        # What is gathered goes as bytes; the arrays are made if somebody asks for them.
        self._arrays, self._added = None, {**self._added, **inputs}
        self.contents = {**self.contents, **{name: array.tobytes() for name, array in inputs.items()}}

    @property
    def is_cancelled(self) -> bool:
        """What its model is told: nobody needs further answers."""
        return self.cancelled

    @property
    def is_open(self) -> bool:
        """Whether its last answer has not been given."""
        return self.submitter.in_flight.get(self.request_id) is self

    @property
    def small(self) -> bool:
        """Whether all of its tensors came inside its record."""
        return self.contents is not None and not [one for one in self.contents.values() if type(one) is not bytes]

    @property
    def label(self) -> str:
        """How Triton's messages begin, so that a client finds its request."""
        return label(self.client_id)

    def ran_in(self, began_ns: int, computed_ns: int, gathered: int) -> None:
        """Notes a run for ``timed``, of a request that asked for its timing."""
        self.ran = max(0, began_ns - self.arrived_ns), computed_ns - began_ns, gathered

    def timed(self, answer: AnswerRecord) -> AnswerRecord:
        """Adds what it waited, computed and copied, if it asked for that and has run."""
        ran = getattr(self, "ran", None)
        if ran is None:
            return answer
        return msgspec.structs.replace(answer, timing=(ran[0], ran[1], ran[2] + self.copied_byte_size))

    def leased(self, name: str) -> AnyRegion:
        """Returns the very region that was checked: by now its name may be free, or stand for another one."""
        for region in self.regions:
            if region.name == name:
                return region
        raise AssertionError(f"no lease on region '{name}'")

    def release(self) -> None:
        """Ends the use of regions. Idempotent."""
        for region in self.regions:
            region.unlease()
        self.regions = []

    def __repr__(self) -> str:
        return f"<Request {self.request_id} for {self.prepared.model!r}, {self.rows} rows>"


def controls_of(own: RequestRecord) -> Controls:
    """What a request says of its sequence."""
    return Controls(own.sequence_id, own.sequence_start, own.sequence_end)


def _array(content: bytes | memoryview | LateTensor, datatype: str, shape: tuple[int, ...]) -> Array:
    if isinstance(content, (bytes, memoryview)):
        return np.frombuffer(content, DTYPES[datatype]).reshape(shape)
    return cast(Array, content)


def named(client_id: str) -> str:
    """What begins a line of the log about a request; "": it has no id."""
    return label(client_id) if client_id else ""


def label(client_id: str) -> str:
    """``[request id: X] `` with the client's id."""
    return f"[request id: {client_id or '<id_unknown>'}] "
