"""Registers the live sequences of all models of a worker: bounds their number, and publishes them to fronts.

Belongs to the worker's loop. Its rule: a sequence is on the page before anything of it runs, and until its answers have left.
"""

from __future__ import annotations

import time
from typing import Any

from tensord.shm.errors import Unavailable
from tensord.shm.sequence_keys import Key, SequenceKeys
from tensord.shm.sequence_page import SequencePage
from tensord.workers.scheduling.sequence_table import SequenceTable


class SequenceRegister:
    """The live sequences of one worker; it alone writes the worker's sequence page."""

    def __init__(self, page: SequencePage, most: int) -> None:
        self.page = page
        self._most = most
        #: Of all models.
        self.live = 0
        #: Whether any has ended whose answers may not have left.
        self.ended = False
        #: Those that new sequences join, by the key of their model version.
        self.serving: dict[Key, RegisteredSequences] = {}
        #: Loads whose slots differ from what the page says.
        self.changed: set[RegisteredSequences] = set()

    def of(self, model: str, version: int) -> RegisteredSequences:
        """Makes the registry of one load's sequences."""
        return RegisteredSequences(self, SequenceKeys(model, version))

    def add(self) -> None:
        """Counts a new sequence. Raises Unavailable: there are as many as may be."""
        if self.live >= self._most:
            raise Unavailable(
                f"{self.live} sequences are live on this worker, requests.max_sequences allows {self._most}"
            )
        self.live += 1

    def tell(self) -> None:
        """Publishes free slots; call it before answers leave, because clients that have one may start another sequence."""
        changed, self.changed = self.changed, set()
        for each in changed:
            each.publish_slots()

    def left(self) -> None:
        """Forgets sequences that have ended, once all answers have left."""
        if self.ended:
            self.settle()

    def settle(self) -> None:
        """Removes sequences that have ended from the page; their answers have left."""
        self.ended = False
        self.page.settle()

    def __repr__(self) -> str:
        return f"<SequenceRegister {self.live} of {self._most}>"


class RegisteredSequences:
    """The registered sequences of one load of a model version.

    ``generation`` tells sequences of one correlation id apart; a later one has a higher number. A sequence has ``waiting``, then
    ``begun`` unless it never ran, then ``gone``, which may come after the ``waiting`` of the next one of its id.
    """

    def __init__(self, register: SequenceRegister, keys: SequenceKeys) -> None:
        self._register = register
        self._keys = keys
        #: By generation: its key, and since when it is on the page.
        self._entries: dict[int, tuple[Key, int]] = {}
        self._table: SequenceTable[Any] | None = None

    def serve(self, table: SequenceTable[Any]) -> None:
        """Begins to serve: new sequences join this load."""
        self._table = table
        self._register.serving[self._keys.slots] = self
        self._register.changed.add(self)

    def retire(self) -> None:
        """Stops serving: the version was unloaded, or loaded again."""
        self._table = None
        if self._register.serving.get(self._keys.slots) is self:
            del self._register.serving[self._keys.slots]
            self._register.page.withdraw_slots(self._keys.slots)

    def publish_slots(self) -> None:
        """Publishes free slots and the backlog, while new sequences join."""
        if self._table is not None:
            self._register.page.publish_slots(self._keys.slots, self._table.free_slots, self._table.backlog)

    def waiting(self, correlation_id: int | str, generation: int) -> None:
        """Registers a sequence that is to be admitted. Raises Unavailable: there are too many; then it is not."""
        self._register.add()
        key = self._keys.key(correlation_id)
        self._entries[generation] = key, self._register.page.admit(key, time.monotonic_ns())
        self._register.changed.add(self)

    def begun(self, correlation_id: int | str, generation: int) -> None:
        """Publishes that a sequence's first request is about to run."""
        self._register.page.begin(*self._entries[generation])

    def gone(self, correlation_id: int | str, generation: int) -> None:
        """Publishes that no request of a sequence waits or runs."""
        self._register.page.end(*self._entries.pop(generation))
        self._register.live -= 1
        self._register.ended = True
        self._register.changed.add(self)

    def __repr__(self) -> str:
        return f"<RegisteredSequences {len(self._entries)}>"
