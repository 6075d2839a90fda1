"""Answers of workers: taken from their lanes, told to whoever asked, and their memory given back.

a datagram ─▶ its lease is noted (lent) ─▶ the request gets its answer ─▶ its inputs are given back
the answer's bytes have left ─▶ release ─▶ the worker learns it ─▶ what was held back for them goes

Of a request with several responses each but the last is ``taken``: its worker sends so many ahead of its client and no more.

A worker that has a request's model no more, because that has moved to another worker meanwhile, is no answer: the request goes
where the model is.
"""

from __future__ import annotations

import asyncio
import logging

from tensord.daemon.submit.busy_poll import BusyPoll
from tensord.daemon.submit.choice import Choice
from tensord.daemon.submit.dispatch import Dispatch
from tensord.daemon.submit.held_back import HeldBack
from tensord.daemon.submit.lent import Lent
from tensord.daemon.submit.pending import Pending, Worker
from tensord.daemon.submit.sending import Sending
from tensord.daemon.submit.sweeper import Sweeper
from tensord.shm.arena import LeaseKey
from tensord.shm.channel import ChannelClosed
from tensord.shm.errors import Cancelled, Internal, InvalidArgument, ServingError, from_code
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, PreparedAnswer, response_byte_size

_log = logging.getLogger(__name__)
#: By then a front has read what the supervisor said before it took a model from a worker.
_TOLD_SECONDS = 0.01


class Answers:
    """One per front. ``in_flight``: all of its requests, by id."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        in_flight: dict[int, Pending],
        choice: Choice,
        sending: Sending,
        lent: Lent,
        held_back: HeldBack,
        dispatch: Dispatch,
        busy_poll: BusyPoll,
        sweeper: Sweeper,
        max_ahead: int,
    ) -> None:
        """``max_ahead``: bytes of a request's responses that its worker sends before they are taken."""
        self._loop = loop
        #: Of responses that were taken: told when they are so many.
        self._told_at = max_ahead // 4
        self._pending = in_flight
        self._choice = choice
        self._sending = sending
        self._lent = lent
        self._held_back = held_back
        self._dispatch = dispatch
        self._busy_poll = busy_poll
        self._sweeper = sweeper

    def listen(self, worker: Worker) -> None:
        """Takes what the worker sends, whenever it does."""
        self._loop.add_reader(worker.lane.fileno(), self.receive, worker)

    def receive(self, worker: Worker) -> bool:
        """Takes a datagram; whether there was one. Were there more, or an end of file, the loop would say so again."""
        try:
            answers = worker.lane.receive()
        except ChannelClosed:
            self.close(worker)
            return False
        except InvalidArgument as error:
            # A worker that sends garbage is not trusted with anything more; the supervisor sees it hang or exit.
            _log.error("closing the lane of worker %d: %s", worker.incarnation, error.message)
            self.close(worker)
            self._give_up(worker, Internal("the worker's answer could not be understood"))
            return False
        if worker.lane.unsaid:
            self._sending.flush_later(worker)
        if not answers:
            return answers is not None
        self._busy_poll.answered()
        in_flight = worker.in_flight
        for prepared, own in answers:
            if own.code or not prepared.final:
                self._take(worker, prepared, own)
                continue
            pending = in_flight.pop(own.request_id, None)
            if own.lease is not None:
                if self._lent.note(worker, own.lease, pending, own.contents):
                    self._held_back.filled(pending)
                if pending is None or pending.cancelled:
                    self.release(worker.lane, own.lease)
            if pending is None:
                continue
            del self._pending[own.request_id]
            if not pending.cancelled:
                try:
                    pending.completed(prepared, own, worker.lane)
                except Exception:
                    pending.fail_delivery()
                    if own.lease is not None:
                        self.release(worker.lane, own.lease)
            if pending.leases:
                self._dispatch.give_back(pending)
        return True

    def _take(self, worker: Worker, prepared: PreparedAnswer, own: AnswerRecord) -> None:
        """Takes an error, or an answer with others behind it."""
        take = worker.in_flight.pop if prepared.final else worker.in_flight.get
        pending, lease = take(own.request_id, None), own.lease
        if lease is not None and self._lent.note(worker, lease, pending, own.contents):
            self._held_back.filled(pending)
        if pending is not None and pending.recalled and own.code == Cancelled.code:
            self._held_back.came_back(pending, self._loop.time())
            self._sweeper.later()
            return
        if own.code and pending is not None and pending.is_misplaced(own):
            pending.worker = None
            self._loop.call_later(_TOLD_SECONDS, self._look_again, worker, pending, own)
            return
        if pending is not None and not pending.cancelled:
            pending.answered = True
            if pending.sent_at and not prepared.final:
                # It has as long for its next response.
                pending.sent_at = self._loop.time()
                self._pending[own.request_id] = self._pending.pop(own.request_id)
            if pending.deliver(prepared, own, worker.lane):
                lease = None  # its taker's
        if lease is not None:
            self.release(worker.lane, lease)
        if pending is not None and prepared.final:
            self._dispatch.finish(pending)

    def _look_again(self, worker: Worker, pending: Pending, answer: AnswerRecord) -> None:
        """The worker does not have its model: it is sent to one that does, or that is its answer."""
        if pending.record.request_id not in self._pending:
            return  # cancelled meanwhile
        state = self._choice.state_of(pending.prepared)
        if state is not None and worker.incarnation not in state.workers:
            self._dispatch.send_again(pending)
        else:
            self._dispatch.fail(pending, from_code(answer.code, answer.message))

    def release(self, lane: SubmitterLane, key: LeaseKey) -> None:
        """The bytes of an answer have left. Harmless where it was said before."""
        found = self._lent.take_back(lane, key)
        if found is None:
            return
        account, worker = found
        if not worker.dirty and not worker.closed:
            self._sending.flush_later(worker)
        if self._held_back.lines:
            self._held_back.let_go(account, self._dispatch.send_again)

    def taken(self, lane: SubmitterLane, response: AnswerRecord) -> None:
        """The bytes of a response that was not its request's last have left."""
        if response.lease is not None:
            self.release(lane, response.lease)
        pending = self._pending.get(response.request_id)
        if pending is None or pending.worker is None:
            return
        pending.taken += response_byte_size(response.contents)
        if pending.taken >= self._told_at:
            lane.taken(response.request_id, pending.taken)
            pending.taken = 0
            self._sending.flush_later(pending.worker)

    def drain(self, worker: Worker) -> None:
        """Its process is gone: takes what it answered before, all of which is in the socket, and closes its lane."""
        while not worker.closed and self.receive(worker):
            pass
        self.close(worker)

    def close(self, worker: Worker) -> None:
        """Nothing is sent to it any more, nor read. Idempotent."""
        if not worker.closed:
            self._choice.close(worker)
            self._loop.remove_reader(worker.lane.fileno())
            self._sending.stop(worker)

    def _give_up(self, worker: Worker, error: ServingError) -> None:
        """Answers what is in flight there. The process lives and may still read: memory comes back when it is fenced."""
        for pending in list(worker.in_flight.values()):
            if not pending.cancelled:
                pending.cancelled = True
                pending.fail(error)

    def __repr__(self) -> str:
        return f"<Answers to {len(self._pending)} requests>"
