"""One inference request from values to answers, for whoever has its tensors in hand: placed, submitted, answered or cancelled.

    InferenceRequest ─▶ begin ─▶ tensors into records or the request arena ─▶ Submitter ─▶ on_answer (once with ``final``)
                          ╰─ waits for room where the arena is full

What arrived large may lie in the request arena before (``tensord.daemon.grpc.reception``). A binary HTTP body does not come
this way: it is read straight into the arena before anybody knows what it holds (``tensord.daemon.http.exchange``); nor does a
message whose kind is known (``tensord.daemon.grpc.prepared``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from tensord.daemon.submit.accounts import Account
from tensord.daemon.submit.in_flight import OnAnswer
from tensord.daemon.submit.scheduling import UNSCHEDULED, Scheduling
from tensord.daemon.submit.submitter import Submitter
from tensord.daemon.tracing.tracer import Trace
from tensord.shm import trace_stamps
from tensord.shm.arena import ALIGNMENT, Lease
from tensord.shm.errors import DEFECT, Internal, ServingError
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import (
    LAST,
    AnswerRecord,
    Parameter,
    PreparedAnswer,
    PreparedRequest,
    PreparedTensor,
    RegionSlice,
    RequestedOutput,
    RequestRecord,
    Slice,
)
from tensord.shm.messages import Content as SentContent
from tensord.shm.prepared import Numbered

_log = logging.getLogger(__name__)

#: What an input's bytes are: themselves (BYTES length-prefixed), or where they lie: in a client's region, in the request's lease.
Content = bytes | memoryview | RegionSlice | Slice
_PLACES = (RegionSlice, Slice)


class InferenceRequest(msgspec.Struct):
    """Everything a request says, in no protocol's form. (A Struct, because one is made for every request.)"""

    model: str
    #: 0: the newest.
    version: int
    #: Name, datatype, shape and content of each.
    inputs: list[tuple[str, str, tuple[int, ...], Content]]
    #: Empty: all.
    outputs: tuple[RequestedOutput, ...] = ()
    parameters: dict[str, Parameter] = {}
    id: str = ""
    scheduling: Scheduling = UNSCHEDULED
    #: CLOCK_MONOTONIC; a request that still queues then is not run. 0: none.
    deadline_ns: int = 0
    #: Where it is a sampled one. Whoever answers ends it.
    trace: Trace | None = None
    #: Whose memory it takes.
    account: Account | None = None
    #: Where the Slices among its inputs lie. ``begin`` takes it over, also where it raises.
    lease: Lease | None = None

    @property
    def prepared(self) -> PreparedRequest:
        """Returns what it has in common with others of its kind."""
        tensors = [
            PreparedTensor(name, datatype, shape, content if isinstance(content, RegionSlice) else None)
            for name, datatype, shape, content in self.inputs
        ]
        return PreparedRequest(self.model, self.version, tuple(tensors), self.outputs, self.parameters)


