"""Assigns numbers to prepared requests and answers, so that a part that many of them repeat is sent over a lane only once.

    submitter --> worker      Prepare 7: model, names, datatypes, shapes, regions
                              RequestRecord 7: id, tensors' contents      RequestRecord 7: id, tensors' contents      ...
    worker --> submitter      PrepareAnswer 3: names, datatypes, shapes, regions
                              AnswerRecord 3: id, tensors' contents       AnswerRecord 3: id, tensors' contents       ...

The sender assigns the numbers from 0 to ``MAX_NUMBERS`` - 1, and then starts again from 0. Before it uses a number with a new
meaning on a lane, it sends the meaning over this lane, in a Prepare or PrepareAnswer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from tensord.shm.channel import Channel
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import Parameter, PreparedAnswer, PreparedRequest, PreparedTensor, RequestedOutput
from tensord.shm.record import Record, encoder

#: The most kinds of one sender that have a number at the same time.
MAX_NUMBERS = 1024

#: Bytes that an input or output takes besides its texts and axes, and an axis.
_TENSOR, _AXIS = 256, 40

T = TypeVar("T", PreparedRequest, PreparedAnswer)
R = TypeVar("R")


def memory_of(prepared: PreparedRequest) -> int:
    """Returns about how many bytes of memory a received prepared request takes."""
    tensors: list[PreparedTensor | RequestedOutput] = [*prepared.inputs, *prepared.outputs]
    size = sys.getsizeof
    texts = sum([size(tensor.name) for tensor in tensors]) + size(prepared.model)
    regions = sum([size(tensor.region.region) for tensor in tensors if tensor.region is not None])
    inputs = sum([size(tensor.datatype) + _AXIS * len(tensor.shape) for tensor in prepared.inputs])
    return _TENSOR * len(tensors) + texts + regions + inputs + memory_of_parameters(prepared.parameters)


def memory_of_parameters(parameters: Mapping[str, Parameter]) -> int:
    """Returns about how many bytes of memory the parameters of a request or of a response take."""
    size = sys.getsizeof
    return size(parameters) + sum(map(size, parameters)) + sum(map(size, parameters.values()))


class Numbered(Generic[T]):
    """A prepared request or answer with its number. Compare these objects, not their numbers, because numbers are reused."""

    __slots__ = ("number", "prepared")

    def __init__(self, number: int, prepared: T) -> None:
        self.number = number
        self.prepared: T = prepared

    def __repr__(self) -> str:
        return f"<Numbered {self.number} {type(self.prepared).__name__}>"


#: Takes how many have a number now, and how many lost theirs to the last of them.
OnNumber = Callable[[int, int], object]


class Numbers(Generic[T]):
    """Assigns numbers to one sender's prepared requests or answers. Equal requests or answers have the same number."""

    def __init__(self, on_number: OnNumber | None = None, count: int = MAX_NUMBERS) -> None:
        """Starts with no assigned numbers.

        Args:
          on_number: called after each assignment of a number. The arguments are how many requests or answers have a number now,
            and how many lost their numbers at this assignment.
          count: how many requests or answers may have a number at a time. When one more gets a number, all of them lose theirs.
            If ``count`` is 0, the method ``number_again`` assigns no number.
        """
        self._on_number = on_number
        self._count = count
        self._known: dict[bytes, Numbered[T]] = {}
        #: Came once so far.
        self._once: set[bytes] = set()
        self._next = 0
        #: How many got a number, and how many have lost theirs since.
        self.assigned = 0
        self.evicted = 0

    def number(self, prepared: T) -> Numbered[T]:
        """Returns a prepared request or answer with its number. Assigns a number if it has none."""
        key = encoder.encode(prepared)
        return self._known.get(key) or self._assign(key, prepared)

    def number_again(self, prepared: T) -> Numbered[T] | None:
        """Returns ``prepared`` with a number if an equal request or answer was passed to this method before, else None."""
        key = encoder.encode(prepared)
        known = self._known.get(key)
        if known is not None:
            return known
        if key not in self._once:
            if len(self._once) >= self._count:
                self._once.clear()
            if self._count:
                self._once.add(key)
            return None
        self._once.discard(key)
        return self._assign(key, prepared)

    def _assign(self, key: bytes, prepared: T) -> Numbered[T]:
        evicted = 0
        if len(self._known) >= max(1, self._count):
            evicted = len(self._known)
            self.evicted += evicted
            self._known.clear()
        made = self._known[key] = Numbered(self._next, prepared)
        self._next = (self._next + 1) % MAX_NUMBERS
        self.assigned += 1
        if self._on_number is not None:
            self._on_number(len(self._known), evicted)
        return made

    def __repr__(self) -> str:
        return f"<Numbers {len(self._known)}, {self.assigned} assigned, {self.evicted} evicted>"


class PublishedNumbers(set[Numbered[T]]):
    """A set of prepared requests or answers. ``publish`` adds one, and sends its number to the other end of a lane."""

    def __init__(self, channel: Channel, record: Callable[[int, T], Record]) -> None:
        """Starts as an empty set. ``publish`` sends what ``record`` returns for a number and its request or answer."""
        self._channel = channel
        self._record: Callable[[int, T], Record] = record
        self._numbers: dict[int, Numbered[T]] = {}
        #: How often a number came to stand for something else.
        self.renumbered = 0

    def publish(self, numbered: Numbered[T]) -> None:
        """Adds ``numbered`` to this set. Queues a record that tells the other end of the lane what the number stands for."""
        self._channel.put(self._record(numbered.number, numbered.prepared))
        former = self._numbers.get(numbered.number)
        if former is not None:
            self.discard(former)
            self.renumbered += 1
        self._numbers[numbered.number] = numbered
        self.add(numbered)


class ReceivedNumbers(dict[int, R]):
    """Maps numbers of prepared requests or answers to what ``learn`` stored. An unknown number raises InvalidArgument."""

    __slots__ = ()

    def learn(self, number: int, meaning: R) -> None:
        """Stores ``meaning`` under ``number``. Raises InvalidArgument unless ``number`` is at least 0 and below MAX_NUMBERS."""
        if not 0 <= number < MAX_NUMBERS:
            raise InvalidArgument(f"number {number} was prepared, numbers are below {MAX_NUMBERS}")
        self[number] = meaning

    def __missing__(self, number: int) -> R:
        raise InvalidArgument(f"number {number} was never prepared")
