"""Limits how many live sequences a worker has, and lists the live sequences in shared memory that fronts read.

A sequence is listed before its first request runs, and removed after its last answer was sent. Used by the worker's loop only.
"""

from __future__ import annotations

import time
from typing import Any

from tensord.shm.errors import Unavailable
from tensord.shm.sequence_page import Key, SequenceKeys, SequencePage
from tensord.workers.scheduling.sequence_table import SequenceTable

#: A sequence on the page: its key, and the time since which it is there.
Entry = tuple[Key, int]


class SequenceRegister:
    """Counts and limits a worker's live sequences, and publishes them in a shared memory (``page``) that fronts read."""

    def __init__(self, page: SequencePage, most: int) -> None:
        self.page = page
        self._most = most
        #: The number of live sequences of all models.
        self.live = 0
        #: True if any has ended whose answers may not have left.
        self.ended = False
        #: The registers that new sequences join, by the key of their model version.
        self.serving: dict[Key, RegisteredSequences] = {}
        #: Loads whose slots differ from what the page says.
        self.changed: dict[RegisteredSequences, None] = {}

    def of(self, model: str, version: int) -> RegisteredSequences:
        """Returns a new object, which registers the sequences of one loaded model version."""
        return RegisteredSequences(self, SequenceKeys(model, version))

    def add(self) -> None:
        """Counts a new sequence. Raises Unavailable: too many are live."""
        if self.live >= self._most:
            raise Unavailable(
                f"{self.live} sequences are live on this worker, requests.max_sequences allows {self._most}"
            )
        self.live += 1

    def tell(self) -> None:
        """Tells fronts how many sequence slots of each model version are free, and how many sequences wait for a slot.

        Call it before the worker sends answers, because clients may start new sequences after an answer.
        """
        changed, self.changed = self.changed, {}
        for each in changed:
            each.publish_slots()

    def left(self) -> None:
        """If a sequence has ended, calls ``settle``. Call ``left`` only after the answers of all ended sequences were sent."""
        if self.ended:
            self.settle()

    def settle(self) -> None:
        """Removes all ended sequences from ``self.page``. Call it only after the answers of all ended sequences were sent."""
        self.ended = False
        self.page.settle()

    def __repr__(self) -> str:
        return f"<SequenceRegister {self.live} of {self._most}>"


class RegisteredSequences:
    """Writes the sequences of one model version to the worker's sequence page, so that fronts know them.

    For each sequence call ``waiting`` first, then ``begun`` when its first request runs, and ``gone`` at its end. Sequences
    with the same id may overlap, so ``waiting`` returns an entry, which tells them apart.
    """

    def __init__(self, register: SequenceRegister, keys: SequenceKeys) -> None:
        self._register = register
        self._keys = keys
        self._table: SequenceTable[Any] | None = None

    def serve(self, table: SequenceTable[Any]) -> None:
        """From now on publishes how many slots of ``table`` are free. Fronts prefer workers with free slots for new sequences."""
        self._table = table
        self._register.serving[self._keys.slots] = self
        self._register.changed[self] = None

    def retire(self) -> None:
        """Undoes ``serve``. Fronts then assume that this worker has no free slots for sequences of this model version."""
        self._table = None
        if self._register.serving.get(self._keys.slots) is self:
            del self._register.serving[self._keys.slots]
            self._register.page.withdraw_slots(self._keys.slots)

    def publish_slots(self) -> None:
        """Tells fronts how many slots for sequences are free, and how many sequences wait. Does nothing after ``retire``."""
        if self._table is not None:
            self._register.page.publish_slots(self._keys.slots, self._table.free_slots, self._table.backlog)

    def waiting(self, correlation_id: int | str) -> Entry:
        """Registers a new sequence, which waits for a slot. Returns its entry. Raises Unavailable: too many are live."""
        self._register.add()
        key = self._keys.key(correlation_id)
        self._register.changed[self] = None
        return key, self._register.page.admit(key, time.monotonic_ns())

    def begun(self, entry: Entry) -> None:
        """Tells fronts that a sequence begins to run."""
        self._register.page.begin(*entry)

    def gone(self, entry: Entry) -> None:
        """Tells fronts that a sequence has ended."""
        self._register.page.end(*entry)
        self._register.live -= 1
        self._register.ended = True
        self._register.changed[self] = None

    def __repr__(self) -> str:
        return f"<RegisteredSequences of {self._table!r}>"
