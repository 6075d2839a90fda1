"""Places the input tensors of a request where a worker can read them, and sends the request.

Small tensors go into the request's record. Large tensors are copied into the front's request arena. If the arena has no room,
the request waits for memory. A tensor that already lies in the request arena or in a client's region is not copied.
A large tensor that came as JSON gets memory in the request arena, and ``fill`` converts the JSON into this memory.
A copied or converted tensor begins at a multiple of 64 bytes, so that an XLA executable can use it in place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from tensord.daemon.submit.in_flight import InFlight
from tensord.daemon.submit.submitter import Submitter
from tensord.shm.arena import ALIGNMENT, Lease
from tensord.shm.common.scheduling import UNSCHEDULED, Scheduling
from tensord.shm.errors import DEFECT, Internal, ServingError
from tensord.shm.messages import (
    Content,
    PreparedRequest,
    RegionSlice,
    RequestRecord,
    Slice,
)
from tensord.shm.tracer import Trace

_log = logging.getLogger(__name__)

#: An input's bytes (BYTES length-prefixed), or the place where they lie: in a client's region, or in the request's lease.
InputContent = bytes | memoryview | RegionSlice | Slice
_PLACES, _BYTES = (RegionSlice, Slice), (bytes, memoryview)


class Unconverted(Protocol):
    """A large tensor that came as JSON, and is converted once it has a place in shared memory."""

    @property
    def byte_size(self) -> int:
        """Returns how many bytes the tensor has at most after its JSON is converted. The exact size is known only then."""

    def fill(self, place: memoryview) -> Generator[None, None, int]:
        """Converts the tensor's JSON into ``place``. Yields often so that other work can run. Returns the size in bytes."""


class UnsentRequest(msgspec.Struct):
    """A parsed HTTP or gRPC request that has not been sent to a worker yet."""

    #: The constant part of the request, which many requests have in common: all but id, scheduling and contents.
    prepared: PreparedRequest
    #: The content of each input, in the order of the inputs.
    contents: Sequence[InputContent]
    id: str = ""
    scheduling: Scheduling = UNSCHEDULED
    #: CLOCK_MONOTONIC; a request that still queues then is not run. 0: none.
    deadline_ns: int = 0
    #: Where it is a sampled one. Whoever answers ends it.
    trace: Trace | None = None
    #: Where the Slices among its inputs lie. ``begin`` takes it over, also where it raises.
    lease: Lease | None = None


def begin(submitter: Submitter, asked: InFlight, request: UnsentRequest) -> None:
    """Sends ``request`` to a worker as soon as shared memory has room for the request's tensors.

    ``asked``: gets the answers, but not before this function returns. It gets an error if the wait for room takes too long.
    Raises InvalidArgument if the arena could never hold the tensors. Raises Unavailable if too many requests are in flight.
    """
    size = room(request.contents, submitter.inline_byte_size)
    if not size:
        _send(submitter, asked, request, None)
        return
    try:
        lease = submitter.loan(size, asked.account)
    except BaseException:
        _give_back(submitter, request)
        raise
    if lease is not None:
        _send(submitter, asked, request, lease)
    else:
        submitter.wait_for_room(
            size, partial(_granted, submitter, asked, request), request.prepared.model, asked.account
        )


