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
from tensord.shm.messages import Completion, FormCompletion, response_byte_size

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
        for template, own in answers:
            if own is None or not template.final:
                self._complete(worker, template, own)
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
                    pending.formed(template, own)
                except Exception:
                    pending.fail_delivery()
                    if own.lease is not None:
                        self.release(worker.lane, own.lease)
            if pending.leases:
                self._dispatch.give_back(pending)
        return True

    def _complete(self, worker: Worker, completion: Completion, own: FormCompletion | None) -> None:
        """A whole answer, or one of a form with others behind it: then ``completion`` is what those have in common."""
        take = worker.in_flight.pop if completion.final else worker.in_flight.get
        record = completion if own is None else own
        pending, lease = take(record.request_id, None), record.lease
        if lease is not None:
            contents = [tensor.place for tensor in completion.outputs] if own is None else own.contents
            if self._lent.note(worker, lease, pending, contents):
                self._held_back.filled(pending)
        if pending is not None and pending.recalled and completion.code == Cancelled.code:
            self._held_back.came_back(pending, self._loop.time())
            self._sweeper.later()
            return
        if completion.code and pending is not None and pending.is_misplaced(completion):
            pending.worker = None
            self._loop.call_later(_TOLD_SECONDS, self._look_again, worker, pending, completion)
            return
        if pending is not None and not pending.cancelled:
            pending.answered = True
            if pending.sent_at and not completion.final:
                # It has as long for its next response.
                pending.sent_at = self._loop.time()
                self._pending[record.request_id] = self._pending.pop(record.request_id)
            if pending.tell(completion, worker.lane, own):
                lease = None  # its taker's
        if lease is not None:
            self.release(worker.lane, lease)
        if pending is not None and completion.final:
            self._dispatch.finish(pending)

    def _look_again(self, worker: Worker, pending: Pending, completion: Completion) -> None:
        """The worker does not have its model: it is sent to one that does, or that is its answer."""
        if pending.record.request_id not in self._pending:
            return  # cancelled meanwhile
        state = self._choice.state_of(pending.submit)
        if state is not None and worker.incarnation not in state.workers:
            self._dispatch.send_again(pending)
        else:
            self._dispatch.fail(pending, from_code(completion.code, completion.message))

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

    def taken(self, lane: SubmitterLane, response: Completion | FormCompletion) -> None:
        """The bytes of a response that was not its request's last have left."""
        if response.lease is not None:
            self.release(lane, response.lease)
        pending = self._pending.get(response.request_id)
        if pending is None or pending.worker is None:
            return
        pending.taken += response_byte_size(response)
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
                pending.tell(Completion(pending.record.request_id, error.code, error.message), None)

    def __repr__(self) -> str:
        return f"<Answers to {len(self._pending)} requests>"
