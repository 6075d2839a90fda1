"""Runs stepped models, which compute their requests in steps. A step computes a part of each request that has a slot.

A slot is a request's place in the state that a stepped model keeps on the device. Two kinds of programs run on the device:
insertions, which put new requests into free slots, and steps. ``Stepping.dispatch`` starts programs, and does not wait for
their results. ``Stepping.read`` reads the results of finished programs in the order in which the programs were started, and
sends the responses. Meanwhile, the device can already run the next program.

If a step has small responses to many requests, ``StepRows`` sends these responses together. This takes less time than to send
each response alone.

Only the thread of the worker's event loop may use this module.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.errors import Internal, ServingError
from tensord.shm.lane import response_byte_size
from tensord.shm.messages import PreparedAnswer
from tensord.shm.prepared import Numbered
from tensord.shm.status_page import LOOP_SLOT, StatusPage
from tensord.workers.dispatch.responses import Responses
from tensord.workers.models.execution import Execution, chosen_by, own_failure
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.models.statistics import VersionStatistics
from tensord.workers.models.stepped_model import DeviceRun
from tensord.workers.parameters.parameter_set import ParameterSet
from tensord.workers.programs.carry import StateLost
from tensord.workers.programs.run_errors import CheckDevice
from tensord.workers.programs.step_program import Rows
from tensord.workers.requests.preparation import answers
from tensord.workers.requests.request import Request
from tensord.workers.requests.response_sender import ResponseSender
from tensord.workers.requests.submitter_link import SubmitterLink
from tensord.workers.scheduling.step_batcher import SlotAnswer, SlotHolder, Step

#: Requests in a step from which on this pays: measured, 10 us for any number and 10 for one that leaves, against 2.3 for each.
MANY = 8
#: The most steps that are noted before all requests leave.
_MOST = 4096


class _Joined(NamedTuple):
    """A request whose responses are sent together with those of other requests."""

    sender: ResponseSender
    #: How many steps were noted by then, and how many will be when its client may be too far behind.
    since: int
    until: int


class _JoinedAnswers(NamedTuple):
    submitter: SubmitterLink[Request]
    numbered: Numbered[PreparedAnswer]
    slots: Array
    request_ids: list[int]


class StepRows:
    """Sends one step's responses to a group of requests together. ``join`` adds a request, and ``leave`` removes one."""

    def __init__(self, slots: int, layout: Rows, responses: Responses, statistics: VersionStatistics) -> None:
        self.joined = [False] * slots
        self._layout = layout
        self._responses = responses
        self._statistics = statistics
        self._sizes = tuple([part.stop - part.start for part in layout.slices])
        #: The bytes that each response counts until the client has taken it.
        self._byte_size = response_byte_size(tuple([bytes(size) for size in self._sizes]))
        #: The requests that run, by slot.
        self.members: dict[int, _Joined] = {}
        #: When the responses of each step left; once ``_look_at`` steps are noted, ``_look`` checks which clients are behind.
        self._left_ns: list[int] = []
        self._look_at = _MOST
        #: The slots that the lanes are prepared for; empty: a request has joined or left since.
        self._ready: list[int] = []
        self._joined: list[_JoinedAnswers] = []

    def join(self, slot: int, sender: ResponseSender) -> None:
        """Sends the responses to the request in ``slot`` together with those to all joined requests, from the next step on.

        Does nothing if ``sender.room`` is 0 or less, or if ``Responses.takes_small`` returns False for ``sender``.
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
        """Takes the request in ``slot`` out of the group whose responses are sent together. Its later responses go alone."""
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
            self._joined.clear()

    def leave_all(self) -> None:
        """Takes all requests out of the group whose responses are sent together. Their later responses go alone."""
        for slot in list(self.members):
            self.leave(slot)

    def send(self, slots: list[int], rows: Array, now_ns: int) -> list[ResponseSender]:
        """Sends one step's responses to the requests in ``slots``. Each of these requests must have been added by ``join``.

        Calls ``leave`` for all other joined requests. ``rows``: the outputs of the step for all slots of the model,
        UINT8[slots, bytes]. ``now_ns``: the present time (CLOCK_MONOTONIC).
        Returns the response senders that may be full now (``ResponseSender.is_full``). ``leave`` was called for their requests.
        """
        if slots != self._ready:
            self._prepare(slots)
        outputs = rows[:, : self._layout.says]
        for submitter, numbered, own, request_ids in self._joined:
            records = answers(numbered.number, request_ids, self._sizes, outputs[own])
            submitter.lane.complete_encoded(numbered, records)
            submitter.flush_soon()
        self._left_ns.append(now_ns)
        return self._look() if len(self._left_ns) >= self._look_at else []

    def _prepare(self, slots: list[int]) -> None:
        going = set(slots)
        for slot in [slot for slot in self.members if slot not in going]:
            self.leave(slot)
        shares: dict[SubmitterLink[Request], list[int]] = {}
        for slot in slots:
            shares.setdefault(self.members[slot].sender.request.submitter, []).append(slot)
        self._joined = []
        for submitter, share in shares.items():
            requests = [self.members[slot].sender.request for slot in share]
            kind = submitter.response_kind(requests[0].version.version, self._layout.described, False)
            ids = [request.request_id for request in requests]
            self._joined.append(_JoinedAnswers(submitter, kind.numbered, np.array(share), ids))
        self._ready = slots

    def _look(self) -> list[ResponseSender]:
        steps = len(self._left_ns)
        # Once ``_MOST`` times are noted these are all: never more are noted.
        full = [member.sender for member in self.members.values() if steps >= min(member.until, _MOST)]
        for sender in full:
            sender.catch_up()
        self._look_at = min([_MOST, *(member.until for member in self.members.values())])
        return full

    def __repr__(self) -> str:
        return f"<StepRows {len(self.members)} of {len(self.joined)} slots joined>"


_log = logging.getLogger(__name__)


class _Given(NamedTuple):
    """A program that was started on the device, and whose results were not read yet."""

    what: list[Request] | Step[Request]
    run: DeviceRun
    #: When the device got it.
    began_ns: int


class SteppingRuns:
    """Runs a worker's stepped models. One step of such a model computes a part of several requests at once."""

    def __init__(self, responses: Responses, page: StatusPage, clock: Callable[[], int], check: CheckDevice) -> None:
        """Begins without any model version.

        Args:
          responses: sends the models' responses to clients.
          page: shared memory in which the worker says which requests it runs.
          clock: returns the time of CLOCK_MONOTONIC in ns.
          check: raises an error if the worker's device has failed.
        """
        self._make = functools.partial(Stepping, responses=responses, page=page, clock=clock, check=check)
        #: Versions that have been stepped.
        self._versions: dict[ModelVersion, Stepping] = {}
        #: The versions among them with requests: they are stepped in each iteration.
        self.living: dict[ModelVersion, Stepping] = {}

    def join(self, version: ModelVersion) -> None:
        """Adds a model version to the versions that ``step`` runs. ``step`` removes a version that has nothing left to run."""
        stepping = self._versions.get(version)
        if stepping is None:
            stepping = self._versions[version] = self._make(version)
            version.when_closed(lambda: (self._versions.pop(version, None), self.living.pop(version, None)))
        self.living[version] = stepping

    @property
    def waits(self) -> bool:
        """True while a request waits in the queue of a stepped model."""
        return any(len(version.planner) for version in self.living)

    def step(self, now_ns: int, wait: bool) -> bool:
        """Starts new requests and further steps of the versions that ``join`` added, and answers requests that have a result.

        ``wait``: whether to wait until the device has finished the oldest running program of each version.
        Returns whether the caller must soon call this method again.
        """
        pending = False
        for version, stepping in list(self.living.items()):
            pending |= stepping.dispatch(now_ns)
            # Also one of which all requests have left: what the device was given is read.
            if not (stepping.given or len(version.planner) or version.planner.lives):
                del self.living[version]
        if pending:
            for stepping in self.living.values():
                stepping.read(wait)
        return pending


