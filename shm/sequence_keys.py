"""The keys of sequences: 128 bits that stand for a model version and a sequence id, the same in every process.

If two sequences have the same key by chance, a request may be sent to the wrong worker. The worker compares whole ids, so the
request fails, and never gets another sequence's state.
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
    """Makes the keys of 128 bits by which a sequence page lists one model version's sequences.

    Every loading of the version has the same keys: when it is loaded again, its sequences go on in the loading they began in.
    """

    __slots__ = ("_digest", "_known", "slots")

    def __init__(self, model: str, version: int) -> None:
        self._digest = blake2b(repr((model, version)).encode("utf-8", "surrogatepass"), digest_size=16)
        #: The key of the model version itself.
        self.slots = _halves(self._digest.digest())
        self._known: dict[SequenceId, Key] = {}

    def key(self, sequence: SequenceId) -> Key:
        """Returns the key of the sequence with this id. The ids 5 and "5" are two sequences."""
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
