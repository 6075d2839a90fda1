"""A status page is shared memory in which a worker shows what it does. Other processes read it without asking the worker.

After a worker was killed, its page shows which requests the worker was running. The page is a sealed memfd that only the worker
writes. It is an array of 64-bit words. All times are CLOCK_MONOTONIC in ns:

    word 0   the state of the worker's main loop (WorkerState)      word 1   when this state began
    word 2   when the main loop last iterated                       word 3   how outputs get into shared memory (Outputs)

Thread 0 is the main loop. Each thread k < SLOTS that runs models has 512 words, counted here from word 512 * (k + 1) on:

    word 0     how many requests are listed from word 1 on. When a run begins, the worker writes this word last.
    word 1     two words for each request that the thread runs now: the number of its submitter, and the request's id. Only
               the first IDS_PER_SLOT requests are listed.
    word 510   the ``model_key`` of the model version           word 511   when the run began
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from tensord.shm.segment import Page, Segment

_WORDS = 512
_MODEL, _SINCE = 510, 511
#: The number of slots: further execution threads have none, and what they run is not recorded.
SLOTS = 63
#: The main loop's slot.
LOOP_SLOT = 0
#: Ids beyond this in one batch are not recorded, so those requests are run again without a crash being counted.
IDS_PER_SLOT = (_MODEL - 1) // 2
_BYTE_SIZE = (SLOTS + 1) * _WORDS * 8


class WorkerState(enum.IntEnum):
    """What a worker's main loop is doing. The supervisor has a time limit for each state."""

    #: The worker imports and opens the device.
    STARTING = 0
    #: The loop waits for requests and iterates.
    IDLE = 1
    #: The loop is inside a model.
    EXECUTING = 2
    #: The worker is stopping: it finishes what is in flight.
    STOPPING = 3


class Outputs(enum.IntEnum):
    """Says whether XLA writes a worker's large outputs directly to shared memory, or whether they are copied there."""

    #: Nothing is decided: the worker starts.
    UNKNOWN = 0
    #: XLA writes them there.
    IN_PLACE = 1
    #: The tensors are copied there.
    COPIED = 2


class Running(NamedTuple):
    """A run of a model that a worker has not finished."""

    #: When it began (CLOCK_MONOTONIC).
    since_ns: int
    #: The ``model_key`` of the model.
    model: int


def model_key(name: str, version: int) -> int:
    """Returns a 64-bit hash of a model's name and version, which identifies the version on status pages."""
    return int.from_bytes(hashlib.blake2b(f"{name}/{version}".encode(), digest_size=8).digest(), "little")


class StatusPage(Page):
    """Shared memory in which a worker shows what it is doing. It is writable only in the worker."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment)
        #: The state of the main loop between executions.
        self.resting = WorkerState.IDLE

    @classmethod
    def create(cls) -> StatusPage:
        segment = Segment.create(_BYTE_SIZE)
        segment.share(writable=False)
        return cls(segment)

    @classmethod
    def attach(cls, fd: int) -> StatusPage:
        """Maps a worker's status page and takes ownership of ``fd``.

        Raises InvalidArgument if ``fd`` is no status page. Raises Unavailable if the page cannot be mapped now.
        """
        return cls(Segment.attach(fd, _BYTE_SIZE))

    @property
    def memory(self) -> memoryview:
        """Returns the page's memory, for C code that writes to the page."""
        return self._segment.view

    def set_state(self, state: WorkerState, now_ns: int) -> None:
        """Sets the state of the worker's main loop from ``now_ns`` on."""
        self._words[0] = state
        self._words[1] = now_ns
        self._words[2] = now_ns

    def beat(self, now_ns: int) -> None:
        """Stores ``now_ns`` as the time of the last iteration of the worker's main loop (CLOCK_MONOTONIC ns)."""
        self._words[2] = now_ns

    @property
    def state(self) -> tuple[WorkerState, int]:
        """Returns the state of the worker's main loop and when that state began (CLOCK_MONOTONIC ns)."""
        return WorkerState(self._words[0]), self._words[1]

    @property
    def outputs(self) -> Outputs:
        """Returns how the worker's large outputs get into shared memory, or UNKNOWN while the worker starts."""
        return Outputs(self._words[3])

    @outputs.setter
    def outputs(self, found: Outputs) -> None:
        self._words[3] = found

    @property
    def last_beat_ns(self) -> int:
        return self._words[2]

    @staticmethod
    def word(slot: int) -> int:
        """Returns the index of the first 64-bit word of the page for thread number ``slot``. The main loop is number 0."""
        return _WORDS * (slot + 1)

    def begin(self, slot: int, requests: Sequence[tuple[int, int]], model: int, now_ns: int) -> None:
        """Records the requests that one of the worker's threads begins to run.

        Args:
          slot: the thread's number. If it is SLOTS or more, nothing is recorded. LOOP_SLOT also sets the worker's state
            EXECUTING.
          requests: the submitter's number and the request id of each request.
          model: the result of ``model_key`` for the model version that runs the requests.
        """
        if slot >= SLOTS:
            return
        at = _WORDS * (slot + 1)
        words = self._words
        if slot == LOOP_SLOT:
            words[0], words[1], words[2] = WorkerState.EXECUTING, now_ns, now_ns
        words[at + _MODEL] = model
        words[at + _SINCE] = now_ns
        if len(requests) == 1:
            ((words[at + 1], words[at + 2]),) = requests
            words[at] = 1
            return
        recorded = requests[:IDS_PER_SLOT]
        for i, (submitter, request_id) in enumerate(recorded):
            words[at + 1 + 2 * i] = submitter
            words[at + 2 + 2 * i] = request_id
        words[at] = len(recorded)

    def end(self, slot: int, now_ns: int) -> None:
        """Records that thread number ``slot`` of the worker runs no model any more.

        Thread 0 is the worker's main loop. If ``slot`` is 0, the worker's state is also set to ``self.resting``.
        """
        if slot < SLOTS:
            words = self._words
            words[_WORDS * (slot + 1)] = 0
            if slot == LOOP_SLOT:
                words[0], words[1], words[2] = self.resting, now_ns, now_ns

    def executing(self) -> set[tuple[int, int]]:
        """Returns (submitter's number, request id) of each request that the worker is running, or was running when it died."""
        found: set[tuple[int, int]] = set()
        for slot in range(SLOTS):
            at = self.word(slot)
            for i in range(min(self._words[at], IDS_PER_SLOT)):
                found.add((self._words[at + 1 + 2 * i], self._words[at + 2 + 2 * i]))
        return found

    def oldest(self) -> Running | None:
        """Returns the unfinished run of a model that began first, or None if there is none."""
        words, state = self._words, self.state
        busy = [at for at in map(self.word, range(1, SLOTS)) if words[at]]
        running = [Running(words[at + _SINCE], words[at + _MODEL]) for at in busy]
        if state[0] is WorkerState.EXECUTING:
            running.append(Running(state[1], words[self.word(0) + _MODEL]))
        return min(running, default=None)

    def __repr__(self) -> str:
        return f"<StatusPage {self.state[0].name} executing={len(self.executing())}>"
