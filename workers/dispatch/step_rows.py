"""Answers requests that go on and want nothing but a step's small outputs by array operations, all at once.

    first response ─▶ join ─▶ send, send, ... ─▶ leave: all of them are noted at its sender and in the statistics
                                                 (it ends, is cancelled, misses a step, or its client may be behind)

Who has joined gets a response whenever anybody does. So all that is noted of a step is when its responses left; what that was for
each request is found out when it leaves. For few requests arrays cost more than they save: ``MANY``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.messages import PreparedAnswer, response_byte_size
from tensord.shm.prepared import Numbered
from tensord.workers.dispatch.responses import Responses
from tensord.workers.models.statistics import VersionStatistics
from tensord.workers.programs.step_program import Rows
from tensord.workers.requests.answer_plan import AnswerRows
from tensord.workers.requests.request import Request
from tensord.workers.requests.response_sender import ResponseSender
from tensord.workers.requests.submitter_link import SubmitterLink

#: Requests in a step from which on this pays: measured, 10 us for any number and 10 for one that leaves, against 2.3 for each.
MANY = 8
#: Steps that are noted at most.
_MOST = 4096


class _Joined(NamedTuple):
    """A request that has joined, in its slot."""

    sender: ResponseSender
    #: How many steps were noted by then, and how many will be when its client may be too far behind.
    since: int
    until: int


class _Lane:
    """Responses of a step to one submitter."""

    def __init__(self, submitter: SubmitterLink[Request], numbered: Numbered[PreparedAnswer], sizes: list[int]) -> None:
        self._submitter = submitter
        self._numbered = numbered
        self._records = AnswerRows(numbered.number, sizes)
        self._slots = np.zeros(0, np.int64)

    def take(self, slots: list[int], request_ids: list[int]) -> None:
        """Sets the submitter's slots and the requests in them."""
        self._slots = np.array(slots)
        self._records.name(request_ids)

    def send(self, rows: Array) -> None:
        """Queues a response for each. ``rows``: the outputs of all slots."""
        self._submitter.lane.complete_encoded(self._numbered, self._records.records(rows[self._slots]))
        self._submitter.flush_soon()


class StepRows:
    """Answers the joined requests of one version; ``joined[slot]`` says which slots are among them."""

    def __init__(self, slots: int, layout: Rows, responses: Responses, statistics: VersionStatistics) -> None:
        self.joined = [False] * slots
        self._layout = layout
        self._responses = responses
        self._statistics = statistics
        self._sizes = [part.stop - part.start for part in layout.slices]
        #: What each counts where those are bounded that a client has not taken.
        self._byte_size = response_byte_size(tuple([bytes(size) for size in self._sizes]))
        #: By slot.
        self.members: dict[int, _Joined] = {}
        #: When the responses of each step left, and when so many are noted somebody is looked at.
        self._left_ns: list[int] = []
        self._look_at = _MOST
        #: Who the lanes are ready for; empty: somebody has joined or left since.
        self._ready: list[int] = []
        self._lanes: dict[SubmitterLink[Request], _Lane] = {}

    def join(self, slot: int, sender: ResponseSender) -> None:
        """Has a request's next responses leave together with others. Ignores a request that wants others, or has no room."""
        room = sender.room
        if room <= 0 or not self._responses.takes_small(sender):
            return
        since = len(self._left_ns)
        member = self.members[slot] = _Joined(sender, since, since - (-room // self._byte_size))
        self._look_at = min(self._look_at, member.until)
        self.joined[slot], self._ready = True, []
        sender.counted = functools.partial(self.leave, slot)

    def leave(self, slot: int) -> None:
        """Has a slot's sender go on by itself, or ends it. Ignores a slot that has not joined."""
        member = self.members.pop(slot, None)
        if member is None:
            return
        sender, left_ns = member.sender, self._left_ns[member.since :]
        sender.counted = None
        if left_ns:
            self._statistics.responses.add(sender.count, np.diff(left_ns, prepend=sender.last_ns))
            sender.ahead(len(left_ns) * self._byte_size)
            sender.count += len(left_ns)
            sender.last_ns = left_ns[-1]
        self.joined[slot], self._ready = False, []
        if not self.members:
            self._left_ns, self._look_at = [], _MOST
            self._lanes.clear()

    def leave_all(self) -> None:
        """Has all joined slots leave."""
        for slot in list(self.members):
            self.leave(slot)

    def send(self, slots: list[int], rows: Array, now_ns: int) -> list[ResponseSender]:
        """Sends a step's responses for these slots, which have joined, all at once.

        Returns the senders that go on by themselves from now on, because they may be out of room.

        Args:
          rows: of the step, UINT8[its slots, size].
        """
        if slots != self._ready:
            self._prepare(slots)
        outputs = rows[:, : self._layout.says]
        for lane in self._lanes.values():
            lane.send(outputs)
        self._left_ns.append(now_ns)
        return self._look() if len(self._left_ns) >= self._look_at else []

    def _prepare(self, slots: list[int]) -> None:
        """Has slots leave that are not among the given ones, and prepares the lanes for the others."""
        going = set(slots)
        for slot in [slot for slot in self.members if slot not in going]:
            self.leave(slot)
        shares: dict[SubmitterLink[Request], list[int]] = {}
        for slot in slots:
            shares.setdefault(self.members[slot].sender.request.submitter, []).append(slot)
        lanes, self._lanes = self._lanes, {}
        for submitter, share in shares.items():
            requests = [self.members[slot].sender.request for slot in share]
            kind = submitter.response_kind(requests[0].version.version, self._layout.described, False)
            lane = self._lanes[submitter] = lanes.get(submitter) or _Lane(submitter, kind.numbered, self._sizes)
            lane.take(share, [request.request_id for request in requests])
        self._ready = slots

    def _look(self) -> list[ResponseSender]:
        """Has slots leave that may have no room, and all of them where too many steps are noted. Returns their senders."""
        steps = len(self._left_ns)
        full = [member.sender for member in self.members.values() if steps >= min(member.until, _MOST)]
        for sender in full:
            sender.catch_up()
        self._look_at = min([_MOST, *(member.until for member in self.members.values())])
        return full

    def __repr__(self) -> str:
        return f"<StepRows {len(self.members)} of {len(self.joined)} slots joined>"
