"""Defines ``InFlight``, a front's request in flight, and ``WorkerLink``, a front's connection to a worker."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from tensord.daemon.submit.accounts import Account
from tensord.shm.arena import Lease
from tensord.shm.common.submission import Submission
from tensord.shm.errors import DEFECT, Internal, ServingError
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import LAST, AnswerRecord, PreparedAnswer, PreparedRequest, RequestRecord
from tensord.shm.prepared import Numbered
from tensord.shm.sequence_page import Key, SequencePage
from tensord.shm.status_page import StatusPage

_log = logging.getLogger(__name__)

_UNSENT = RequestRecord(0, PreparedRequest(""))


@dataclass(slots=True, eq=False)
class WorkerLink:
    """A front's connection to one worker, with the requests that are in flight there."""

    incarnation: int
    device: str
    lane: SubmitterLane
    page: StatusPage
    sequences: SequencePage
    #: Sequences that were sent to it since it last published what is free of their model: of which edition, and how many.
    starts: dict[Key, tuple[int, int]] = field(default_factory=dict)
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    #: End of file was seen: nothing is sent any more, and its requests wait for the fence.
    closed: bool = False
    #: It is flushed at the end of this iteration of the loop.
    dirty: bool = False
    writing: bool = False
    #: Stands for the device where sequences are shared out; every front has the same.
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.seed = int.from_bytes(blake2b(self.device.encode(), digest_size=8).digest(), "little")

    def shut(self) -> None:
        """Closes the lane to the worker, and unmaps the two pages of shared memory in which the worker shows its state."""
        self.page.close()
        self.sequences.close()
        self.lane.close()


class InFlight(Submission, msgspec.Struct, eq=False, kw_only=True):
    """A request of any protocol. It is kept from its sending until its final answer."""

    #: The request as it is sent, with its id; id 0: it is not sent so far.
    record: RequestRecord = _UNSENT
    #: The prepared request that the number in the record stands for; None: the record says everything itself.
    numbered: Numbered[PreparedRequest] | None = None
    #: Where its inputs lie; given back with its final answer.
    leases: Sequence[Lease] = ()
    worker: WorkerLink | None = None
    #: The account that the request's memory counts for; None: it counts for nobody.
    account: Account | None = None
    #: The loop's time when it was sent; 0 where requests have no timeout.
    sent_at: float = 0.0
    #: Nobody waits for it any more.
    cancelled: bool = False
    #: It has an answer, which was not its last one.
    answered: bool = False
    #: Bytes of such answers that its client has taken since that was last acknowledged.
    taken: int = 0
    #: Its worker was asked not to run it, if it has not begun, because its client is throttled.
    recalled: bool = False
    #: Its sequence, where its model keeps such; once it was sent, or waits to be.
    sequence: Key | None = None
    #: Ids of the trace that it belongs to and of its own span there ("": it has none); None: it is not traced.
    context: tuple[str, str] | None = None

    @property
    def strikes(self) -> int:
        return self.record.strikes

    @strikes.setter
    def strikes(self, count: int) -> None:
        self.record = msgspec.structs.replace(self.record, strikes=count)

    @property
    def waits_for_room(self) -> bool:
        """Returns whether the request has not been sent yet, because it waits for arena memory."""
        return not self.record.request_id

    @property
    def holds_up(self) -> bool:
        """Returns whether the front has answers to later requests that may only be sent after the answer to this request."""
        return False

    @property
    def names(self) -> tuple[str, str]:
        """Returns the name of the model and the id that the client gave the request. An unknown value is ""."""
        return "", ""

    def left_line(self) -> None:
        """Called when the request stops waiting for memory, because it was sent or has failed. Subclasses override it."""

    def completed(self, prepared: PreparedAnswer, record: AnswerRecord, lane: SubmitterLane | None) -> None:
        """Sends an answer to the client. Called with each answer, and never again after the final answer.

        Args:
          prepared: the part of the answer that repeats.
          record: the rest of the answer.
          lane: the lane in whose arena the answer's tensors lie. If it is None, the answer is an error.
        """
        raise NotImplementedError

    @property
    def prepared(self) -> PreparedRequest:
        """Returns the part of the request that repeats: all but its id, scheduling and the values of its inputs."""
        return self.record.prepared if self.numbered is None else self.numbered.prepared  # type: ignore[return-value]

    def fail(self, error: ServingError) -> None:
        """Calls ``self.completed`` to answer the request with ``error``. An exception of this call is logged, not raised."""
        record = AnswerRecord(self.record.request_id, LAST, code=error.code, message=error.message)
        try:
            self.completed(LAST, record, None)
        except Exception:
            self.fail_delivery()

    def undelivered(self) -> None:
        """Ends the request with the error Internal, because its answer could not be sent.

        A subclass ends the connection instead if a part of the answer was sent.
        """
        record = AnswerRecord(self.record.request_id, LAST, code=Internal.code, message=DEFECT)
        self.completed(LAST, record, None)

    def fail_delivery(self) -> None:
        """Logs the current exception, and answers with an error if that is still possible."""
        _log.exception("an answer could not be delivered")
        try:
            self.undelivered()
        except Exception:
            _log.exception("nor could that be said")

    def __repr__(self) -> str:
        # Not what a Struct shows of itself: the client's tensors would be in it.
        return f"<{type(self).__name__} {self.record.request_id}{', cancelled' if self.cancelled else ''}>"
