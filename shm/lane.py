"""A lane is the connection between one submitter and one worker. This module has a class for each end.

    submitter                                            worker
    owns the request arena ── SegmentOpened + fd ──▶     maps the segment read-only
                           ── RequestRecord, Cancel ▶    (a Prepare comes before the first request that uses it)
    maps the segment       ◀── SegmentOpened + fd ──     owns the response arena
                           ◀──── AnswerRecord ──────     (a PrepareAnswer comes before the first answer that uses it)
                           ──── Release ───────────▶     frees the leases in the response arena

Each end first sends a WireVersion, the version of the record format that it uses. An end that gets another version raises
InvalidArgument.

If a process cannot map a segment, such as at the limit of open files, it sends SegmentRefused, and each request or answer
with tensors in the segment fails. The owner of the segment sends SegmentOpened again before it next uses the segment.

If the submitter is a client, the worker does not trust the client's records, and refuses records of more than
``MAX_CLIENT_RECORD`` bytes. The client has no request arena. Its segments are regions that only requests on this lane can name.

A front has one request arena for all its lanes, so it can send a request to another worker without a copy. Each lane has its
own response arena.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import Any, get_args

from tensord.shm import descriptors
from tensord.shm.arena import Arena, ArenaMap, Budget, Lease, LeaseKey, OnSegment
from tensord.shm.channel import MAX_RECORD, Channel, DescriptorsLost
from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.shm.messages import (
    LAST,
    WIRE_VERSION,
    AnswerRecord,
    Cancel,
    Content,
    ForDispatcher,
    Prepare,
    PrepareAnswer,
    PreparedAnswer,
    PreparedRequest,
    Release,
    RequestRecord,
    SegmentClosed,
    SegmentOpened,
    SegmentRefused,
    Slice,
    Taken,
    ToSubmitter,
    ToWorker,
    TraceContext,
    WireVersion,
)
from tensord.shm.prepared import Numbered, Numbers, PublishedNumbers, ReceivedNumbers
from tensord.shm.record import decoder

_FROM_WORKER = decoder(ToSubmitter)
_FROM_SUBMITTER = decoder(ToWorker)
#: The most leases in one Release: it fits into a datagram however large the numbers are.
_MAX_RELEASES = 1024
#: Bytes of the largest record on a client's lane, and of the first segment of its response arena.
MAX_CLIENT_RECORD = 1 << 20
CLIENT_BYTE_SIZE = 256 << 10
#: Bytes that a response counts besides its tensors, against the limit of responses that no client has taken yet.
_RESPONSE_BYTE_SIZE = 256
_REQUESTS = get_args(ForDispatcher)
#: The records that a submitter sends to a worker's dispatcher; SegmentClosed on a client's lane only.
Instruction = ForDispatcher | SegmentClosed


class LaneEnd:
    """One end of a lane, with its own arena and the mapped arena of the other end. Base class of SubmitterLane and WorkerLane.

    For each segment of its arena, an end sends SegmentOpened with the segment's file descriptor. The other end maps the segment
    until a SegmentClosed comes. If the other end cannot map the segment, it answers SegmentRefused instead.
    """

    def __init__(
        self, channel: Channel, sock: socket.socket, arena: Arena, theirs: ArenaMap, writable: bool = False
    ) -> None:
        """Sends a WireVersion to the other end.

        Args:
          channel: sends and receives on ``sock``, and owns it.
          arena: this end's arena.
          theirs: the map of the segments that the other end announces.
          writable: whether the other end may map this end's segments writable, as page-locking for a GPU needs.
        """
        #: The channel of the lane. Records that are queued on it are sent by the next ``flush``.
        self.channel = channel
        channel.send(WireVersion(WIRE_VERSION))
        #: True once the other end has said that it speaks the same version of the wire. If the lane ends before that, the other
        #: end did not take it, and has read nothing.
        self.agreed = False
        #: True while an answer of the lane itself to what was received waits for a flush.
        self.unsaid = False
        #: Its descriptor, for epoll.
        self.fileno = sock.fileno
        look = select.poll()
        look.register(sock, select.POLLIN)
        #: Polls for something to receive, for so many milliseconds: receiving in vain costs ten times as much.
        self.ready = look.poll
        self.arena = arena
        self._writable = writable
        #: The segments of the arena that the other end knows.
        self.announced: set[int] = set()
        #: The closures of segments that the other end was told of.
        self._closures = arena.closures
        self._theirs = theirs
        #: Returns bytes of the other end's arena, read-only: ``ArenaMap.view``.
        self.view = theirs.view

    def _first(self) -> tuple[list[Any], list[int]] | None:
        """Checks the other end's first record. Returns the next records and their descriptors, or None if no records came."""
        received = self.channel.receive()
        if received is None:
            return None
        self.agreed = _agree(*received)
        return received if received[0] else self.channel.receive()

    def announce(self, segment: int) -> None:
        """Queues a SegmentOpened for segment number ``segment`` of this end's arena, unless the segment is announced already.

        Raises Unavailable if this process can open no more files.
        """
        if segment not in self.announced:
            opened = self.arena.segments[segment]
            with descriptors.needed("sending an arena segment"):
                self.channel.put(SegmentOpened(segment, opened.byte_size), opened.share(self._writable))
            self.announced.add(segment)

    def _apply_segment(self, record: object, fds: list[int]) -> None:
        """Carries out a SegmentOpened, SegmentClosed or SegmentRefused. ``fds`` are the descriptors that came with the record.

        Raises InvalidArgument if ``record`` has another type, came with the wrong number of descriptors, or opens an invalid
        segment.
        """
        if type(record) is SegmentRefused and not fds:
            self.announced.discard(record.segment)
        elif type(record) is SegmentOpened and len(fds) == 1:
            try:
                self._theirs.open(record.segment, record.byte_size, fds[0])
            except Unavailable:
                self._refuse(record.segment)
        elif type(record) is SegmentClosed and not fds:
            self._theirs.close_segment(record.segment)
        else:
            if fds:
                _refuse_descriptors(fds)
            raise InvalidArgument(f"{type(record).__name__} with {len(fds)} descriptors is not expected here")

    def _refuse(self, segment: int) -> None:
        self._theirs.refuse(segment)
        self.channel.put(SegmentRefused(segment))
        self.unsaid = True

    def flush(self) -> bool:
        """Sends all queued records. Returns True if all are sent. If not, call it again when the socket is writable."""
        self.unsaid = False
        if self._closures != self.arena.closures:
            self._withdraw_closed()
        return self.channel.flush()

    def _withdraw_closed(self) -> None:
        """Queues a SegmentClosed for each segment that ``announce`` has announced and this end's arena has closed since."""
        self._closures = self.arena.closures
        for gone in self.announced - self.arena.segments.keys():
            self.channel.put(SegmentClosed(gone))
            self.announced.discard(gone)

    def close(self) -> None:
        """Closes the socket and unmaps the other end's arena."""
        self.channel.close()
        self._theirs.close()


