"""Sends a step's responses to many requests at once, by array operations, if each response has only a few small outputs.

    first response ─▶ join ─▶ send, send, ... ─▶ leave: all of them are noted at its sender and in the statistics
                                                 (it ends, is cancelled, misses a step, or its client may be behind)

All joined requests get a response from every step. So only the time is noted at which the responses of a step left; what this
means for each request's statistics is computed when the request leaves. For fewer than ``MANY`` requests arrays do not pay.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.lane import response_byte_size
from tensord.shm.messages import PreparedAnswer
from tensord.shm.prepared import Numbered
from tensord.workers.dispatch.responses import Responses
from tensord.workers.models.statistics import VersionStatistics
from tensord.workers.programs.step_program import Rows
from tensord.workers.requests.answer_plan import answers
from tensord.workers.requests.request import Request
from tensord.workers.requests.response_sender import ResponseSender
from tensord.workers.requests.submitter_link import SubmitterLink

#: Requests in a step from which on this pays: measured, 10 us for any number and 10 for one that leaves, against 2.3 for each.
MANY = 8
#: The most steps that are noted before all requests leave.
_MOST = 4096


class _Joined(NamedTuple):
    """A request that runs step by step in a slot, and whose responses are sent together with those of other requests."""

    sender: ResponseSender
    #: How many steps were noted by then, and how many will be when its client may be too far behind.
    since: int
    until: int


class _Lane:
    """Sends each step's responses to the requests of one submitter that have joined, all at once."""

    def __init__(self, submitter: SubmitterLink[Request], numbered: Numbered[PreparedAnswer], sizes: list[int]) -> None:
        self._submitter = submitter
        self._numbered = numbered
        self._sizes = tuple(sizes)
        self._slots = np.zeros(0, np.int64)
        self._ids: list[int] = []

    def take(self, slots: list[int], request_ids: list[int]) -> None:
        """Sets the slots for which ``send`` queues responses to the submitter, and the ids of their requests, in that order."""
        self._slots = np.array(slots)
        self._ids = request_ids

    def send(self, rows: Array) -> None:
        """Queues a response for each slot of the submitter. ``rows``: the outputs of all slots, UINT8[slots, size]."""
        records = answers(self._numbered.number, self._ids, self._sizes, rows[self._slots])
        self._submitter.lane.complete_encoded(self._numbered, records)
        self._submitter.flush_soon()


class StepRows:
    """Sends each step's responses at once to all requests of a model version that have joined, instead of one by one.

    The model version runs requests step by step. ``joined[slot]`` is True where the slot's request has joined.
    """

    def __init__(self, slots: int, layout: Rows, responses: Responses, statistics: VersionStatistics) -> None:
        self.joined = [False] * slots
        self._layout = layout
        self._responses = responses
        self._statistics = statistics
        self._sizes = [part.stop - part.start for part in layout.slices]
        #: The bytes that each response counts until the client has taken it.
        self._byte_size = response_byte_size(tuple([bytes(size) for size in self._sizes]))
        #: By slot.
        self.members: dict[int, _Joined] = {}
        #: When the responses of each step left; once ``_look_at`` steps are noted, ``_look`` checks which clients are behind.
        self._left_ns: list[int] = []
        self._look_at = _MOST
        #: The slots that the lanes are prepared for; empty: a request has joined or left since.
        self._ready: list[int] = []
        self._lanes: dict[SubmitterLink[Request], _Lane] = {}

    def join(self, slot: int, sender: ResponseSender) -> None:
        """Joins a request: from the next step on, its responses are sent together with those of other joined requests.

        Does nothing if the request does not take plain small responses, or if its client is too far behind in reading them.
        """
        room = sender.room
        if room <= 0 or not self._responses.takes_small(sender):
            return
        since = len(self._left_ns)
        member = self.members[slot] = _Joined(sender, since, since - (-room // self._byte_size))
        self._look_at = min(self._look_at, member.until)
        self.joined[slot], self._ready = True, []
        sender.counted = functools.partial(self.leave, slot)

    def leave(self, slot: int) -> None:
        """Answers a slot's request separately from now on; adds its responses so far to the statistics.

        Ignores a slot that has not joined.
        """
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
        """Answers all joined requests separately from now on."""
        for slot in list(self.members):
            self.leave(slot)

    def send(self, slots: list[int], rows: Array, now_ns: int) -> list[ResponseSender]:
        """Sends a step's responses to the requests in these slots, which have joined, all at once.

        Returns the senders that are answered separately from now on, because their clients may be too far behind.

        Args:
          rows: the outputs of the step, UINT8[all slots, size].
        """
        if slots != self._ready:
            self._prepare(slots)
        outputs = rows[:, : self._layout.says]
        for lane in self._lanes.values():
            lane.send(outputs)
        self._left_ns.append(now_ns)
        return self._look() if len(self._left_ns) >= self._look_at else []

    def _prepare(self, slots: list[int]) -> None:
        """Assigns each of these slots to the lane of its request's submitter, on which ``send`` answers it.

        Joined requests in other slots are answered separately again.
        """
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
        """Answers requests separately from now on if their clients may be too far behind; after 4096 steps, all requests.

        Returns the senders of these requests.
        """
        steps = len(self._left_ns)
        full = [member.sender for member in self.members.values() if steps >= min(member.until, _MOST)]
        for sender in full:
            sender.catch_up()
        self._look_at = min([_MOST, *(member.until for member in self.members.values())])
        return full

    def __repr__(self) -> str:
        return f"<StepRows {len(self.members)} of {len(self.joined)} slots joined>"
