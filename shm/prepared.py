"""Numbers for what requests, or answers, of one kind have in common: it is sent once on a lane, and its number with each of them.

    submitter                                                          worker
    Prepare 7: model, names, datatypes, shapes, regions       ──▶      what was found when the first one was validated
    RequestRecord 7: id, bytes   RequestRecord 7: id, slice   ──▶      ids, moments, priority, timeout, sequence: its own
                                                       ◀──      PrepareAnswer 3: names, datatypes, shapes, regions
                                                       ◀──      AnswerRecord 3: id, bytes   ...

A client asks the same again and again, with other tensors. Whoever sends gives the numbers, and after ``MAX_NUMBERS`` begins
again at 0; a lane is told what a number stands for whenever it last stood for something else. Records are read in the order in
which they were sent, so a number means what was said of it last. What does not repeat itself gets no number and travels inside
its record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from tensord.shm.channel import Channel
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import PreparedAnswer, PreparedRequest
from tensord.shm.record import Record, encoder

#: As many kinds of one sender have a number at the same time.
MAX_NUMBERS = 1024

T = TypeVar("T", PreparedRequest, PreparedAnswer)
R = TypeVar("R")


class Numbered(Generic[T]):
    """One kind. Two of them may have the same number, one after the other: what tells them apart is the object."""

    __slots__ = ("number", "prepared")

    def __init__(self, number: int, prepared: T) -> None:
        self.number = number
        self.prepared: T = prepared

    def __repr__(self) -> str:
        return f"<Numbered {self.number} {type(self.prepared).__name__}>"


#: Takes how many have a number now, and how many lost theirs to the last of them.
OnNumber = Callable[[int, int], object]


class Numbers(Generic[T]):
    """Gives the numbers of one sender: equal ones get the same."""

    def __init__(self, on_number: OnNumber | None = None, count: int = MAX_NUMBERS) -> None:
        """``count``: so many have a number at the same time; 0: none of those that need not have one."""
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
        """Returns it with its number."""
        key = encoder.encode(prepared)
        return self._known.get(key) or self._assign(key, prepared)

    def number_again(self, prepared: T) -> Numbered[T] | None:
        """Returns it with its number. None: it came for the first time, and many never come again."""
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
    """The numbers that the other end of a lane was told, and that still stand for the same there."""

    def __init__(self, channel: Channel, record: Callable[[int, T], Record]) -> None:
        """``record``: Prepare or PrepareAnswer."""
        self._channel = channel
        self._record: Callable[[int, T], Record] = record
        self._numbers: dict[int, Numbered[T]] = {}
        #: How often a number came to stand for something else.
        self.renumbered = 0

    def publish(self, numbered: Numbered[T]) -> None:
        """Queues what a number stands for; before the first record that names it. Only where it is not in here."""
        self._channel.put(self._record(numbered.number, numbered.prepared))
        former = self._numbers.get(numbered.number)
        if former is not None:
            self.discard(former)
            self.renumbered += 1
        self._numbers[numbered.number] = numbered
        self.add(numbered)


class ReceivedNumbers(dict[int, R]):
    """Holds what the numbers of the other end of a lane stand for, as their reader has understood it."""

    __slots__ = ()

    def learn(self, number: int, meaning: R) -> None:
        """Raises InvalidArgument: no sender numbers like that."""
        if not 0 <= number < MAX_NUMBERS:
            raise InvalidArgument(f"number {number} was prepared, numbers are below {MAX_NUMBERS}")
        self[number] = meaning

    def __missing__(self, number: int) -> R:
        raise InvalidArgument(f"number {number} was never prepared")
