"""A sequence page is shared memory in which a worker lists its sequences, and how many more each model version can admit.

Fronts and the daemon's main process read the page at any time, even after the worker has died. The page is a sealed memfd that
only the worker writes. There are no locks. The page is an array of 64-bit words:

    word 0   version of this format (1)                       word 1   how often an entry was moved or removed
    word 2   a random odd multiplier, unknown to clients      word 3   log2 of the number of entries
    entry k  three words from word 4 + 3 * k on: low half of a key, high half of the key, value

``SequenceKeys`` computes the keys. No half of a key is 0. The low half of a free entry is 0. The values are:

    for a sequence         time of admission (CLOCK_MONOTONIC ns) << 2 | SequenceState
    for a model version    FreeSlots.edition << 42 | FreeSlots.free << 22 | FreeSlots.backlog << 2

The entries are a hash table with open addressing. A search begins at the index in the top bits of ``low half * multiplier``.
The worker may be killed between any two stores. Other processes see its stores in their order, as on x86. In a new entry, the
low half is written last. To move an entry, the worker copies the entry, increments word 1, and then overwrites the old entry.
An entry whose high half is 0 is being overwritten, and does not count. If word 1 changes during a search, the reader searches
again.
"""

from __future__ import annotations

import enum
import os
import secrets
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from itertools import compress
from struct import Struct
from typing import NamedTuple

from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import SequenceId
from tensord.shm.segment import Page, Segment

#: Neither half of a key is 0.
Key = tuple[int, int]
_HALVES, _HEAD = Struct("<QQ"), Struct("<4Q")
#: Keys are cached: a sequence has many requests, and a key costs as much as looking for it on two pages.
_MOST_KNOWN = 4096
_LAYOUT = 1
_HEADER, _ENTRY = 4, 3
_MASK = (1 << 64) - 1
_MOST_SLOTS = (1 << 20) - 1
#: Model versions whose slots are published; of more nothing is known.
_MOST_MODELS = 1024


class SequenceKeys:
    """Computes 128-bit keys for the sequences of one model version. All processes compute the same key for the same sequence.

    A worker lists its sequences under these keys in shared memory. Fronts look there to find the worker of a sequence.
    """

    __slots__ = ("_digest", "_known", "slots")

    def __init__(self, model: str, version: int) -> None:
        self._digest = blake2b(repr((model, version)).encode("utf-8", "surrogatepass"), digest_size=16)
        #: The key of the model version itself.
        self.slots = _halves(self._digest.digest())
        self._known: dict[SequenceId, Key] = {}

    def key(self, sequence: SequenceId) -> Key:
        """Returns the key of a sequence. ``sequence`` is the sequence's id. The ids 5 and "5" have different keys."""
        key = self._known.get(sequence)
        if key is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            digest = self._digest.copy()
            text = "'" + sequence if isinstance(sequence, str) else f"#{sequence}"
            digest.update(text.encode("utf-8", "surrogatepass"))
            key = self._known[sequence] = _halves(digest.digest())
        return key


def _halves(digest: bytes) -> Key:
    low, high = _HALVES.unpack(digest)
    return low or 1, high or 1


class SequenceState(enum.IntEnum):
    """The state of a sequence on its worker's sequence page, which is shared memory that fronts read."""

    #: The sequence is admitted, and no request of it has run.
    WAITING = 1
    #: The model may have state of the sequence.
    BEGUN = 2
    #: All its requests have run or are refused. It stays on the page until its answers have left the worker.
    ENDED = 3


class FreeSlots(NamedTuple):
    """Says how many more sequences of a model version a worker can admit."""

    #: A number that changes each time the slots are published.
    edition: int
    free: int
    #: Sequences that wait for a slot.
    backlog: int


