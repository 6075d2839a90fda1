"""Where a request in flight goes: to a worker, among those that wait for one, or to its end."""

from __future__ import annotations

import asyncio
import logging

from tensord.daemon.submit.arena_space import ArenaSpace
from tensord.daemon.submit.choice import Choice
from tensord.daemon.submit.pending import Pending
from tensord.daemon.submit.sending import Sending
from tensord.daemon.submit.sweeper import Sweeper
from tensord.daemon.submit.workerless import Workerless
from tensord.shm.errors import DEFECT, Internal, ServingError

_log = logging.getLogger(__name__)


class Dispatch:
    """One per front. ``in_flight``: all of its requests, by id; ``space``: where their inputs lie."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        in_flight: dict[int, Pending],
        choice: Choice,
        sending: Sending,
        workerless: Workerless,
        sweeper: Sweeper,
        space: ArenaSpace,
    ) -> None:
        self._loop = loop
        self._in_flight = in_flight
        self._choice = choice
        self._sending = sending
        self._workerless = workerless
        self._sweeper = sweeper
        self._give_back = space.give_back

    def send(self, pending: Pending) -> None:
        """Sends to the least loaded worker that has the model, or waits for one. Raises whatever is wrong with it."""
        try:
            worker = self._choice.find(pending)
        except ServingError as error:
            self._loop.call_soon(self.fail, pending, error)
            return
        if worker is not None:
            self._sending.send(worker, pending)
        else:
            self._workerless.add(pending, self._loop.time())
            self._sweeper.later()

    def send_again(self, pending: Pending) -> None:
        """Sends a request whose sender is not there any more: an error is its answer."""
        pending.recalled = False
        try:
            self.send(pending)
            if pending.cancelled and pending.worker is not None:
                self.take_back(pending)
        except ServingError as error:
            self.fail(pending, error)
        except Exception:
            _log.exception("a request for model '%s' could not be sent", pending.prepared.model)
            self.fail(pending, Internal(DEFECT))

    def take_back(self, pending: Pending) -> None:
        """Tells its worker that nobody waits for it."""
        assert pending.worker is not None
        pending.worker.lane.cancel(pending.record.request_id)
        self._sending.flush_later(pending.worker)

    def send_waiting(self) -> None:
        """There may be a worker now for those that wait for one."""
        self._workerless.retry(self.send_again)

    def run_again(self, pending: Pending, lost: ServingError | None, was_executing: bool) -> None:
        """Its worker died. ``lost``: its answer, where its sequence is gone with it."""
        if pending.cancelled:
            self.finish(pending)
        elif error := lost or pending.orphaned(was_executing, self._choice.state_of(pending.prepared)):
            self.fail(pending, error)
        else:
            self.send_again(pending)

    def fail(self, pending: Pending, error: ServingError) -> None:
        """The error is its answer, if anybody waits for it."""
        if not pending.cancelled and pending.record.request_id in self._in_flight:
            pending.fail(error)
        self.finish(pending)

    def finish(self, pending: Pending) -> None:
        """The one place where a request ends."""
        if self._in_flight.pop(pending.record.request_id, None) is None:
            return
        self.give_back(pending)

    def give_back(self, pending: Pending) -> None:
        """Nobody reads its inputs any more."""
        for lease in pending.leases:
            self._give_back(lease)

    def __repr__(self) -> str:
        return f"<Dispatch of {len(self._in_flight)} requests>"
