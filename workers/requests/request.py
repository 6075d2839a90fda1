"""A request inside the worker, from its validation to its last answer, with access to its tensors.

``tensord.workers.requests.prepared`` makes requests. The worker's loop owns them, and models only read them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tensord.shm.arrays import Array, as_strings
from tensord.shm.cuda_regions import CudaRegion
from tensord.shm.errors import ServingError
from tensord.shm.messages import TIMING, AnswerRecord, Parameter, PreparedRequest, RequestedOutput, RequestRecord
from tensord.shm.prepared import memory_of
from tensord.workers.devices.late_tensor import LateTensor
from tensord.workers.regions.region_table import AnyRegion
from tensord.workers.requests.response_cache import Question
from tensord.workers.requests.result import Response, Result
from tensord.workers.requests.submitter_link import SubmitterLink
from tensord.workers.requests.timeline import RequestTimeline, begun, trace_id_of
from tensord.workers.scheduling.sequence import Controls
from tensord.workers.tensors.request_tensors import NOTHING, RequestTensors, label

if TYPE_CHECKING:
    from tensord.workers.models.model_version import ModelVersion
    from tensord.workers.parameters.parameter_set import ParameterSet
    from tensord.workers.requests.preparation import Preparation

#: When a run began, had its inputs, had computed; in ns.
Moments = tuple[int, int, int]
#: Takes what becomes of a request, on the worker's loop: a response (without moments where it never ran), and whether it is the
#: last; None with the last: there is no further one.
Sink = Callable[["Request", "Result | None", "Moments | None", bool], None]
#: Bytes of a request without what its record has, and of a string in an array without its text.
_REQUEST, _STRING = 2 << 10, 56
_UNTOLD: Mapping[str, Parameter] = {}


class Request(RequestTensors):
    """A valid request with its inputs, from its arrival in the worker to its last answer."""

    __slots__ = (
        "asked",
        "cancelled",
        "chosen",
        "outputs",
        "own",
        "preparation",
        "ran",
        "regions",
        "request_id",
        "submitter",
        "tells",
        "timeline",
        "told",
        "version",
    )

    #: Takes its responses, if it is an ``InnerRequest``.
    sink: Sink | None = None
    #: The question that was looked up in the response cache of its version, and how many ns that took; None: the answer is not
    #: kept. It is unset without a response cache.
    asked: tuple[Question, int] | None
    #: The timing of a request that asked for it and has run: ns in the queue and in its run, and bytes gathered for it. It is
    #: unset in all others.
    ran: tuple[int, int, int]

    def __init__(
        self,
        version: ModelVersion,
        submitter: SubmitterLink[Request],
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
        """Makes a request with inputs from ``arrays`` or, if that is None, from ``contents``.

        Args:
          submitter: the worker's link to the submitter that sent the request.
          prepared: the part of the request that is sent once for many requests.
          own: the record with the rest of the request, such as the request's id.
          key: the batching key. Requests with equal keys may run in one batch.
          rows: the batch size.
          arrays: the inputs as arrays, by name.
          outputs: the requested outputs by name. If it is empty, all outputs are requested.
          regions: one leased region for each input and output that is in a region. A region may be in the list several times.
          now_ns: the current time of CLOCK_MONOTONIC. It is the time of arrival if ``own.received_ns`` is 0.
          copied_byte_size: how many bytes of the request's tensors were copied so far.
          contents: each input's bytes, by name. No input may then have datatype BYTES or BOOL, or a configured ``reshape``.
          preparation: results stored for all requests with this ``prepared``. None: no stored results are used.
        """
        #: The parameter set that it is for: by name, or, of a sequence, the one that this goes on with; None: main.
        self.chosen: str | ParameterSet | None = None
        #: True if its answers say which parameter set they are of, and, once it has run, what they say.
        self.tells = False
        self.told: Mapping[str, Parameter] = _UNTOLD
        self.own = own
        # As Waiting.__init__, which is another call for every request.
        self.key = key
        self.rows = rows
        self.arrived_ns = own.received_ns or now_ns
        self.line = -1
        self.sequence = 0
        self.owner = submitter.owner
        self.version = version
        self.submitter = submitter
        self.request_id = own.request_id
        self.client_id = own.client_id
        self.prepared = prepared
        self.preparation = preparation
        self._arrays = arrays
        self._added = NOTHING
        self.contents = contents
        self.outputs = outputs
        self.regions = regions
        self.copied_byte_size = copied_byte_size
        #: The submitter no longer waits.
        self.cancelled = False
        self.deadline_ns = own.deadline_ns
        self.timeout_ns = own.timeout_us * 1000
        self.priority = own.priority
        self.since_ns = self.arrived_ns
        self.replace_key = own.replace_key
        #: The timeline of a sampled request; None: it is not sampled.
        self.timeline: RequestTimeline | None = None
        if own.trace & ~TIMING:
            self.timeline = begun(own, submitter.context, now_ns)
            self.timeline.attaches = submitter.segments is None

    @property
    def kept_byte_size(self) -> int:
        """The approximate memory in bytes that a waiting request takes: its record, and copies of its tensors."""
        own, strings = self.own, 0
        shared = 0 if isinstance(own.prepared, int) else memory_of(own.prepared)
        if self._arrays is not None:
            strings = sum([array.size for array in self._arrays.values() if array.dtype.kind == "O"])
        texts = own.client_id, own.sequence_id, own.replace_key, own.parameter_set
        record = sum(map(sys.getsizeof, (*own.contents, *texts)))
        return _REQUEST + shared + record + self.copied_byte_size + strings * _STRING

    @property
    def is_cancelled(self) -> bool:
        """True once nobody waits for further answers to the request. Any thread may read it."""
        return self.cancelled

    @property
    def is_open(self) -> bool:
        """True until the last answer to the request was given."""
        return self.submitter.in_flight.get(self.request_id) is self

    @property
    def stays(self) -> bool:
        return self.sink is not None or any(isinstance(region, CudaRegion) for region in self.regions)

    def ran_in(self, began_ns: int, computed_ns: int, gathered: int) -> None:
        """Stores, for the client, when the run of the model began and when its results were there.

        ``gathered``: how many bytes were copied for the run.
        """
        self.ran = max(0, began_ns - self.arrived_ns), computed_ns - began_ns, gathered

    def timed(self, answer: AnswerRecord) -> AnswerRecord:
        """Returns the answer, with times and the number of copied bytes if the client asked for them and the request has run."""
        ran = getattr(self, "ran", None)
        if ran is None:
            return answer
        return msgspec.structs.replace(answer, timing=(ran[0], ran[1], ran[2] + self.copied_byte_size))

    def leased(self, name: str) -> AnyRegion:
        """Returns the region that had this name when this request leased it. Raises AssertionError if there is none."""
        for region in self.regions:
            if region.name == name:
                return region
        raise AssertionError(f"no lease on region '{name}'")

    def release(self) -> None:
        """Ends the request's leases of regions. Idempotent."""
        for region in self.regions:
            region.unlease()
        self.regions = []

    def __repr__(self) -> str:
        return f"<Request {self.request_id} for {self.prepared.model!r}, {self.rows} rows>"


