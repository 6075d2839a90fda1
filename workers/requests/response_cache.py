"""The response cache of a worker: stores answers, and finds them again for later requests with equal cache keys.

All models whose configuration enables the response cache share it. Two requests have equal keys if they are for the same load
of a model, the same outputs and the same values of the model's parameters, and if their inputs are equal byte for byte. Custom
parameters of the requests do not count. The cache copies all arrays that somebody could change. If the cache is full, it
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
_DIGEST_BYTE_SIZE = 16


class Input(NamedTuple):
    """One input tensor in a key of the response cache."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    #: Its bytes; BYTES as they are on the wire.
    content: Array

    def same(self, other: Input) -> bool:
        """Returns whether both inputs have the same name, datatype, shape and bytes."""
        return self[:3] == other[:3] and np.array_equal(self.content, other.content)


class Question(NamedTuple):
    """A key of the response cache: everything in a request on which its answer depends."""

    digest: bytes
    #: Stands for the load of the model version that is asked: another load may answer differently.
    load: object
    #: Stands for the parameters that it is asked with, of a model or of an ensemble's models, and for the loads of these.
    parameters: tuple[object, ...]
    #: The outputs that the model was asked for, sorted; empty: all, or the model does not see them.
    outputs: tuple[str, ...]
    #: Sorted by name.
    inputs: tuple[Input, ...]

    @classmethod
    def of(
        cls, load: object, outputs: Sequence[str], arrays: Mapping[str, Array], parameters: tuple[object, ...] = ()
    ) -> Question:
        """Returns the cache key of a request. The key does not copy ``arrays``, the inputs by name.

        ``load``: an object that stands for this load of the model version. ``outputs``: the names of requested outputs; empty if
        the answer does not depend on them. ``parameters``: a value that identifies the parameters with which the model computes.
        """
        wanted = tuple(sorted(outputs))
        digest = hashlib.blake2b(repr((id(load), hash(parameters), wanted)).encode(), digest_size=_DIGEST_BYTE_SIZE)
        inputs: list[Input] = []
        for name in sorted(arrays):
            array = arrays[name]
            each = Input(name, array.dtype.str, array.shape, _content(array))
            digest.update(repr((*each[:3], len(each.content))).encode())
            digest.update(each.content.data)
            inputs.append(each)
        return cls(digest.digest(), load, parameters, wanted, tuple(inputs))

    def same(self, other: Question) -> bool:
        """Returns whether this cache key equals ``other``. Requests with equal keys have the same answer."""
        if self.load is not other.load or self.parameters != other.parameters:
            return False
        if self.outputs != other.outputs or len(self.inputs) != len(other.inputs):
            return False
        return all(one.same(two) for one, two in zip(self.inputs, other.inputs, strict=True))

    @property
    def byte_size(self) -> int:
        """Returns how many bytes the inputs in this cache key have together."""
        return sum(each.content.nbytes for each in self.inputs)


class Insertion(enum.Enum):
    """The outcome of an attempt to store an answer in the response cache."""

    KEPT = enum.auto()
    #: Its question was answered meanwhile.
    KNOWN = enum.auto()
    TOO_LARGE = enum.auto()


class _CachedAnswer(NamedTuple):
    question: Question
    answer: Response
    byte_size: int


class ResponseCache:
    """Stores answers by the requests' inputs, up to a number of bytes. Only the thread of the worker's loop may use it.

    An entry counts the bytes of its inputs and outputs, the memory of the response's parameters, and ``ENTRY_BYTE_SIZE``.
    """

    def __init__(self, max_byte_size: int) -> None:
        #: The bytes that all entries together may take; 0: there is no cache.
        self.max_byte_size = max_byte_size
        #: The bytes that all entries together take.
        self.byte_size = 0
        #: The answers by digest, least recently used first.
        self._entries: OrderedDict[bytes, _CachedAnswer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, question: Question) -> Response | None:
        """Returns the stored answer for a cache key; None: no answer is stored. The caller must not change the answer."""
        entry = self._entries.get(question.digest)
        if entry is None or not entry.question.same(question):
            return None
        self._entries.move_to_end(question.digest)
        return entry.answer

    def insert(self, question: Question, answer: Mapping[str, Array]) -> Insertion:
        """Stores a copy of the answer for a cache key. To make room, removes the answers that were not used for longest.

        Returns KEPT, KNOWN (an answer for the key is stored already) or TOO_LARGE (the answer is larger than the whole cache).
        """
        known = self._entries.get(question.digest)
        if known is not None and known.question.same(question):
            return Insertion.KNOWN
        parameters = dict(answer.parameters) if isinstance(answer, Response) else {}
        byte_size = ENTRY_BYTE_SIZE + question.byte_size + sum(map(_byte_size, answer.values()))
        if parameters:
            byte_size += memory_of_parameters(parameters)
        if byte_size > self.max_byte_size:
            return Insertion.TOO_LARGE
        if known is not None:
            self._remove(question.digest)
        while self.byte_size + byte_size > self.max_byte_size:
            self._remove(next(iter(self._entries)))
        copies = tuple([each._replace(content=each.content.copy()) for each in question.inputs])
        kept = question._replace(inputs=copies)
        outputs = {name: private(array) for name, array in answer.items()}
        self._entries[question.digest] = _CachedAnswer(kept, Response(outputs, parameters), byte_size)
        self.byte_size += byte_size
        return Insertion.KEPT

    def forget(self, load: object) -> None:
        """Removes the cached answers of a model version that was unloaded or replaced.

        ``load``: the object that each cache key (``Question``) of this version has in its field ``load``.
        """
        for digest in [digest for digest, entry in self._entries.items() if entry.question.load is load]:
            self._remove(digest)

    def _remove(self, digest: bytes) -> None:
        self.byte_size -= self._entries.pop(digest).byte_size

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
