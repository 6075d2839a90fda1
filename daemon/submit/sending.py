"""When records leave for the workers.

1. A worker that has nothing to do gets its first request at once: it begins while this front reads what else came.
2. Everything else that is put on a lane in one turn of the loop leaves at its end, in one datagram.
3. Then the answer is looked for where it may come soon (``busy_poll``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from tensord.daemon.submit.busy_poll import BusyPoll
from tensord.daemon.submit.pending import Pending, Worker

_log = logging.getLogger(__name__)
_AGAIN_SECONDS = 0.1


class Sending:
    """One per front. ``pending``: all requests in flight; ``receive``: takes what a worker has sent."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        busy_poll: BusyPoll,
        pending: dict[int, Pending],
        receive: Callable[[Worker], object],
    ) -> None:
        self._loop = loop
        self._busy_poll = busy_poll
        self._pending = pending
        self._receive = receive
        #: To be flushed when this turn of the loop ends; and whether anything is to be done then.
        self._dirty: list[Worker] = []
        self._turning = False

    def send(self, worker: Worker, pending: Pending) -> None:
        """Gives a request to a worker, whose it is from now on. Raises whatever is wrong with it: then it is nobody's."""
        record, numbered, in_flight = pending.record, pending.numbered, worker.in_flight
        pending.worker = worker
        in_flight[record.request_id] = pending
        try:
            if pending.leases:
                worker.lane.announce(pending.leases)
            if len(in_flight) > 1 or worker.writing:
                worker.lane.submit(record, numbered)
                if not worker.dirty:
                    self.flush_later(worker)
                return
            if not worker.lane.submit_at_once(record, numbered):
                self._flush(worker)
        except BaseException:
            # Nothing of it is on the lane: what is queued there is sent, later if not now.
            in_flight.pop(record.request_id, None)
            pending.worker = None
            raise
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._end_turn)

    def flush_later(self, worker: Worker) -> None:
        """At the end of this turn: what came in it for a busy worker shares a datagram, a wake-up and most often a batch."""
        if not worker.dirty:
            worker.dirty = True
            self._dirty.append(worker)
            if not self._turning:
                self._turning = True
                self._loop.call_soon(self._end_turn)

    def flush_all_later(self, workers: Iterable[Worker]) -> None:
        """Those that are not closed: where a lane itself has something to say."""
        for worker in workers:
            if not worker.closed:
                self.flush_later(worker)

    def stop(self, worker: Worker) -> None:
        """It is closed."""
        if worker.writing:
            self._loop.remove_writer(worker.lane.fileno())
            worker.writing = False

    def _end_turn(self) -> None:
        self._turning = False
        if self._dirty:
            dirty, self._dirty = self._dirty, []
            for worker in dirty:
                worker.dirty = False
                if not worker.closed:
                    self._flush(worker)
        count = len(self._pending)
        if count == 1:
            for pending in self._pending.values():
                # A large one takes the worker longer than waking up, and it wants the processor.
                if pending.worker is not None and not pending.leases:
                    self._busy_poll.look(pending.worker.lane.ready, self._look, pending.worker)
                break
        elif count:
            self._busy_poll.flushed()

    def _look(self, worker: Worker) -> bool:
        """Takes what came for the only request in flight. False: no answer to it can come, now."""
        if not worker.closed:
            self._receive(worker)
        return bool(worker.in_flight) and not worker.closed

    def _flush(self, worker: Worker) -> None:
        try:
            if not worker.lane.flush():
                self._await_writable(worker)
            elif worker.writing:
                worker.writing = False
                self._loop.remove_writer(worker.lane.fileno())
        except Exception:
            self._flush_again(worker)

    def _await_writable(self, worker: Worker) -> None:
        if not worker.writing:
            try:
                self._loop.add_writer(worker.lane.fileno(), self._flush, worker)
                worker.writing = True
            except Exception:
                self._flush_again(worker)

    def _flush_again(self, worker: Worker) -> None:
        """What its lane holds belongs to many requests, and other lanes wait for their turn: no exception goes any further."""
        _log.exception("the lane of worker %d could not be written to; it is tried again", worker.incarnation)
        self._loop.call_later(_AGAIN_SECONDS, self.flush_later, worker)

    def __repr__(self) -> str:
        return f"<Sending {len(self._dirty)} workers to flush>"
