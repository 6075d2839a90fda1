"""A worker's end of the connection to one submitter: the lane, requests in flight, and waiting answers.

When a lane ends, the worker cancels the requests of this lane. ``LaneOwner`` limits the bytes of requests, and separately the
bytes of answers, on all lanes of the clients that one user runs.

These bytes count as requests: records of which a part has not arrived yet, prepared parts, and requests without an answer.
These bytes count as answers: segments of the lanes' response arenas, answers that wait for room in a response arena, and
records that wait until the client reads from the lane's socket.

Only the thread of the worker's event loop may use these objects, unless a method is said to be thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tensord.shm.arena import Budget
from tensord.shm.arrays import Array
from tensord.shm.durations import PROTOCOLS
from tensord.shm.errors import InvalidArgument, ServingError, Unavailable
from tensord.shm.lane import WorkerLane
from tensord.shm.messages import AnswerRecord, Prepare, PreparedAnswer, PreparedTensor, TraceContext
from tensord.shm.prepared import Numbered, ReceivedNumbers, memory_of
from tensord.shm.tracer import Trace
from tensord.workers.regions.lane_segments import LaneSegments
from tensord.workers.requests.response_sender import Described, ResponseKind

if TYPE_CHECKING:
    from tensord.workers.requests.preparation import Preparation
    from tensord.workers.requests.request import Request

#: A request.
R = TypeVar("R")

#: Kinds of small responses that are known at once.
_MAX_KINDS = 1024
#: Bytes of everything that a client's numbers stand for, as it is kept; and what of it is made of each besides what came.
_MAX_PREPARED = 16 << 20
_PREPARATION = 2 << 10
#: No number of leases that came back.
NEVER_LOOKED = -1


@dataclass(frozen=True, slots=True)
class BlockedAnswer(Generic[R]):
    """An answer that waits for room in the response arena."""

    request: R
    result: dict[str, Array] | ServingError
    byte_size: int
    give_up_ns: int


class SubmitterLink(Generic[R]):
    """Connects a worker with a submitter: its lane, requests in flight, and waiting answers."""

    def __init__(
        self,
        peer: int,
        lane: WorkerLane,
        due: list[SubmitterLink[R]] | None = None,
        segments: LaneSegments | None = None,
        protocol: str = "http",
        owner: LaneOwner | None = None,
    ) -> None:
        """Connects the worker with a submitter.

        Args:
          peer: the number that the supervisor gave this submitter.
          lane: the submitter's lane.
          due: the list of submitters to flush soon, to which ``flush_soon`` adds this one; None: ``flush_soon`` has no effect.
          segments: the segments that a client announces on the lane; None: the submitter is a front.
          protocol: the protocol that a front serves, one of ``durations.PROTOCOLS``; ignored for clients.
          owner: counts bytes on all lanes of the user who runs the client; None: the submitter is a front.
        """
        self.peer = peer
        self.lane = lane
        self.segments = segments
        #: The place in PROTOCOLS.
        self.protocol = PROTOCOLS.index(protocol if segments is None else "lane")
        self.owner = owner
        if owner is not None:
            owner.submitters[self] = None
        #: True if a sequence may end with this client's lane.
        self.sequences = False
        self._due: list[SubmitterLink[R]] = [] if due is None else due
        #: Request id -> request, from its validation to its final answer.
        self.in_flight: dict[int, R] = {}
        self.preparations: ReceivedNumbers[Preparation] = ReceivedNumbers()
        #: Oldest first: none is placed before those of its kind, small or large, that wait longer.
        self.blocked: deque[BlockedAnswer[R]] = deque()
        #: How many leases had come back when room for those answers was last looked for; NEVER_LOOKED: it is to be looked for.
        self.returned = NEVER_LOOKED
        #: Bytes those answers hold in the worker's own memory.
        self.blocked_byte_size = 0
        #: Bytes of records that the socket of a client's lane did not take.
        self.unsent_byte_size = 0
        #: The bytes of both together, as the owner knows them.
        self._waiting_byte_size = 0
        #: The kinds of requests (version and key) whose answers were too large while any was blocked.
        self.bulky: set[tuple[Hashable, Hashable]] = set()
        #: Requests of those that are not run until there is room again.
        self.held: list[R] = []
        self._response_kinds: dict[tuple[int, bool, Described], ResponseKind] = {}
        #: Bytes of what each number of a client stands for, and of all.
        self._prepared_sizes: dict[int, int] = {}
        self._prepared_size = 0
        #: Request id -> bytes of a client's request; of all of them, of what is prepared, and of a record that is not whole.
        self._sizes: dict[int, int] = {}
        self.request_byte_size = 0
        self._half_size = 0
        #: True if something was queued since the last flush.
        self.unflushed = False
        #: How often a number of answers had come to stand for another one when this was last looked at.
        self.renumbered = 0
        #: The trace that the next request belongs to, if that request has its id and is traced.
        self.context: TraceContext | None = None
        #: The trace that a client's next request belongs to, as the client said; and the client's requests that are traced, by
        #: their ids.
        self.parent: TraceContext | None = None
        self.traces: dict[int, Trace] = {}
        self.closed = False

    def learn(self, record: Prepare, preparation: Preparation) -> None:
        """Stores ``preparation`` for later requests that give the number ``record.number``. Replaces an older entry.

        Raises InvalidArgument if the number is out of bounds, or if a client's prepared requests take too many bytes.
        """
        self.preparations.learn(record.number, preparation)
        if self.segments is not None:
            size = _PREPARATION + memory_of(record.prepared)
            more = size - self._prepared_sizes.get(record.number, 0)
            self._prepared_size += more
            self._prepared_sizes[record.number] = size
            self._hold(more)
            if self._prepared_size > _MAX_PREPARED:
                raise InvalidArgument(
                    f"{self._prepared_size} bytes of prepared requests, at most {_MAX_PREPARED} are kept for a lane"
                )

    def note_half(self, byte_size: int) -> None:
        """Counts the first ``byte_size`` bytes of a large record, of which the rest has not arrived yet.

        Raises InvalidArgument if the requests of the client's user take too many bytes.
        """
        more, self._half_size = byte_size - self._half_size, byte_size
        self._hold(more)

    def _hold(self, byte_size: int) -> None:
        assert self.owner is not None
        try:
            if byte_size > 0:
                self.owner.check_room(self, byte_size)
        except Unavailable as error:
            raise InvalidArgument(error.message) from None
        finally:
            self._count(byte_size)

    def _count(self, byte_size: int) -> None:
        self.request_byte_size += byte_size
        if self.owner is not None:
            self.owner.request_byte_size += byte_size

    def keep(self, request: Request) -> None:
        """Adds the size of a client's request to the size of all requests of the client's user, until ``forget`` is called.

        Call this method before the request is in ``in_flight``. If the user's requests would exceed the limits of
        ``LaneOwner.check_room``, releases the request and raises Unavailable.
        """
        byte_size = request.kept_byte_size
        try:
            if self.owner is not None:
                self.owner.check_room(self, byte_size)
        except Unavailable:
            request.release()
            raise
        self._sizes[request.request_id] = byte_size
        self._count(byte_size)

    def forget(self, request_id: int) -> None:
        """Stops counting the bytes of a client's request. Does nothing if they are not counted."""
        self._count(-self._sizes.pop(request_id, 0))

    def leave(self) -> None:
        """At the lane's end, subtracts its prepared requests and partly received record from the counted bytes of requests."""
        self._count(-self._prepared_size - self._half_size)
        self._prepared_size = self._half_size = 0

    @property
    def returns(self) -> int:
        """A counter that rises whenever memory for answers to this submitter becomes free."""
        return self.lane.arena.returned if self.owner is None else self.owner.returned

    def count_waiting(self) -> None:
        """Brings this lane's part of ``owner.waiting_byte_size`` up to date. Does nothing for a front, which has no owner."""
        if self.owner is not None:
            waiting = 0 if self.closed else self.blocked_byte_size + self.unsent_byte_size
            self.owner.waiting_byte_size += waiting - self._waiting_byte_size
            self._waiting_byte_size = waiting

    def flush_soon(self) -> None:
        """Makes the worker's event loop send the queued records of this lane before the loop waits for events again."""
        if not self.unflushed:
            self.unflushed = True
            self._due.append(self)

    def response_kind(self, version: int, described: Described, final: bool) -> ResponseKind:
        """Returns the encoder of responses that fit into one record and have the given outputs. Makes it if there is none yet.

        Args:
          version: the number of the model version.
          described: the name, datatype and shape of each output.
          final: whether each such response is the last response to its request.
        """
        key = version, final, described
        kind = self._response_kinds.get(key)
        if kind is None:
            tensors = tuple([PreparedTensor(*each) for each in described])
            prepared = PreparedAnswer(version, tensors, final=final)
            if len(self._response_kinds) >= _MAX_KINDS:
                self._response_kinds.clear()
            kind = self._response_kinds[key] = ResponseKind(self.lane.number(prepared), described)
        return kind

    def known_kind(self, version: int, described: Described) -> ResponseKind | None:
        """Returns the encoder that ``response_kind(version, described, final=False)`` has made, or None if there is none yet.

        ``version``: the number of the model version. ``described``: the name, datatype and shape of each output. Thread-safe.
        """
        return self._response_kinds.get((version, False, described))

    def answer(self, record: AnswerRecord, numbered: Numbered[PreparedAnswer] | None = None) -> None:
        """Queues an answer. The worker's event loop sends it before waiting for events. Does nothing after the lane has ended.

        ``numbered``: the prepared answer that the record names by its number; None: it names none.
        """
        if not self.closed:
            self.lane.complete(record, numbered)
            self.flush_soon()

    def __repr__(self) -> str:
        return f"<SubmitterLink {self.peer}: {len(self.in_flight)} in flight, {len(self.blocked)} blocked>"


