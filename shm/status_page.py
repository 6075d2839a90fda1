"""A worker's status page: what it is doing, in memory its supervisor and its submitters can read without asking.

A worker that executes, compiles or has just been killed cannot answer a question, but its page still says which of the three it
is and which requests it was running. Nameless and sealed like every segment; only the worker writes. Layout, u64 each:

    word 0   state (WorkerState)        word 1   since (ns)
    word 2   last turn of the loop (ns) word 3   outputs (Outputs)
    desk k   at word 512 * (k + 1):     count, then count x (submitter, request id); word 510 model (``model_key``), 511 since

A desk belongs to one execution thread. ``begin`` writes the count last and ``end`` clears it, so a reader of a dead worker's page
never sees an id of an earlier batch. Desk 0 is the main loop's: what that executes shows in word 0 as well.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from tensord.shm.segment import Segment

_WORDS = 512
_MODEL, _SINCE = 510, 511
#: More execution threads than this share no desk: what they run is not recorded.
DESKS = 63
#: Ids beyond this in one batch are not recorded, so they are run again without a strike.
IDS_PER_DESK = (_MODEL - 1) // 2
_BYTE_SIZE = (DESKS + 1) * _WORDS * 8


class WorkerState(enum.IntEnum):
    """What the worker's main loop is doing; each state has its own deadline at the supervisor."""

    #: Importing and opening the device.
    STARTING = 0
    #: Waiting for requests; the loop turns.
    IDLE = 1
    #: Inside a model.
    EXECUTING = 2
    #: Told to stop, finishing what is in flight.
    STOPPING = 3


class Outputs(enum.IntEnum):
    """How large outputs get to where clients want them."""

    #: Nothing is decided: the worker starts.
    UNKNOWN = 0
    #: XLA writes them there.
    IN_PLACE = 1
    #: They are copied there.
    COPIED = 2


class Running(NamedTuple):
    """Something that is being executed."""

    #: CLOCK_MONOTONIC.
    since_ns: int
    #: ``model_key`` of what it is.
    model: int


def model_key(name: str, version: int) -> int:
    """A model version in one word; whoever knows the models finds it again."""
    return int.from_bytes(hashlib.blake2b(f"{name}/{version}".encode(), digest_size=8).digest(), "little")


class StatusPage:
    """One page; writable for the worker that created it."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._words = segment.view.cast("Q")

    @classmethod
    def create(cls) -> StatusPage:
        return cls(Segment.create(_BYTE_SIZE))

    @classmethod
    def attach(cls, fd: int) -> StatusPage:
        """Takes the descriptor over. Raises InvalidArgument: not a status page."""
        return cls(Segment.attach(fd, _BYTE_SIZE))

    @property
    def fd(self) -> int:
        return self._segment.fd

    @property
    def memory(self) -> memoryview:
        """The page itself, for who writes it outside of Python (``tensord.workers.dispatch.fast_path``)."""
        return self._segment.view

    def set_state(self, state: WorkerState, now_ns: int) -> None:
        """Also counts as a turn of the loop."""
        self._words[0] = state
        self._words[1] = now_ns
        self._words[2] = now_ns

    def beat(self, now_ns: int) -> None:
        """The loop turned."""
        self._words[2] = now_ns

    @property
    def state(self) -> tuple[WorkerState, int]:
        """The state and since when (CLOCK_MONOTONIC ns)."""
        return WorkerState(self._words[0]), self._words[1]

    @property
    def outputs(self) -> Outputs:
        """What was found when the worker started."""
        return Outputs(self._words[3])

    @outputs.setter
    def outputs(self, found: Outputs) -> None:
        self._words[3] = found

    @property
    def last_beat_ns(self) -> int:
        return self._words[2]

    @staticmethod
    def word(desk: int) -> int:
        """Where a desk begins."""
        return _WORDS * (desk + 1)

    def begin(self, desk: int, requests: Sequence[tuple[int, int]], model: int, now_ns: int) -> None:
        """Notes what the thread at that desk starts to run: (submitter, request id) each. ``model``: its ``model_key``."""
        if desk >= DESKS:
            return
        at = _WORDS * (desk + 1)
        words = self._words
        words[at + _MODEL] = model
        words[at + _SINCE] = now_ns
        if len(requests) == 1:
            ((words[at + 1], words[at + 2]),) = requests
            words[at] = 1
            return
        recorded = requests[:IDS_PER_DESK]
        for i, (submitter, request_id) in enumerate(recorded):
            words[at + 1 + 2 * i] = submitter
            words[at + 2 + 2 * i] = request_id
        words[at] = len(recorded)

    def end(self, desk: int) -> None:
        """The thread at that desk runs nothing."""
        if desk < DESKS:
            self._words[_WORDS * (desk + 1)] = 0

    def executing(self) -> set[tuple[int, int]]:
        """Every (submitter, request id) being run; of a dead worker: what it died with."""
        found: set[tuple[int, int]] = set()
        for desk in range(DESKS):
            at = self.word(desk)
            for i in range(min(self._words[at], IDS_PER_DESK)):
                found.add((self._words[at + 1 + 2 * i], self._words[at + 2 + 2 * i]))
        return found

    def oldest(self) -> Running | None:
        """What has been executed for longest, of what is being executed now."""
        words, state = self._words, self.state
        busy = [at for at in map(self.word, range(1, DESKS)) if words[at]]
        running = [Running(words[at + _SINCE], words[at + _MODEL]) for at in busy]
        if state[0] is WorkerState.EXECUTING:
            running.append(Running(state[1], words[self.word(0) + _MODEL]))
        return min(running, default=None)

    def close(self) -> None:
        """Idempotent."""
        self._words.release()
        self._segment.close()

    def __repr__(self) -> str:
        return f"<StatusPage {self.state[0].name} executing={len(self.executing())}>"
