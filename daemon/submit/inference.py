"""One inference request from values to answers, for whoever has its tensors in hand: placed, submitted, answered or cancelled.

    InferenceRequest ─▶ begin ─▶ tensors into records or the request arena ─▶ Submitter ─▶ on_completion (once with ``final``)
                          ╰─ waits for room where the arena is full

``begin`` calls back; ``answers`` is the same for those who await. What arrived large may lie in the request arena before
(``tensord.daemon.grpc.reception``). A binary HTTP body does not come this way: it is read straight into the arena before
anybody knows what it holds (``tensord.daemon.http.exchange``); nor does a message whose form is known
(``tensord.daemon.grpc.message_forms``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

import msgspec

from tensord.daemon.submit.accounts import Account
from tensord.daemon.submit.pending import OnCompletion
from tensord.daemon.submit.scheduling import UNSCHEDULED, Scheduling
from tensord.daemon.submit.submitter import Submitter
from tensord.daemon.tracing.tracer import Trace
from tensord.shm.arena import ALIGNMENT, Lease
from tensord.shm.errors import DEFECT, Internal, ServingError, from_code
from tensord.shm.forms import Form, request_template
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import (
    Completion,
    Inline,
    Parameter,
    Place,
    RegionSlice,
    RequestedOutput,
    Slice,
    Submit,
    Tensor,
)

_log = logging.getLogger(__name__)

#: What an input's bytes are: themselves (BYTES length-prefixed), or where they lie: in a client's region, in the request's lease.
Content = bytes | memoryview | RegionSlice | Slice
_PLACES = (RegionSlice, Slice)
_EMPTY = Inline(b"")


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


class Inference:
    """A request under way. Its owner may ``cancel`` it; after that no callback comes."""

    __slots__ = ("_cancelled", "_on_completion", "_request", "_request_id", "_submitter", "on_room")

    def __init__(self, submitter: Submitter, request: InferenceRequest, on_completion: OnCompletion) -> None:
        self._submitter = submitter
        self._request = request
        self._on_completion = on_completion
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
            self._on_completion(Completion(0, error.code, error.message), None)
        except Exception:
            _log.exception("a request for model '%s' could not be sent", self._request.model)
            self._on_completion(Completion(0, Internal.code, DEFECT), None)
        on_room, self.on_room = self.on_room, None
        if on_room is not None and not self._cancelled:
            on_room()

    def send(self, lease: Lease | None) -> None:
        """Puts the tensors into their places and submits. Raises as ``Submitter.submit``; leases are given back."""
        request, submitter, trace = self._request, self._submitter, self._request.trace
        leases = () if lease is None else (lease,)
        if request.lease is not None:
            leases = (request.lease, *leases)
        try:
            tensors = _placed(request, lease, submitter.inline_byte_size)
            record = _record(request, submitter.next_id(), tensors, time.monotonic_ns())
            if trace is not None:
                record = msgspec.structs.replace(record, trace=trace.level)
                trace.client_id = request.id
                trace.stamp("REQUEST_START")
                self._on_completion = _traced(trace, self._on_completion)
        except BaseException:
            for each in leases:
                submitter.give_back(each)
            raise
        submitter.submit(record, leases, self._on_completion, request.account)
        self._request_id = record.request_id


def begin(submitter: Submitter, request: InferenceRequest, on_completion: OnCompletion) -> Inference:
    """Sends a request now, or when there is room for its tensors; ``on_completion`` is never called from here.

    A refusal that comes later arrives as a Completion with a code.
    Raises: InvalidArgument: its tensors could never fit.  Unavailable: too many requests are in flight.
    """
    inline, size = submitter.inline_byte_size, 0
    for _, _, _, content in request.inputs:
        if not isinstance(content, _PLACES) and len(content) > inline:
            size += -(-len(content) // ALIGNMENT) * ALIGNMENT
    inference = Inference(submitter, request, on_completion)
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


def form_of(submitter: Submitter, request: InferenceRequest) -> Form[Submit]:
    """The form of requests that differ from that one in ids, deadlines, scheduling, and tensors that lie in no region."""
    tensors = tuple(
        [
            Tensor(name, datatype, shape, content if isinstance(content, RegionSlice) else _EMPTY)
            for name, datatype, shape, content in request.inputs
        ]
    )
    return submitter.forms.form(request_template(_record(request, 0, tensors, 0)))


def _record(request: InferenceRequest, request_id: int, tensors: tuple[Tensor, ...], received_ns: int) -> Submit:
    return Submit(
        request_id,
        request.model,
        request.version,
        tensors,
        request.outputs,
        request.parameters,
        request.id,
        0,
        request.deadline_ns,
        received_ns,
        *request.scheduling,
    )


def _give_back(submitter: Submitter, request: InferenceRequest) -> None:
    """Of a request that is not sent."""
    if request.lease is not None:
        submitter.give_back(request.lease)


def _traced(trace: Trace, on_completion: OnCompletion) -> OnCompletion:
    """A callback that lets the trace learn of the last answer first."""

    def completed(completion: Completion, lane: SubmitterLane | None) -> None:
        if completion.final:
            trace.completed(completion)
        on_completion(completion, lane)

    return completed


def _placed(request: InferenceRequest, lease: Lease | None, inline: int) -> tuple[Tensor, ...]:
    used = 0
    tensors: list[Tensor] = []
    for name, datatype, shape, content in request.inputs:
        place: Place
        if isinstance(content, _PLACES):
            place = content
        elif len(content) <= inline:
            place = Inline(bytes(content))
        else:
            assert lease is not None
            size = len(content)
            lease.view[used : used + size] = content
            place = Slice(lease.place.segment, lease.place.offset + used, size)
            used += -(-size // ALIGNMENT) * ALIGNMENT
        tensors.append(Tensor(name, datatype, shape, place))
    return tuple(tensors)


# ------------------------------------------------------------------------------------------------------------ awaitable


@dataclass(frozen=True, slots=True)
class Answer:
    """One good answer; its content is there until the next one is asked for."""

    completion: Completion
    #: None: nothing of it lies in an arena.
    lane: SubmitterLane | None

    def content(self, tensor: Tensor) -> bytes | memoryview:
        """The bytes of an output that did not go to a region."""
        place = tensor.place
        assert not isinstance(place, RegionSlice)
        if isinstance(place, Inline):
            return place.content
        assert self.lane is not None
        return self.lane.view(place)


@contextlib.asynccontextmanager
async def answers(
    submitter: Submitter, request: InferenceRequest
) -> AsyncIterator[AsyncIterator[Answer | ServingError]]:
    """``async with answers(...) as each: async for answer in each``; one answer, or for a decoupled model any number.

    An error among several answers is an answer, and others may follow. Leaving the block early, by an error or a cancellation
    too, cancels the request.
    Raises, also while iterating: the ServingError the request was refused with, or that is its last answer.
    """
    arrived: asyncio.Queue[tuple[Completion, SubmitterLane | None]] = asyncio.Queue()
    inference = begin(submitter, request, lambda completion, lane: arrived.put_nowait((completion, lane)))
    each = _iterate(submitter, arrived)
    try:
        yield each
    finally:
        inference.cancel()
        await each.aclose()
        while not arrived.empty():
            _release(submitter, *arrived.get_nowait())


async def _iterate(
    submitter: Submitter, arrived: asyncio.Queue[tuple[Completion, SubmitterLane | None]]
) -> AsyncGenerator[Answer | ServingError, None]:
    while True:
        completion, lane = await arrived.get()
        try:
            if completion.code:
                error = from_code(completion.code, completion.message)
                if completion.final:
                    raise error
                yield error
            elif lane is not None and not completion.is_mark:
                yield Answer(completion, lane)
        finally:
            _release(submitter, completion, lane)
        if completion.final:
            return


def _release(submitter: Submitter, completion: Completion, lane: SubmitterLane | None) -> None:
    if lane is None:
        return
    if not completion.final:
        submitter.taken(lane, completion)
    elif completion.lease is not None:
        submitter.release(lane, completion.lease)
