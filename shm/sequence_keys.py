"""The keys of sequences: 128 bits that stand for a model version and a correlation id, the same in every process.

A sequence that shares its key with another one by chance is sent to a wrong worker, which compares whole ids: that costs an
error, never another's state.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct

from tensord.shm.messages import SequenceId

#: Neither half of a key is 0.
Key = tuple[int, int]
_HALVES = Struct("<QQ")
#: Keys are cached: a sequence has many requests, and a key costs as much as looking for it on two pages.
_MOST_KNOWN = 4096


class SequenceKeys:
    """Makes the keys of one model version. A reload has the same keys: a sequence goes on in the load that it began in."""

    __slots__ = ("_digest", "_known", "slots")

    def __init__(self, model: str, version: int) -> None:
        self._digest = blake2b(repr((model, version)).encode("utf-8", "surrogatepass"), digest_size=16)
        #: The key of the model version itself.
        self.slots = _halves(self._digest.digest())
        self._known: dict[SequenceId, Key] = {}

    def key(self, sequence: SequenceId) -> Key:
        """Returns the key of a sequence. A number and the string of its digits are two sequences."""
        key = self._known.get(sequence)
        if key is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            key = self._known[sequence] = self._key(sequence)
        return key

    def _key(self, sequence: SequenceId) -> Key:
        digest = self._digest.copy()
        if isinstance(sequence, str):
            digest.update(b"'" + sequence.encode("utf-8", "surrogatepass"))
        else:
            digest.update(b"#%d" % sequence)
        return _halves(digest.digest())


def _halves(digest: bytes) -> Key:
    low, high = _HALVES.unpack(digest)
    return low or 1, high or 1