class SequencePage(Page):
    """Shared memory in which a worker lists its sequences, and how many more sequences each model version can admit."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment)
        self._multiplier, bits = self._words[2], self._words[3]
        self._shift = 64 - bits
        self._end = _HEADER + (_ENTRY << bits)
        #: Sequences that may have ended: with as many that live, and the models, a part of the page stays free.
        self._most_ended = (1 << bits) // 3
        #: The number of sequences and of models on it; for the writer alone.
        self._sequences = self._models = 0
        self._edition = 0
        self._last_ns = 0
        #: Ended sequences, each with the time at which it was admitted.
        self._ended: deque[tuple[Key, int]] = deque()

    @classmethod
    def create(cls, sequences: int) -> SequencePage:
        """Creates shared memory in which a worker lists up to ``sequences`` live sequences.

        Raises Unavailable if the host has no memory left or no more files may be opened.
        """
        # About as many again may have ended.
        bits = ((2 * sequences + _MOST_MODELS) * 3 // 2).bit_length()
        segment = Segment.create(8 * (_HEADER + (_ENTRY << bits)))
        with segment.view.cast("Q") as words:
            words[0], words[2], words[3] = _LAYOUT, secrets.randbits(64) | 1, bits
        segment.share(writable=False)
        return cls(segment)

    @classmethod
    def attach(cls, fd: int) -> SequencePage:
        """Maps a worker's sequence page, the list of the worker's sequences in the memfd ``fd``. Takes ownership of ``fd``.

        Raises InvalidArgument if the memfd has no sequence page. Raises Unavailable if the memfd cannot be mapped now.
        """
        segment = Segment.attach(fd, os.fstat(fd).st_size)
        header = bytes(segment.view[: _HEAD.size]).ljust(_HEAD.size, b"\0")
        layout, _, _, bits = _HEAD.unpack(header)
        if layout != _LAYOUT or bits >= 40 or segment.byte_size != 8 * (_HEADER + (_ENTRY << bits)):
            segment.close()
            raise InvalidArgument("not a sequence page")
        return cls(segment)

    # ---------------------------------------------------------------------------------------------------------- reading

    def find(self, key: Key) -> tuple[SequenceState, int] | None:
        """Returns a sequence's state and when it was admitted (CLOCK_MONOTONIC ns), or None if it is not on the page."""
        value = self.value(key)
        return (_STATES[value & 3], value >> 2) if value & 3 else None

    def slots(self, key: Key) -> FreeSlots | None:
        """Returns how many more sequences of a version the worker can admit, or None if the version is not on the page.

        ``key`` is the version's key.
        """
        value = self.value(key)
        return FreeSlots(value >> 42, value >> 22 & _MOST_SLOTS, value >> 2 & _MOST_SLOTS) if value else None

    def sequences(self) -> Iterator[tuple[Key, SequenceState, int]]:
        """Yields each sequence's key, its state, and when it was admitted (CLOCK_MONOTONIC ns)."""
        words = self._words
        for at in compress(range(_HEADER, len(words), _ENTRY), words[_HEADER::_ENTRY].tolist()):
            low = words[at]
            # High is 0 where the worker died while it overwrote this entry. What stood there stands elsewhere too, or was
            # removed.
            if low and words[at + 1] and words[at + 2] & 3:
                yield (low, words[at + 1]), _STATES[words[at + 2] & 3], words[at + 2] >> 2

    def value(self, key: Key) -> int:
        """Returns the number that the worker has stored in this page under ``key``, or 0 if the page does not have the key.

        ``find`` decodes the number of a sequence, and ``slots`` that of a model version. The module's docstring has the
        encoding.
        """
        low, high = key
        words = self._words
        home = _HEADER + _ENTRY * ((low * self._multiplier & _MASK) >> self._shift)
        while True:
            moves = words[1]
            at = home
            while found := words[at]:
                if found == low and words[at + 1] == high:
                    value = words[at + 2]
                    # The entry may have been overwritten while its value was read.
                    if words[at] == low and words[at + 1] == high and words[1] == moves:
                        return value
                    break
                at += _ENTRY
                if at == self._end:
                    at = _HEADER
            else:
                if words[1] == moves:
                    return 0

    # ---------------------------------------------------------------------------------------------------------- writing

    def admit(self, key: Key, now_ns: int) -> int:
        """Adds a sequence in the state WAITING. Returns when it was admitted (CLOCK_MONOTONIC ns), which identifies it.

        The result may be later than ``now_ns``, because no two sequences have the same time.
        """
        self._last_ns = since_ns = max(self._last_ns + 1, now_ns)
        self._sequences += self._store(key, since_ns << 2 | SequenceState.WAITING)
        return since_ns

    def begin(self, key: Key, since_ns: int) -> None:
        """Sets a sequence's state from WAITING to BEGUN. ``since_ns`` is the time that ``admit`` returned for the sequence.

        Does nothing if the sequence is not WAITING, or if a newer sequence has the same key.
        """
        if self.value(key) == since_ns << 2 | SequenceState.WAITING:
            self._store(key, since_ns << 2 | SequenceState.BEGUN)

    def end(self, key: Key, since_ns: int) -> None:
        """Sets a sequence's state to ENDED, unless a newer sequence with the same key has replaced it.

        ``since_ns`` is the time that ``admit`` returned for the sequence.
        """
        if self.value(key) in (since_ns << 2 | SequenceState.WAITING, since_ns << 2 | SequenceState.BEGUN):
            self._store(key, since_ns << 2 | SequenceState.ENDED)
            self._ended.append((key, since_ns))
            if len(self._ended) > self._most_ended:
                self._forget_ended()

    def settle(self) -> None:
        """Removes all ENDED sequences from the page. Call it once the answers to their requests have left the worker."""
        while self._ended:
            self._forget_ended()

    def _forget_ended(self) -> None:
        key, since_ns = self._ended.popleft()
        if self.value(key) == since_ns << 2 | SequenceState.ENDED:
            self._remove(key)
            self._sequences -= 1

    def publish_slots(self, key: Key, free: int, backlog: int) -> None:
        """Stores how many more sequences of a model version may begin (``free``), and how many wait for that (``backlog``).

        ``key`` is the version's key.
        """
        self._edition = self._edition % _MOST_SLOTS + 1
        if self._models < _MOST_MODELS or self.value(key):
            free, backlog = min(free, _MOST_SLOTS), min(backlog, _MOST_SLOTS)
            self._models += self._store(key, self._edition << 42 | free << 22 | backlog << 2)

    def withdraw_slots(self, key: Key) -> None:
        """Removes a model version from the page. ``key`` is the version's key.

        Fronts then assume that this worker has no free slots for sequences of the version.
        """
        self._models -= self._remove(key)

    def __len__(self) -> int:
        """Returns the number of sequences on the page. Call it only in the process that writes the page."""
        return self._sequences

    def _home(self, low: int) -> int:
        return _HEADER + _ENTRY * ((low * self._multiplier & _MASK) >> self._shift)

    def _next(self, at: int) -> int:
        return _HEADER if at + _ENTRY == self._end else at + _ENTRY

    def _place(self, key: Key) -> int:
        words, at = self._words, self._home(key[0])
        while words[at] and (words[at] != key[0] or words[at + 1] != key[1]):
            at = self._next(at)
        return at

    def _store(self, key: Key, value: int) -> bool:
        """Writes the value of a key. Returns whether the page did not have the key before."""
        words, at = self._words, self._place(key)
        if words[at]:
            words[at + 2] = value
            return False
        words[at + 2] = value
        words[at + 1] = key[1]
        words[at] = key[0]
        return True

    def _remove(self, key: Key) -> bool:
        """Removes a key from the page. Returns whether the page had it."""
        words, hole = self._words, self._place(key)
        if not words[hole]:
            return False
        span, at = self._end - _HEADER, self._next(hole)
        while low := words[at]:
            # An entry may stand anywhere from its home on, and the hole lies there.
            if (at - self._home(low)) % span >= (at - hole) % span:
                words[hole + 1] = 0
                words[hole + 2] = words[at + 2]
                words[hole] = low
                words[hole + 1] = words[at + 1]
                words[1] = words[1] + 1 & _MASK
                hole = at
            at = self._next(at)
        words[1] = words[1] + 1 & _MASK
        words[hole] = 0
        return True

    def __repr__(self) -> str:
        return f"<SequencePage {sum(1 for _ in self.sequences())} sequences>"


#: States by number: looking one up here is cheaper than making the enum's member of it.
_STATES = (SequenceState.WAITING, *SequenceState)