def controls_of(record: RequestRecord) -> Controls:
    """Returns a request's sequence controls: the sequence's id, and whether the request starts or ends the sequence."""
    return Controls(record.sequence_id, record.sequence_start, record.sequence_end)


def named(client_id: str) -> str:
    """Returns ``[request id: X] ``, the beginning of a log line about a request; or "" if ``client_id`` is empty."""
    return label(client_id) if client_id else ""


def traced(requests: Iterable[Request]) -> dict[str, str]:
    """Returns the ``extra`` argument for a log line about these requests, with the ids of their traces."""
    return {"trace_id": trace_id_of(request.timeline for request in requests)}


class InnerRequest(Request):
    """A request that is made in the worker's own process: by a model, by an ensemble's step or by ``LocalWorker``.

    If it is made on behalf of another request (``origin``), it has that request's ``request_id`` and ``submitter``. Its inputs
    are arrays on the worker's device or in host memory, and are not copied. The worker calls ``sink`` with each response. An
    array in a response is copied only if it consists of strings, or if the model's code could still change it.
    """

    __slots__ = ("_answered", "ahead", "may_stop", "origin", "sink")

    def made_for(self, sink: Sink, origin: Request | None) -> InnerRequest:
        """Sets who gets the responses (``sink``) and for which request this one is made (``origin``). Returns itself."""
        self.sink: Sink = sink
        self.origin: Request | None = origin
        if self.timeline is not None and origin is not None and origin.timeline is not None:
            self.timeline.context = origin.timeline.context
        self._answered = False
        #: Its maker would have its model stop, and takes what that still sends.
        self.may_stop = False
        #: The sizes that count of responses that were handed over and that its maker has not taken yet.
        self.ahead: deque[int] = deque()
        return self

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled or self.may_stop

    @property
    def is_open(self) -> bool:
        return not self._answered

    def __repr__(self) -> str:
        return f"<InnerRequest of {self.request_id} for {self.prepared.model!r}, {self.rows} rows>"


def not_kept(request: Request | None) -> None:
    """Prevents response caches from storing the answers to ``request``. Does nothing if ``request`` is None.

    If ``request`` is an ``InnerRequest``, the answers to all requests that led to it are not stored either.
    """
    while request is not None:
        request.asked = None
        request = request.origin if isinstance(request, InnerRequest) else None


def hand_over(request: Request, result: Result | None, moments: Moments | None = None, final: bool = True) -> None:
    """Passes a response to the code in this worker that made the request. Does nothing after the last response.

    Args:
      request: an InnerRequest, whose ``sink`` is called.
      result: the response. It is None if the request ends without a further response.
      moments: the times of the run. It is None if the request did not run.
      final: whether this is the last response.
    """
    assert isinstance(request, InnerRequest)
    if request.is_open:
        if result is not None and not isinstance(result, ServingError):
            result, copied = kept(result)
            request.version.statistics.copied_byte_size += copied
        request._answered = final
        request.sink(request, result, moments, final)


def kept(result: dict[str, Array]) -> tuple[dict[str, Array], int]:
    """Converts a model's outputs to read-only inputs of other models. Returns the inputs and the number of bytes copied.

    Copies an array only if the model's code could still change it. Strings become bytes.
    """
    copied = 0
    own: dict[str, Array] = Response({}, result.parameters) if isinstance(result, Response) else {}
    for name, array in result.items():
        if isinstance(array, np.ndarray) and (array.flags.writeable or array.dtype.kind in "SUO"):
            made = as_strings(array) if array.dtype.kind in "SUO" else np.array(array)
            made.flags.writeable = False
            copied += made.nbytes
            array = made
        own[name] = array
    return own, copied