def room(contents: Iterable[InputContent | Unconverted], inline_byte_size: int) -> int:
    """Returns how many bytes of the request arena a request still needs for its input tensors ``contents``.

    A tensor that lies in shared memory needs none. A tensor given as bytes needs none if the request's record has room for it.
    ``inline_byte_size``: how many bytes of tensors a record may hold.
    """
    size, left = 0, inline_byte_size
    for content in contents:
        if isinstance(content, _BYTES):
            if len(content) <= left:
                left -= len(content)
            else:
                size += -(-len(content) // ALIGNMENT) * ALIGNMENT
        elif not isinstance(content, _PLACES):
            size += -(-content.byte_size // ALIGNMENT) * ALIGNMENT
    return size


def place(
    contents: Iterable[InputContent | Unconverted], lease: Lease | None, inline_byte_size: int
) -> tuple[Content, ...]:
    """Returns, for each input tensor of a request, its bytes or its place in the arena. Leaves out tensors that lie in regions.

    A tensor that lies in the arena already is not copied. A tensor given as bytes is returned as bytes if the returned bytes
    then have at most ``inline_byte_size`` bytes in total. Otherwise the tensor is copied into ``lease``. A tensor in JSON
    (``Unconverted``) gets a place in ``lease``, and the caller must then write the tensor there with ``fill``. ``lease`` may be
    None if no tensor needs it.
    """
    used, left = 0, inline_byte_size
    placed: list[Content] = []
    for content in contents:
        if isinstance(content, RegionSlice):
            continue
        if isinstance(content, Slice):
            placed.append(content)
        elif isinstance(content, _BYTES) and len(content) <= left:
            left -= len(content)
            placed.append(bytes(content))
        else:
            assert lease is not None
            if isinstance(content, _BYTES):
                size = len(content)
                lease.view[used : used + size] = content
            else:
                size = content.byte_size
            placed.append(Slice(lease.place.segment, lease.place.offset + used, size))
            used += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(placed)


def fill(
    inputs: Sequence[InputContent | Unconverted], contents: tuple[Content, ...], lease: Lease
) -> Generator[None, None, tuple[Content, ...]]:
    """Converts a request's JSON tensors into the memory of ``lease``. Yields often, so that the caller can do other work.

    ``contents``: what ``place`` returned for ``inputs`` and ``lease``. Returns ``contents`` with the JSON tensors' exact sizes.
    Raises InvalidArgument if a tensor's JSON is malformed, or does not fit the tensor's datatype and shape.
    """
    filled: list[Content] = []
    own = [content for content in inputs if not isinstance(content, RegionSlice)]
    for content, given in zip(contents, own, strict=True):
        if isinstance(content, Slice) and not isinstance(given, InputContent):
            start = content.offset - lease.place.offset
            size = yield from given.fill(lease.view[start : start + content.byte_size])
            content = Slice(content.segment, content.offset, size)
        filled.append(content)
    return tuple(filled)


def _granted(submitter: Submitter, asked: InFlight, request: UnsentRequest, lease: Lease | ServingError) -> None:
    try:
        if not isinstance(lease, ServingError) and not asked.cancelled:
            _send(submitter, asked, request, lease)
        else:
            if isinstance(lease, Lease):
                submitter.give_back(lease)
            _give_back(submitter, request)
            if isinstance(lease, ServingError) and not asked.cancelled:
                raise lease
    except ServingError as error:
        asked.fail(error)
    except Exception:
        _log.exception("a request for model '%s' could not be sent", request.prepared.model)
        asked.fail(Internal(DEFECT))
    if not asked.cancelled:
        asked.left_line()


def _send(submitter: Submitter, asked: InFlight, request: UnsentRequest, lease: Lease | None) -> None:
    trace = request.trace
    leases = () if lease is None else (lease,)
    if request.lease is not None:
        leases = (request.lease, *leases)
    try:
        contents = place(request.contents, lease, submitter.inline_byte_size)
        asked.record = RequestRecord.scheduled(
            request.scheduling,
            submitter.next_id(),
            request.prepared,
            contents,
            request.id,
            request.deadline_ns,
            time.monotonic_ns(),
            0 if trace is None else trace.level,
        )
        if trace is not None:
            trace.sent(asked.record)
    except BaseException:
        for each in leases:
            submitter.give_back(each)
        raise
    asked.leases = leases
    submitter.send(asked)


def _give_back(submitter: Submitter, request: UnsentRequest) -> None:
    if request.lease is not None:
        submitter.give_back(request.lease)