class SubmitterLane(LaneEnd):
    """A submitter's end of a lane. It sends requests and receives the answers.

    ``arena`` holds the tensors of requests. All lanes of the submitter share it, and closing a lane does not close it.
    """

    def __init__(self, sock: socket.socket, arena: Arena, writable: bool = False) -> None:
        """Takes ownership of ``sock`` and sends a WireVersion to the worker.

        ``writable`` lets the worker map the arena writable, as page-locking for a GPU needs.
        """
        super().__init__(Channel(sock, _FROM_WORKER), sock, arena, ArenaMap(), writable)
        self._releases: list[LeaseKey] = []
        #: Gives an answer's lease back to the worker, once nobody needs its bytes; the next ``flush`` tells the worker.
        self.release = self._releases.append
        self._published: PublishedNumbers[PreparedRequest] = PublishedNumbers(self.channel, Prepare)
        #: Prepared answers by number, each with the number of tensors that its answers carry in their own records.
        self._received: ReceivedNumbers[tuple[PreparedAnswer, int]] = ReceivedNumbers()

    def submit(self, record: RequestRecord, numbered: Numbered[PreparedRequest] | None = None) -> None:
        """Queues a request for the worker. The caller has already written the request's inputs and announced their segments.

        ``numbered`` is the prepared request that ``record`` names by number, or None if ``record`` contains the prepared
        request. If ``numbered`` was not sent on this lane before, this method queues ``numbered`` before the request.
        """
        if numbered is not None and numbered not in self._published:
            self._published.publish(numbered)
        self.channel.put(record)

    def submit_traced(
        self, context: TraceContext, record: RequestRecord, numbered: Numbered[PreparedRequest] | None = None
    ) -> None:
        """Queues the trace ``context`` of a request, then the request as ``submit`` does."""
        if numbered is not None and numbered not in self._published:
            self._published.publish(numbered)
        if record.sequence_id:
            # A worker decodes the datagram of a sequence's traced request in Python (slowly), with all that is in it.
            self.channel.put_apart(context, record)
            return
        self.channel.put(context)
        self.channel.put(record)

    def submit_at_once(self, record: RequestRecord, numbered: Numbered[PreparedRequest] | None = None) -> bool:
        """Sends a request at once if possible. Otherwise queues it as ``submit`` does and returns False: call ``flush``."""
        if numbered is not None and numbered not in self._published:
            self._published.publish(numbered)
        return self.channel.send_alone(record)

    def cancel(self, request_id: int) -> None:
        """Tells the worker that the submitter needs no answer to a request. The worker still sends a final answer."""
        self.channel.put(Cancel(request_id))

    def taken(self, request_id: int, byte_size: int) -> None:
        """Queues a record that tells the worker that the client has read ``byte_size`` more bytes of a request's responses.

        The worker may then send more responses.
        """
        self.channel.put(Taken(request_id, byte_size))

    def flush(self) -> bool:
        """Sends all queued records, and tells the worker which leases were passed to ``release``. Returns True if all are sent.

        If it returns False, records are still queued: call it again when the socket is writable.
        """
        self.unsaid = False
        if self._closures != self.arena.closures:
            self._withdraw_closed()
        if self._releases:
            while len(self._releases) > _MAX_RELEASES:
                self.channel.put(Release(tuple(self._releases[:_MAX_RELEASES])))
                del self._releases[:_MAX_RELEASES]
            releases = Release(tuple(self._releases))
            self._releases.clear()
            return self.channel.send_alone(releases) or self.channel.flush()
        return self.channel.flush()

    def receive(self) -> list[tuple[PreparedAnswer, AnswerRecord]] | None:
        """Receives a datagram and returns the answers in it. The list may be empty. Returns None if no datagram is waiting.

        In each tuple, the PreparedAnswer is what many answers share, and the AnswerRecord is what only this answer has.

        Raises: ChannelClosed: the worker has closed its end or exited. Run the worker's unfinished requests again only once the
          worker's process has ended.  InvalidArgument: the datagram is malformed, the worker uses another version of the record
          format, an answer names a prepared answer that the worker has not sent, or its number of tensors is wrong.
        """
        try:
            received = self.channel.receive() if self.agreed else self._first()
        except DescriptorsLost as lost:
            self._refuse(_segment_of(lost))
            return []
        if received is None:
            return None
        records, fds = received
        if fds:
            if len(records) != 1:
                _refuse_descriptors(fds)
            self._apply_segment(records[0], fds)
            return []
        known = self._received
        answers: list[tuple[PreparedAnswer, AnswerRecord]] = []
        for record in records:
            kind = type(record)
            if kind is not AnswerRecord and kind is not PrepareAnswer:
                self._apply_segment(record, [])
                continue
            said = record.prepared
            if isinstance(said, PreparedAnswer):
                # What lies in no region travels with every record.
                prepared, own = said, sum([tensor.region is None for tensor in said.outputs])
            else:
                # The number is resolved now: a later record may give it another meaning.
                prepared, own = known[said]
            if kind is PrepareAnswer:
                known.learn(record.number, (prepared, own))
                continue
            if len(record.contents) != own:
                raise InvalidArgument(f"{len(record.contents)} tensors came in an answer that was prepared for {own}")
            if record.lease is not None and record.lease[0] in self._theirs.refused:
                prepared, record = LAST, self._unreachable(record.request_id, record.lease, prepared.final)
            answers.append((prepared, record))
        return answers

    def pinned(self, contents: tuple[Content, ...]) -> Callable[[Slice], memoryview]:
        """Returns a function that returns the bytes of a Slice in an answer's ``contents``, even after this lane is closed."""
        return {content: self.view(content) for content in contents if type(content) is Slice}.__getitem__

    def _unreachable(self, request_id: int, lease: LeaseKey, final: bool) -> AnswerRecord:
        self.channel.put(Release((lease,)))
        if not final:
            self.cancel(request_id)  # nobody takes the responses that would follow
        self.unsaid = True
        try:
            self._theirs.view(Slice(lease[0], lease[1], 0))
        except Unavailable as error:
            return AnswerRecord(request_id, LAST, code=error.code, message=error.message)
        raise AssertionError("an answer that can be reached")


