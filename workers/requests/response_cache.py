"""The response cache of a worker: stores answers, and finds them again for later requests with equal cache keys.

All models whose configuration enables the response cache share it. Two requests have equal keys if they are for the same load
of a model, the same outputs and the same values of the model's parameters, and if their inputs are equal byte for byte. Custom
parameters of the requests do not count. The cache copies all outputs that somebody could change. If the cache is full, it
removes the least recently used answers.
"""

from __future__ import annotations

import enum
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tensord.shm.arrays import Array, Strings, byte_content
from tensord.shm.prepared import memory_of_parameters
from tensord.workers.requests.result import Response

#: The bytes that an entry counts besides its tensors: many small answers must not hold more memory than was asked for.
ENTRY_BYTE_SIZE = 1024
_DIGEST_BYTE_SIZE = 32


class Question(NamedTuple):
    """A key of the response cache: everything in a request on which its answer depends. Equal keys have the same answer."""

    #: The BLAKE2b digest of the names of the requested outputs and of all inputs with their bytes.
    digest: bytes
    #: Stands for the load of the model version that is asked: another load may answer differently.
    load: object
    #: Stands for the parameters that it is asked with, of a model or of an ensemble's models, and for the loads of these.
    parameters: tuple[object, ...]

    @classmethod
    def of(
        cls, load: object, outputs: Sequence[str], arrays: Mapping[str, Array], parameters: tuple[object, ...] = ()
    ) -> Question:
        """Returns the cache key of a request with the inputs ``arrays``, by name.

        ``load``: an object that stands for this load of the model version. ``outputs``: the names of requested outputs; empty if
        the answer does not depend on them. ``parameters``: a value that identifies the parameters with which the model computes.
        """
        digest = hashlib.blake2b(repr(sorted(outputs)).encode(), digest_size=_DIGEST_BYTE_SIZE)
        for name, array in sorted(arrays.items()):
            content = _content(array)
            digest.update(repr((name, array.dtype.str, array.shape, len(content))).encode())
            digest.update(content.data)
        return cls(digest.digest(), load, parameters)


class Insertion(enum.Enum):
    """The outcome of an attempt to store an answer in the response cache."""

    KEPT = enum.auto()
    #: Its question was answered meanwhile.
    KNOWN = enum.auto()
    TOO_LARGE = enum.auto()


class _CachedAnswer(NamedTuple):
    answer: Response
    byte_size: int


class ResponseCache:
    """Stores answers by the requests' inputs, up to a number of bytes. Only the thread of the worker's loop may use it.

    An entry counts the bytes of its outputs, the memory of the response's parameters, and ``ENTRY_BYTE_SIZE``.
    """

    def __init__(self, max_byte_size: int) -> None:
        #: The bytes that all entries together may take; 0: there is no cache.
        self.max_byte_size = max_byte_size
        #: The bytes that all entries together take.
        self.byte_size = 0
        #: The answers, least recently used first.
        self._entries: OrderedDict[Question, _CachedAnswer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, question: Question) -> Response | None:
        """Returns the stored answer for a cache key; None: no answer is stored. The caller must not change the answer."""
        entry = self._entries.get(question)
        if entry is None:
            return None
        self._entries.move_to_end(question)
        return entry.answer

    def insert(self, question: Question, answer: Mapping[str, Array]) -> Insertion:
        """Stores a copy of the answer for a cache key. To make room, removes the answers that were not used for longest.

        Returns KEPT, KNOWN (an answer for the key is stored already) or TOO_LARGE (the answer is larger than the whole cache).
        """
        if question in self._entries:
            return Insertion.KNOWN
        parameters = dict(answer.parameters) if isinstance(answer, Response) else {}
        byte_size = ENTRY_BYTE_SIZE + sum(map(_byte_size, answer.values()))
        if parameters:
            byte_size += memory_of_parameters(parameters)
        if byte_size > self.max_byte_size:
            return Insertion.TOO_LARGE
        while self.byte_size + byte_size > self.max_byte_size:
            self._remove(next(iter(self._entries)))
        outputs = {name: private(array) for name, array in answer.items()}
        self._entries[question] = _CachedAnswer(Response(outputs, parameters), byte_size)
        self.byte_size += byte_size
        return Insertion.KEPT

    def forget(self, load: object) -> None:
        """Removes the cached answers of a model version that was unloaded or replaced.

        ``load``: the object that each cache key (``Question``) of this version has in its field ``load``.
        """
        for question in [question for question in self._entries if question.load is load]:
            self._remove(question)

    def _remove(self, question: Question) -> None:
        self.byte_size -= self._entries.pop(question).byte_size

    def __repr__(self) -> str:
        return f"<ResponseCache {len(self._entries)} answers, {self.byte_size} of {self.max_byte_size} bytes>"


def _content(array: Array) -> Array:
    if array.dtype.kind == "O":
        return np.frombuffer(byte_content(array), np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _byte_size(array: Array) -> int:
    # An array of objects knows only the size of its pointers.
    return len(byte_content(array)) if array.dtype.kind == "O" else array.nbytes


def private(array: Array) -> Array:
    """Returns a read-only copy of an array, or the array itself if nobody can write to it."""
    if isinstance(array, Strings):
        return array
    made = np.array(array)
    made.flags.writeable = False
    return made