class LaneOwner(Budget):
    """Counts and bounds the bytes of requests and answers on all lanes of one user."""

    def __init__(self, name: str, max_byte_size: int, max_request_byte_size: int = 1 << 30) -> None:
        super().__init__(max_byte_size)
        self.name = name
        self._max_request_byte_size = max_request_byte_size
        #: Bytes of requests, as they are kept.
        self.request_byte_size = 0
        self.submitters: dict[SubmitterLink[Any], None] = {}
        #: Bytes of answers that are blocked, or that the sockets did not take.
        self.waiting_byte_size = 0

    def leave(self, submitter: SubmitterLink[Any]) -> bool:
        """Removes ``submitter``, whose lane has ended. Returns True if this ``LaneOwner`` has no submitter left, else False."""
        self.submitters.pop(submitter, None)
        return not self.submitters

    @property
    def share(self) -> int:
        """How many bytes of answers each lane may hold if all lanes of the user together hold over ``max_byte_size`` bytes.

        The share is (2 * ``max_byte_size`` - bytes of answers on all lanes) / number of lanes.
        """
        return (2 * self.max_byte_size - self.used - self.waiting_byte_size) // max(1, len(self.submitters))

    def check(self, submitter: SubmitterLink[Any]) -> None:
        """Raises Unavailable if this owner's lanes hold too many bytes of answers for one more request from ``submitter``.

        That is so if the lanes together hold over ``max_byte_size`` bytes, and the submitter's lane at least ``share`` bytes.
        """
        held = self.used + self.waiting_byte_size
        own = submitter.lane.arena.held_byte_size + submitter._waiting_byte_size
        if held > self.max_byte_size and own >= self.share:
            raise Unavailable(
                f"{held} bytes of answers to clients of this user are held, at most {self.max_byte_size} may be "
                "(clients.max_owner_response_byte_size)"
            )

    def check_room(self, submitter: SubmitterLink[Any], byte_size: int) -> None:
        """Raises Unavailable if this owner has no room for ``byte_size`` more bytes of requests from ``submitter``.

        That is so if all lanes of this owner together would exceed a limit, and the submitter's lane its share. This share is
        (2 * limit - bytes of requests on all lanes now) / number of lanes.
        """
        held, most = self.request_byte_size, self._max_request_byte_size
        share = (2 * most - held) // max(1, len(self.submitters))
        if held + byte_size > most and submitter.request_byte_size + byte_size > share:
            raise Unavailable(
                f"{held} bytes of requests of clients of this user are held, and one of {byte_size} came: at most {most} may be "
                "(clients.max_owner_request_byte_size)"
            )

    def reclaim(self) -> bool:
        """Closes an unused segment, made for one answer, in this LaneOwner's response arenas. Returns whether it did so."""
        for submitter in self.submitters:
            if submitter.lane.arena.trim():
                # The client is told, so that it unmaps it.
                submitter.flush_soon()
                return True
        return False

    def describe_full(self, byte_size: int) -> str:
        """Returns the error message for an answer of ``byte_size`` bytes with no room in this LaneOwner's response arenas."""
        return (
            f"no room for an answer of {byte_size} bytes in the response arenas of this user: {self.used} of "
            f"{self.max_byte_size} are in use (clients.max_owner_response_byte_size)"
        )

    def __repr__(self) -> str:
        return f"<LaneOwner of {len(self.submitters)} lanes, {self.used + self.waiting_byte_size} bytes>"