class WorkerLane(LaneEnd):
    """The worker's end of a lane. It receives requests from one front or client, and sends the answers.

    It owns the response arena of the lane.
    """

    def __init__(
        self,
        sock: socket.socket,
        byte_size: int,
        max_byte_size: int,
        keep_byte_size: int,
        on_segment: OnSegment | None = None,
        writable: bool = False,
        segments: ArenaMap | None = None,
        buffer: bytearray | None = None,
        budget: Budget | None = None,
    ) -> None:
        """Takes ownership of ``sock``, sends a WireVersion and creates the response arena, which holds the tensors of answers.

        Args:
          byte_size: the number of bytes of the response arena's first segment. It is rounded up to a power of two.
          max_byte_size: the most bytes that the response arena may have, without its reserve segment for small tensors.
          keep_byte_size: how many bytes of unused large segments the response arena keeps for later answers.
          on_segment: called with each new segment of the response arena and each segment of a front, if not None.
          writable: whether this process maps a front's segments writable, as page-locking for a GPU needs.
          segments: maps the client's segments in this process, or None if the submitter is a front.
          buffer: a buffer for received datagrams, or None for a new one. All lanes of one thread may share a buffer.
          budget: limits the bytes of all response arenas that share this budget, or None for no such limit.
        """
        client = self._client = segments is not None
        channel = Channel(sock, _FROM_SUBMITTER, MAX_CLIENT_RECORD if client else MAX_RECORD, buffer)
        theirs = ArenaMap(on_segment, writable) if segments is None else segments
        arena = Arena(byte_size, max_byte_size, keep_byte_size, on_segment, lazy=client, budget=budget)
        super().__init__(channel, sock, arena, theirs)
        #: Lends room for an answer in the response arena: ``Arena.loan``.
        self.loan = arena.loan
        #: Closes a segment that a client has shared on its lane: ``ArenaMap.close_segment``.
        self.close_segment = theirs.close_segment
        numbers: Numbers[PreparedAnswer] = Numbers()
        #: Returns a prepared answer with its number on this lane, a new one if it has none.
        self.number = numbers.number
        #: The prepared answers whose numbers the submitter was told.
        self.published: PublishedNumbers[PreparedAnswer] = PublishedNumbers(self.channel, PrepareAnswer)

    def receive(self) -> list[Instruction] | None:
        """Receives one datagram and returns the datagram's records in order. Returns None if no datagram is waiting.

        Carries out records about leases and segments and does not return them, except a SegmentClosed of a client.

        Raises: ChannelClosed: the submitter has closed the lane or exited.  InvalidArgument: the datagram is malformed, the
          submitter uses another version of the record format, or a record gives back a lease that does not exist.
        """
        try:
            received = self.channel.receive() if self.agreed else self._first()
        except DescriptorsLost as lost:
            self._refuse(_segment_of(lost))
            return []
        return None if received is None else self._apply(*received)

    def read(self, content: bytes, fds: list[int], flags: int) -> list[Instruction]:
        """Decodes a datagram that the caller has received. Returns the datagram's records in order, and raises, as ``receive``.

        Args:
          content: the datagram's bytes.
          fds: the file descriptors that came with the datagram.
          flags: the flags that ``recvmsg`` returned.
        """
        try:
            records, fds = self.channel.read(content, fds, flags)
            if not self.agreed:
                self.agreed = _agree(records, fds)
            return self._apply(records, fds)
        except DescriptorsLost as lost:
            self._refuse(_segment_of(lost))
            return []

    def _apply(self, records: list[Any], fds: list[int]) -> list[Instruction]:
        if len(records) == 1 and type(records[0]) is SegmentOpened:
            self._apply_segment(records[0], fds)
            return []
        if fds:
            _refuse_descriptors(fds)
        wanted: list[Instruction] = []
        returned: list[LeaseKey] = []
        for record in records:
            if type(record) in _REQUESTS or (self._client and type(record) is SegmentClosed):
                # A client's segment ends in its order: requests before it may still lie there.
                wanted.append(record)
            elif type(record) is Release:
                returned += record.leases
            else:
                self._apply_segment(record, [])
        if returned:
            if (stale := self.arena.release_all(returned)) is not None:
                raise InvalidArgument(f"lease {stale} is given back but not on loan")
            # The submitter may have segments mapped that are closed.
            self.unsaid |= self._closures != self.arena.closures
        return wanted

    def is_announced(self, lease: Lease) -> bool:
        """Returns whether the submitter has been told of the segment of ``lease``, and of all segments that this end closed."""
        return lease.place.segment in self.announced and self._closures == self.arena.closures

    def complete(self, record: AnswerRecord, numbered: Numbered[PreparedAnswer] | None = None) -> None:
        """Queues an answer for the submitter. The caller has already written the answer's outputs.

        ``numbered`` is the prepared answer that ``record`` names by number, or None if ``record`` contains the prepared answer.
        Raises Unavailable if the submitter does not have the outputs' segment yet and this process can open no more files.
        """
        if numbered is not None and numbered not in self.published:
            self.published.publish(numbered)
        if record.lease is not None:
            self.announce(record.lease[0])
        self.channel.put(record)

    def complete_encoded(self, numbered: Numbered[PreparedAnswer], records: list[bytes]) -> None:
        """Queues answers for the submitter. Each of ``records`` is an encoded AnswerRecord with the bytes of all outputs.

        All ``records`` name the prepared answer ``numbered``, which is queued first if it was not sent on this lane yet.
        """
        if numbered not in self.published:
            self.published.publish(numbered)
        self.channel.put_encoded(records)

    def close(self) -> None:
        """Closes the socket, unmaps the submitter's arena and closes the response arena."""
        super().close()
        self.arena.close()


def _agree(records: list[Any], fds: list[int]) -> bool:
    first = records.pop(0) if records else None
    if type(first) is WireVersion and first.number == WIRE_VERSION:
        if fds and not records:
            _refuse_descriptors(fds)
        return True
    descriptors.close(fds)
    if type(first) is not WireVersion:
        raise InvalidArgument(f"a lane begins with the version of the wire, not with {type(first).__name__}")
    raise InvalidArgument(f"the other end speaks version {first.number} of the wire, this one version {WIRE_VERSION}")


def _segment_of(lost: DescriptorsLost) -> int:
    if len(lost.records) != 1 or type(lost.records[0]) is not SegmentOpened:
        raise InvalidArgument(f"malformed datagram: {lost}")
    return lost.records[0].segment


def _refuse_descriptors(fds: list[int]) -> None:
    descriptors.close(fds)
    raise InvalidArgument(f"{len(fds)} descriptors came with records that carry none")


def response_byte_size(contents: tuple[Content, ...]) -> int:
    """Returns a response's size: the bytes of its tensors, ``contents``, plus a constant for the response itself."""
    size = _RESPONSE_BYTE_SIZE
    for content in contents:
        size += content.byte_size if type(content) is Slice else len(content)  # type: ignore[arg-type]
    return size
