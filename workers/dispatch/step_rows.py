"""What a step gives to requests that go on and want nothing but its small outputs: answered by array operations, all at once.

    slot's first response ─▶ join ─▶ send, send, ... ─▶ leave: its sender is told of all of them
                                                        (it ends, is cancelled or has been sent what its client may be behind)

For few requests arrays cost more than they save: ``MANY``.
"""

from __future__ import annotations

import functools

import numpy as np

from shm.arrays import Array
from shm.forms import Form
from shm.messages import Completion, FormCompletion, response_byte_size
from workers.dispatch.answer_rows import AnswerRows
from workers.dispatch.responses import Responses
from workers.models.statistics import ModelStatistics
from workers.programs.step_program import Rows
from workers.requests.request import Request
from workers.requests.response_sender import ResponseSender
from workers.requests.submitter import Submitter

#: Requests in a step from which on this pays: 25 us for any number, 2.3 us for each request by itself.
MANY = 10
#: Of a slot: responses that may leave before its sender is looked at, the number of the next one, when the last one left.
_ROOM, _NUMBER, _LAST_NS = range(3)


class _Lane:
    """Records for one submitter."""

    def __init__(self, number: int, form: Form[Completion], records: AnswerRows) -> None:
        self.number = number
        self.form = form
        self.records = records
        #: Slots of its requests.
        self.slots = 0


class StepRows:
    """Of one version. ``joined[slot]``: its responses go this way."""

    def __init__(self, slots: int, layout: Rows, responses: Responses, statistics: ModelStatistics) -> None:
        self.joined = [False] * slots
        self._layout = layout
        self._responses = responses
        self._statistics = statistics
        self._sizes = [part.stop - part.start for part in layout.slices]
        #: What each counts where those are bounded that a client has not taken.
        self._byte_size = response_byte_size(FormCompletion(0, 0, tuple([bytes(size) for size in self._sizes])))
        self._senders: list[ResponseSender[Request] | None] = [None] * slots
        self._state = np.zeros((slots, 3), np.int64)
        self._lanes: dict[Submitter[Request], _Lane] = {}
        #: The number of each slot's, and the next one.
        self._lane_of = np.zeros(slots, np.int64)
        self._next_lane = 0

    def join(self, slot: int, sender: ResponseSender[Request]) -> None:
        """Its first response has left, and it wants no other kind; ignores one that does, or has no room."""
        request, room = sender.request, sender.room
        if room <= 0 or not self._responses.takes_small(sender):
            return
        submitter = request.submitter
        lane = self._lanes.get(submitter)
        if lane is None:
            form = self._responses.form(request, self._layout.described, False)
            records = AnswerRows(form.number, self._sizes, len(self.joined))
            lane = self._lanes[submitter] = _Lane(self._next_lane, form, records)
            self._next_lane += 1
        lane.slots += 1
        lane.records.name(slot, request.request_id)
        self._lane_of[slot] = lane.number
        self._state[slot] = -(-room // self._byte_size), sender.count, sender.last_ns
        self._senders[slot] = sender
        self.joined[slot] = True
        sender.counted = functools.partial(self.leave, slot)

    def leave(self, slot: int) -> None:
        """Its sender goes on by itself, or nobody is there any more. Ignores one that has not joined."""
        sender = self._senders[slot]
        if sender is None:
            return
        _, number, last_ns = self._state[slot].tolist()
        sender.ahead((number - sender.count) * self._byte_size)
        sender.count, sender.last_ns, sender.counted = number, last_ns, None
        self._senders[slot], self.joined[slot] = None, False
        submitter = sender.request.submitter
        lane = self._lanes[submitter]
        lane.slots -= 1
        if not lane.slots:
            del self._lanes[submitter]

    def leave_all(self) -> None:
        """The same of every slot."""
        for slot, joined in enumerate(self.joined):
            if joined:
                self.leave(slot)

    def send(self, slots: list[int], rows: Array, now_ns: int) -> list[ResponseSender[Request]]:
        """A response for each of these slots. Returns whose slots have left with it: their clients may be too far behind.

        Args:
          rows: of the step, UINT8[step's slots, size].
        """
        which = np.array(slots)
        state = self._state[which]
        self._statistics.responses.add(state[:, _NUMBER], now_ns - state[:, _LAST_NS])
        state += (-1, 1, 0)
        state[:, _LAST_NS] = now_ns
        self._state[which] = state
        contents = rows[which, : self._layout.says]
        lanes = self._lane_of[which] if len(self._lanes) > 1 else None
        for submitter, lane in self._lanes.items():
            of_lane = slice(None) if lanes is None else lanes == lane.number
            submitter.lane.complete_rows(lane.form, lane.records.records(which[of_lane], contents[of_lane]))
            submitter.unflushed = True
        full = [sender for slot in which[state[:, _ROOM] <= 0].tolist() if (sender := self._senders[slot]) is not None]
        for sender in full:
            sender.catch_up()
        return full

    def __repr__(self) -> str:
        return f"<StepRows {sum(self.joined)} of {len(self.joined)} slots joined>"