class Stepping:
    """Runs one model version that computes requests in steps. Starts the steps on the device, and answers the requests."""

    def __init__(
        self,
        version: ModelVersion,
        responses: Responses,
        page: StatusPage,
        clock: Callable[[], int],
        check: CheckDevice,
    ) -> None:
        assert version.loaded.stepped is not None
        assert version.steps is not None
        self._version = version
        self._model = version.loaded.stepped
        self._batcher = version.steps
        self._responses = responses
        self._page = page
        self._clock = clock
        self._check = check
        #: True if a row of outputs is small enough to go into the record of a response.
        self._small = self._model.rows.byte_size <= responses.inline_byte_size
        self._rows = StepRows(self._model.rules.slots, self._model.rows, responses, version.statistics)
        #: Insertions and steps that were launched and not read yet, in order.
        self.given: deque[_Given] = deque()
        #: When the last launch was read: the device has worked on the next one since.
        self._read_ns = 0

    # -------------------------------------------------------------------------------------------------------- to the device

    def dispatch(self, now_ns: int) -> bool:
        """Starts new requests and further steps on the device. Returns whether there is more to start, or a result to read."""
        batcher, given = self._batcher, self.given
        if given and given[0].run.ready:
            return True
        while requests := batcher.take(now_ns):
            self._begin(requests, now_ns)
        # What is done at once is answered first.
        while not (given and given[-1].run.ready) and (step := batcher.step()) is not None:
            try:
                for part, chosen in self._parts(step) if self._version.steps_hold else ((step, None),):
                    last = max([holder.number for holder in part.holders])
                    run = self._model.step(last, part.masked, chosen)
                    given.append(_Given(part, run, now_ns))
            except BaseException as error:  # also sys.exit() in a callback of the model
                self._lose(error)
                break
        return bool(given) or batcher.due_ns() is not None

    def _parts(self, step: Step[Request]) -> list[tuple[Step[Request], ParameterSet | None]]:
        """Splits a step into parts, each for one parameter set. Returns each part with its set; None: ``main``."""
        groups: dict[ParameterSet | None, list[SlotHolder[Request]]] = {}
        for holder in step.holders:
            groups.setdefault(_own_set(holder.request), []).append(holder)
        if len(groups) > 1:
            return list(zip(step.parts(list(groups.values())), groups, strict=True))
        (chosen,) = groups
        if chosen is None:
            # Paused requests may still go on with another parameter set.
            self._version.steps_hold = any(_own_set(request) is not None for request in self._batcher.with_slots())
        return [(step, chosen)]

    def _begin(self, requests: list[Request], now_ns: int) -> None:
        """Makes response senders for new requests, and puts the requests into the state that the model has on the device."""
        self._responses.open(requests, now_ns)
        for request in requests:
            # No function of the model has to notice a cancellation, so the request may be ended at once.
            self._version.senders[request].returned = True
            # The request that had the slot before leaves the shared answers.
            self._rows.leave(self._batcher.slot(request))
        self._insert(requests, now_ns)

    def _insert(self, requests: list[Request], now_ns: int) -> None:
        """Inserts requests into the model's state on the device. A request that cannot be inserted gets an error."""
        try:
            sets = self._model.executables.sets
            chosen = chosen_by(sets, requests)
            run = self._model.insert(requests, [self._batcher.slot(request) for request in requests], chosen)
            if chosen is not sets.main:
                self._version.steps_hold = True
                for request in requests:
                    request.chosen = chosen
        except StateLost as lost:
            self._lose(lost.__cause__ or lost)
        except BaseException as error:
            if len(requests) > 1:
                # Each alone, so that only those that fail get an error.
                for request in requests:
                    # One that loses the state fails those behind it, too.
                    if request in self._batcher.with_slots():
                        self._insert([request], now_ns)
                return
            failed = own_failure(self._model, error, Execution(requests, now_ns), self._check)
            self._batcher.done(requests, now_ns)
            self._end(requests, failed)
        else:
            self.given.append(_Given(requests, run, now_ns))

    # ------------------------------------------------------------------------------------------------------ from the device

    def read(self, wait: bool) -> None:
        """Reads the results of programs that the device has finished, and answers the requests.

        ``wait``: whether to wait until the device has finished the oldest program.
        """
        while self.given and (wait or self.given[0].run.ready):
            wait = False
            what, run, began_ns = self.given.popleft()
            began = self._clock()
            # The page says which model is stepped, not for whom.
            self._page.begin(LOOP_SLOT, (), self._version.page_key, began)
            try:
                rows = run.read()
            except BaseException as error:
                self._page.end(LOOP_SLOT, self._clock())
                self._lose(error)
                return
            now_ns = self._clock()
            self._page.end(LOOP_SLOT, now_ns)
            says = rows[:, -1].tolist()
            if not isinstance(what, Step):
                self._answer(self._batcher.inserted(what, says), rows, now_ns)
                continue
            began_ns, self._read_ns = max(began_ns, self._read_ns), now_ns
            self._version.statistics.stepped(len(what.holders), now_ns - began_ns)
            many = self._small and len(what.holders) >= MANY
            if self._rows.members and not many:
                self._rows.leave_all()
            answers, going = self._batcher.stepped(what, says, self._rows.joined)
            if going:
                for sender in self._rows.send(going, rows, now_ns):
                    if sender.is_full:
                        self._pause(sender)
            self._answer(answers, rows, now_ns, join=many)

    def _answer(self, answers: list[SlotAnswer[Request]], rows: Array, now_ns: int, join: bool = False) -> None:
        if not answers:
            return
        # With ``join`` row numbers are slot numbers.
        senders, layout = self._version.senders, self._model.rows
        # As bytes they are cut without an array for each.
        content = rows.tobytes() if self._small else b""
        for request, row, emits, final in answers:
            sender = senders.get(request)
            if sender is None:
                # It has ended: what it was given last found no room for too long.
                self._batcher.dropped(request, self._read_ns)
                continue
            if join:
                # It may have been answered with others so far.
                sender.catch_up()
            start = row * layout.byte_size
            contents = tuple([content[start + part.start : start + part.stop] for part in layout.slices])
            if not (
                emits
                and content
                and not final
                and sender not in self._responses.kept
                and sender.respond_small(layout.described, contents, now_ns)
            ):
                self._responses.respond(sender, layout.cut(rows[row]) if emits else None, final)
            if final:
                continue
            if join:
                self._rows.join(row, sender)
            if sender.is_full:
                self._pause(sender)

    def _pause(self, sender: ResponseSender) -> None:
        """Leaves the request of ``sender`` out of the model's steps until the client has taken enough responses."""
        request = sender.request
        if sender.when_room(lambda: self._batcher.resume(request)):
            self._batcher.pause(request)

    def _lose(self, error: BaseException) -> None:
        """Fails all requests that have begun, because their state is lost."""
        cause = (error.__cause__ or error) if isinstance(error, StateLost) else self._model.lost() and error
        _log.error("%s, and with it all requests that had a slot", self._model.describe(cause), exc_info=cause)
        self.given.clear()
        requests = self._batcher.failed()
        failed: ServingError = Internal(self._model.describe(cause))
        try:
            self._check()
        except ServingError as lost:
            failed = lost.with_traceback(None)
        self._end(requests, failed)

    def _end(self, requests: list[Request], error: ServingError) -> None:
        for request in requests:
            sender = self._version.senders.get(request)
            if sender is not None:
                sender.catch_up()
                self._responses.respond(sender, error, final=True)

    def __repr__(self) -> str:
        return f"<Stepping of {self._version.name!r}: {len(self.given)} on their way>"


def _own_set(request: Request) -> ParameterSet | None:
    return request.chosen if isinstance(request.chosen, ParameterSet) else None
