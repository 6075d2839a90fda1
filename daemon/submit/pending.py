"""Requests in flight, and the workers that have them.

A ``Pending`` is a request until its one final answer. Whoever sends requests makes its own kind of it, which knows what to do
with an answer; ``Calling`` is the kind that calls back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec

from tensord.daemon.submit.accounts import Account
from tensord.shm.arena import Lease
from tensord.shm.control_records import ModelState
from tensord.shm.errors import DEFECT, UNKNOWN_MODEL, Internal, NotFound, ServingError
from tensord.shm.forms import Form, whole_answer, whole_request
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import Completion, FormCompletion, FormSubmit, Submit
from tensord.shm.sequence_keys import Key
from tensord.shm.sequence_page import SequencePage
from tensord.shm.status_page import StatusPage

_log = logging.getLogger(__name__)

#: The owner of a request: the completion, and the lane whose response arena holds its slices (None: nothing to view).
OnCompletion = Callable[[Completion, SubmitterLane | None], None]

#: Deaths of workers that a request is taken to be the cause of.
_STRIKES = 2
_UNSENT = FormSubmit(0, 0, ())


class Worker:
    """A lane and what is in flight on it."""

    __slots__ = (
        *("closed", "device", "dirty", "in_flight", "incarnation", "lane"),
        *("page", "seed", "sequences", "starts", "writing"),
    )

    def __init__(
        self, incarnation: int, device: str, lane: SubmitterLane, page: StatusPage, sequences: SequencePage
    ) -> None:
        self.incarnation = incarnation
        self.device = device
        self.lane = lane
        self.page = page
        #: What it tells of its sequences.
        self.sequences = sequences
        #: Sequences that were sent to it since it last told what is free of their model: of which telling, and how many.
        self.starts: dict[Key, tuple[int, int]] = {}
        #: Stands for the device where sequences are shared out; every front has the same.
        self.seed = int.from_bytes(blake2b(device.encode(), digest_size=8).digest(), "little")
        self.in_flight: dict[int, Pending] = {}
        #: End of file was seen: nothing is sent any more, and its requests wait for the fence.
        self.closed = False
        #: It is flushed at the end of this turn of the loop.
        self.dirty = False
        self.writing = False

    def shut(self) -> None:
        """Lets go of what it shares with this front."""
        self.page.close()
        self.sequences.close()
        self.lane.close()


class Pending(msgspec.Struct, eq=False, kw_only=True):
    """One request in flight. (A Struct, because one is made for every request.)"""

    #: With its id. Who has none yet is not sent.
    record: Submit | FormSubmit = _UNSENT
    #: Of a FormSubmit.
    form: Form[Submit] | None = None
    #: Where its inputs lie; given back with its final completion.
    leases: Sequence[Lease] = ()
    worker: Worker | None = None
    #: In the loop's time; 0 where requests have no timeout.
    sent_at: float = 0.0
    #: Nobody waits for it any more.
    cancelled: bool = False
    #: It has an answer, which was not its last one.
    answered: bool = False
    #: Bytes of such answers that its client has taken, since its worker was last told.
    taken: int = 0
    #: Its worker was asked not to run it, if it has not begun: its client holds its share of answers.
    recalled: bool = False
    #: Its sequence, where its model keeps such; once it was sent, or waits to be.
    sequence: Key | None = None

    def is_misplaced(self, completion: Completion) -> bool:
        """Whether that says that the worker does not have its model, so that it may be run by another one."""
        unknown = completion.code == NotFound.code and completion.message.startswith(UNKNOWN_MODEL)
        return unknown and not self.cancelled and not self.answered and self.sequence is None

    @property
    def account(self) -> Account | None:
        """Whose memory it takes; None: nobody's."""
        return None

    def completed(self, completion: Completion, lane: SubmitterLane | None) -> None:
        """An answer; the lane whose response arena holds its slices, None: nothing to view. Its last call where ``final``."""
        raise NotImplementedError

    def formed(self, template: Completion, own: FormCompletion) -> None:
        """A good answer of a form: what such answers have in common, and its own."""
        assert self.worker is not None
        self.completed(whole_answer(template, own), self.worker.lane)

    @property
    def submit(self) -> Submit:
        """What says which model is asked for, with which regions."""
        return self.record if self.form is None else self.form.template  # type: ignore[return-value]

    def unform(self) -> Submit:
        """Makes it a request like those without a form."""
        if self.form is not None:
            self.record = whole_request(self.form.template, self.record)  # type: ignore[arg-type]
            self.form = None
        return self.record  # type: ignore[return-value]

    def orphaned(self, was_executing: bool, state: ModelState | None) -> ServingError | None:
        """Its worker died. Returns its answer, where it may not be run again. ``state``: of its model; None: that is gone.

        What waited for its turn was not begun. (Of sequences ``tensord.daemon.submit.routing`` decides.)
        """
        if self.answered or (was_executing and state is not None and state.sticky):
            return Internal("the worker process died while it executed the request, which may not be run twice")
        # A model with several responses may have begun it and have gone on to others.
        if was_executing or (state is not None and state.streams):
            record = self.unform()
            strikes = record.strikes + 1
            if strikes >= _STRIKES:
                return Internal(f"the request was given up: {strikes} worker processes died while they executed it")
            self.record = msgspec.structs.replace(record, strikes=strikes)
        return None

    def tell(self, completion: Completion, lane: SubmitterLane | None, own: FormCompletion | None = None) -> bool:
        """``completed``, or ``formed``. One owner's defect costs that owner its answer, not the others in the datagram theirs.

        Returns: False: it met a defect, and was ``undelivered`` instead.
        """
        try:
            if own is None:
                self.completed(completion, lane)
            else:
                self.formed(completion, own)
        except Exception:
            self.fail_delivery()
            return False
        return True

    def undelivered(self) -> None:
        """Handing an answer to the client met a defect of ours; some of it may have left. Its last call."""
        self.completed(Completion(self.record.request_id, Internal.code, DEFECT), None)

    def fail_delivery(self) -> None:
        """Where ``completed`` or ``formed`` raised: says so to the log, and to the client if that is possible."""
        _log.exception("an answer could not be delivered")
        try:
            self.undelivered()
        except Exception:
            _log.exception("nor could that be said")

    def __repr__(self) -> str:
        # Not what a Struct shows of itself: the client's tensors would be in it.
        return f"<{type(self).__name__} {self.record.request_id}{', cancelled' if self.cancelled else ''}>"


class Calling(Pending):
    """One whose owner is called back."""

    on_completion: OnCompletion
    holder: Account | None = None

    @property
    def account(self) -> Account | None:
        return self.holder

    def completed(self, completion: Completion, lane: SubmitterLane | None) -> None:
        self.on_completion(completion, lane)