class Inference:
    """A request under way. Its owner may ``cancel`` it; after that no callback comes."""

    __slots__ = ("_cancelled", "_on_answer", "_request", "_request_id", "_submitter", "on_room")

    def __init__(self, submitter: Submitter, request: InferenceRequest, on_answer: OnAnswer) -> None:
        self._submitter = submitter
        self._request = request
        self._on_answer = on_answer
        #: 0: not sent yet.
        self._request_id = 0
        self._cancelled = False
        #: Called when it waits for room no longer, unless it was cancelled.
        self.on_room: Callable[[], None] | None = None

    @property
    def waits_for_room(self) -> bool:
        """Whether it was not sent yet."""
        return not self._request_id

    def cancel(self) -> None:
        """Nobody waits for it any more. Harmless once it is answered."""
        self._cancelled = True
        if self._request_id:
            self._submitter.cancel(self._request_id)

    def granted(self, lease: Lease | ServingError) -> None:
        """Room came free, or did not in time."""
        try:
            if self._cancelled or isinstance(lease, ServingError):
                if isinstance(lease, Lease):
                    self._submitter.give_back(lease)
                _give_back(self._submitter, self._request)
                if isinstance(lease, ServingError) and not self._cancelled:
                    raise lease
            else:
                self.send(lease)
        except ServingError as error:
            self._fail(error)
        except Exception:
            _log.exception("a request for model '%s' could not be sent", self._request.model)
            self._fail(Internal(DEFECT))
        on_room, self.on_room = self.on_room, None
        if on_room is not None and not self._cancelled:
            on_room()

    def _fail(self, error: ServingError) -> None:
        self._on_answer(LAST, AnswerRecord(0, LAST, code=error.code, message=error.message), None)

    def send(self, lease: Lease | None) -> None:
        """Puts the tensors into their places and submits. Raises as ``Submitter.submit``; leases are given back."""
        request, submitter, trace = self._request, self._submitter, self._request.trace
        leases = () if lease is None else (lease,)
        if request.lease is not None:
            leases = (request.lease, *leases)
        try:
            contents = _placed(request, lease, submitter.inline_byte_size)
            record = RequestRecord(
                submitter.next_id(),
                request.prepared,
                contents,
                request.id,
                request.deadline_ns,
                time.monotonic_ns(),
                *request.scheduling,
                0 if trace is None else trace.level,
            )
            if trace is not None:
                trace.client_id = request.id
                trace.stamp(trace_stamps.REQUEST_START)
                self._on_answer = _traced(trace, self._on_answer)
        except BaseException:
            for each in leases:
                submitter.give_back(each)
            raise
        submitter.submit(record, leases, self._on_answer, request.account)
        self._request_id = record.request_id


def begin(submitter: Submitter, request: InferenceRequest, on_answer: OnAnswer) -> Inference:
    """Sends a request now, or when there is room for its tensors; ``on_answer`` is never called from here.

    A refusal that comes later arrives as an answer with a code.
    Raises: InvalidArgument: its tensors could never fit.  Unavailable: too many requests are in flight.
    """
    inline, size = submitter.inline_byte_size, 0
    for _, _, _, content in request.inputs:
        if not isinstance(content, _PLACES) and len(content) > inline:
            size += -(-len(content) // ALIGNMENT) * ALIGNMENT
    inference = Inference(submitter, request, on_answer)
    if not size:
        inference.send(None)
        return inference
    try:
        lease = submitter.loan(size, request.account)
    except BaseException:
        _give_back(submitter, request)
        raise
    if lease is not None:
        inference.send(lease)
    else:
        submitter.wait_for_room(size, inference.granted, request.model, request.account)
    return inference


def numbered(submitter: Submitter, request: InferenceRequest) -> Numbered[PreparedRequest]:
    """Returns the number of requests that differ from it in ids, deadlines, scheduling, and tensors that lie in no region."""
    return submitter.numbers.number(request.prepared)


def _give_back(submitter: Submitter, request: InferenceRequest) -> None:
    """Of a request that is not sent."""
    if request.lease is not None:
        submitter.give_back(request.lease)


def _traced(trace: Trace, on_answer: OnAnswer) -> OnAnswer:
    """A callback that lets the trace learn of the last answer first."""

    def completed(prepared: PreparedAnswer, own: AnswerRecord, lane: SubmitterLane | None) -> None:
        if prepared.final:
            trace.completed(prepared.version, own.trace)
        on_answer(prepared, own, lane)

    return completed


def _placed(request: InferenceRequest, lease: Lease | None, inline: int) -> tuple[SentContent, ...]:
    """Puts the contents that lie in no region into their places."""
    used = 0
    contents: list[SentContent] = []
    for _, _, _, content in request.inputs:
        if isinstance(content, RegionSlice):
            continue
        if isinstance(content, Slice):
            contents.append(content)
        elif len(content) <= inline:
            contents.append(bytes(content))
        else:
            assert lease is not None
            size = len(content)
            lease.view[used : used + size] = content
            contents.append(Slice(lease.place.segment, lease.place.offset + used, size))
            used += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(contents)
