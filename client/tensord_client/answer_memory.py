"""Makes answers for the caller from the messages of a worker.

The outputs of an answer can lie in the worker's memory, which this process maps read-only. As long as anything refers to these
outputs, an ``AnswerLease`` keeps the worker from using the memory again. Afterwards this process tells the worker that the
memory is free.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tensord_client.common.arrays import array_at, decode, decode_strings, dtype_of
from tensord_client.common.datatypes import DATATYPES
from tensord_client.common.mapping import mapped
from tensord_client.common.results import Answer, Array, check_place, written
from tensord_client.errors import DeadlineExceeded, Internal, ResultsHeld, ServingError, Unavailable, from_code
from tensord_client.native import wire

if TYPE_CHECKING:
    from tensord_client._lane import AnswerRecord, OutputTensor

#: The segment, offset and generation of a lease.
LeaseKey = tuple[int, int, int]
_RELEASES, _RELEASED_PART = 16, 8
#: The datatypes of fixed size.
_NUMBERS = DATATYPES.keys() - {"BYTES"}
#: How a worker's error begins when its response memory had no room for an answer.
_NO_ROOM = "no room for an answer of "


class PreparedAnswer:
    """The constant part of many answers: version, outputs, parameters, and whether the answer is its request's last."""

    __slots__ = ("final", "is_mark", "outputs", "own_count", "parameters", "plan", "version")

    def __init__(
        self, version: int, outputs: tuple[OutputTensor, ...], parameters: dict[str, Any], final: bool
    ) -> None:
        self.version = version
        self.outputs = outputs
        self.parameters = parameters
        self.final = final
        #: How many outputs have their contents in the answer's record or in leased memory.
        self.own_count = sum([not output.placed for output in outputs])
        #: True: a record without an error is no response, and only says that no further response comes.
        self.is_mark = final and not (version or outputs)
        #: (name, shape, dtype, the content's byte size in the answer's record; -1: it lies in the caller's array) of each
        #: output; empty where an output is BYTES, or of a datatype that nobody knows.
        self.plan: tuple[tuple[str, tuple[int, ...], np.dtype[Any], int], ...] = ()
        if all([output.datatype in _NUMBERS for output in outputs]):  # noqa: C419  # a generator costs more
            planned = [(output.name, output.shape, dtype_of(output.datatype), output.placed) for output in outputs]
            self.plan = tuple(
                [
                    (name, shape, kind, -1 if lies else math.prod(shape) * kind.itemsize)
                    for name, shape, kind, lies in planned
                ]
            )


class HeldResults:
    """Counts the answers in workers' memory that this process still uses, on all lanes. Thread-safe."""

    def __init__(self, most: int) -> None:
        """Starts to count at 0. ``most``: the most answers in workers' memory that this process may use at a time."""
        self.most = most
        #: The bytes of each answer, by the memory of its lane and the key of its lease.
        self.sizes: dict[tuple[AnswerMemory, LeaseKey], int] = {}

    def too_many(self) -> ResultsHeld | None:
        """Returns an error if this process holds ``self.most`` answers in workers' memory, else None."""
        held = len(self.sizes)
        return ResultsHeld(held, self.most) if held >= self.most else None


class AnswerLease:
    """The lease of the worker's memory that the outputs of one answer lie in.

    The lease ends once nothing refers to this object. Each array that ``view`` returns refers to this object.
    """

    __slots__ = ("__array_interface__", "_key", "_memory", "_segment")

    def __init__(self, memory: AnswerMemory, key: LeaseKey, segment: ResponseSegment) -> None:
        self._memory = memory
        #: The lease's key; whoever gives the lease back removes it, so that this happens once.
        self._key = [key]
        self._segment = segment

    def hold(self, byte_size: int) -> None:
        """Adds this answer's ``byte_size`` to the bytes of answers that this process holds. ``release`` subtracts them again."""
        for key in self._key:
            self._memory.held.sizes[self._memory, key] = byte_size

    def release(self) -> None:
        """Ends this lease, and tells the worker now or with a later message that the leased memory is free. Idempotent."""
        try:
            key = self._key.pop()
        except IndexError:
            return
        self._memory.held.sizes.pop((self._memory, key), None)
        self._memory.give_back(key, self._segment.byte_size if key[0] else 0)

    __del__ = release

    def view(self, place: Sequence[Any], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns a read-only array on the leased memory, without a copy. The array keeps this lease alive.

        ``place`` is the number of the segment, the offset in it, and the number of bytes. Raises ValueError if the place is not
        inside the lease's segment, or has another size than the shape and dtype need.
        """
        segment, offset, byte_size = place
        if segment != self._segment.number or math.prod(shape) * dtype.itemsize != byte_size:
            raise ValueError(f"{byte_size} bytes in segment {segment} are no {dtype}{list(shape)}")
        if offset < 0 or offset + byte_size > self._segment.byte_size:
            raise ValueError(
                f"offset {offset} and {byte_size} bytes leave a segment of {self._segment.byte_size} bytes"
            )
        return array_at(self._segment.address + offset, shape, dtype, self, read_only=True)


class ResponseSegment:
    """A worker's segment that answers lie in. It is mapped read-only as long as anything refers to this object."""

    __slots__ = ("_bytes", "address", "byte_size", "number")

    def __init__(self, number: int, byte_size: int, fd: int) -> None:
        """Maps ``fd``, which the caller must close. Raises OSError or ValueError if ``fd`` cannot be mapped."""
        self._bytes = np.frombuffer(mapped(fd, byte_size, mmap.PROT_READ), np.uint8)
        self.number = number
        self.byte_size = byte_size
        self.address: int = self._bytes.__array_interface__["data"][0]


class AnswerMemory:
    """The memory of one worker that answers lie in. Thread-safe."""

    def __init__(self, held: HeldResults, byte_size: int, release: Callable[[], None]) -> None:
        """Starts without answers, for one new lane to a worker.

        Args:
          held: counts the answers that this process uses.
          byte_size: the most bytes that answers on this lane may have together.
          release: a method of the lane that tells the worker which answers are no longer used. Only a weak reference to it is
            kept. Any thread may call it, also during a garbage collection.
        """
        self.held = held
        self._byte_size = byte_size
        self._release_at = max(1, byte_size // _RELEASED_PART)
        self._release = weakref.WeakMethod(release)
        self.segments: dict[int, ResponseSegment] = {}
        self._refused: set[int] = set()
        #: Leases that are to be given back, and the bytes that they stand for.
        self.releases: deque[LeaseKey] = deque()
        self._released = 0
        self._ended = False

    def open(self, number: int, byte_size: int, fds: Sequence[int], lost: bool) -> bool:
        """Maps a segment that the worker has announced. Returns False if that failed. The caller must then tell the worker.

        Args:
          number: the worker's number of the segment.
          fds: the file descriptors that came with the announcement.
          lost: whether the kernel dropped descriptors, because this process may open no more.

        Raises: ValueError: ``fds`` does not have exactly one descriptor, although none was lost.
        """
        if len(fds) != 1 and not lost:
            raise ValueError(f"a segment came with {len(fds)} descriptors")
        try:
            (fd,) = fds
            self.segments[number] = ResponseSegment(number, byte_size, fd)
        except (OSError, ValueError):
            self._refused.add(number)
            return False
        self._refused.discard(number)
        return True

    def close(self, number: int) -> None:
        """Forgets segment ``number``, which the worker has closed. Arrays in the segment stay valid."""
        self.segments.pop(number, None)
        self._refused.discard(number)

    def explained(self, error: ServingError) -> ServingError:
        """Returns ResultsHeld if this process's answers fill the worker's memory and caused ``error``. Else returns ``error``."""
        # A copy: before Python 3.12 a garbage collection may begin inside a loop over the items, and end a lease that is counted.
        held = self.held.sizes.copy().items()
        here = [size for (each, _), size in held if each is self]
        is_full = isinstance(error, DeadlineExceeded) and here and sum(here) + max(here) > self._byte_size
        if not (held and (is_full or error.message.startswith(_NO_ROOM))):
            return error
        return ResultsHeld(len(held), self.held.most, sum(size for _, size in held), error.message)

    def judged(self, answer: AnswerRecord) -> tuple[AnswerRecord, AnswerLease | None] | ServingError:
        """Returns an answer with its lease, or an error to raise instead.

        The lease is None if the outputs do not lie in the worker's memory. The error is returned if the answer is an error,
        is malformed, or lies in memory that this process could not map.
        """
        lease: AnswerLease | None = None
        error: ServingError | None = None
        if answer.lease is not None:
            number = answer.lease[0]
            segment = self.segments.get(number)
            if segment is not None:
                lease = AnswerLease(self, answer.lease, segment)
            elif number in self._refused:
                self.give_back(answer.lease, 0)
                why = "this process has as many files open, or as much mapped, as it may"
                error = Unavailable(f"an answer cannot be reached: {why}")
            else:
                error = Internal(f"the worker's answer is malformed: segment {number} is not open")
        if answer.code:
            error = self.explained(from_code(answer.code, answer.message))
        return (answer, lease) if error is None else error

    def drop(self, answer: AnswerRecord) -> None:
        """Gives the memory of an answer back to the worker, because nobody waits for the answer any more."""
        if answer.lease is not None:
            self.give_back(answer.lease, 0)

    def give_back(self, key: LeaseKey, byte_size: int) -> None:
        """Queues a lease to be given back to the worker, and sends the queue if it has enough leases or bytes.

        ``byte_size`` is the size of the leased memory. The garbage collector may call this at any moment.
        """
        if self._ended:
            return
        self.releases.append(key)
        self._released += byte_size
        if len(self.releases) >= _RELEASES or self._released >= self._release_at:
            release = self._release()
            if release is not None:
                release()

    def release_record(self) -> bytes:
        """Takes leases out of the queue of ``give_back``, and returns a message that gives these leases to the worker.

        The caller must send the message. It has as many leases as fit, and is b"" if the queue is empty.
        """
        if not self.releases:
            return b""
        leases: list[LeaseKey] = []
        while self.releases and len(leases) < wire.MAX_RELEASES:
            leases.append(self.releases.popleft())
        self._released = 0
        return wire.release(leases)

    def end(self) -> None:
        """Forgets all segments, because the lane has ended. Arrays in the segments stay valid."""
        self._ended = True
        self.segments.clear()


def made_answer(record: AnswerRecord, lease: AnswerLease | None, places: Any) -> Answer:
    """Makes an ``Answer`` from a worker's message.

    If ``places`` has an array for an output, the output is in that array. Any other output is a read-only view if the output
    lies in the worker's memory, and a copy otherwise. Strings are always copied. If an output is a view, the answer keeps
    ``lease`` alive, and ``HeldResults`` counts the answer.

    Args:
      lease: the lease of the worker's memory that the outputs lie in, or None if they do not lie there.
      places: output name -> the caller's array for the output. The output is copied to it unless the worker wrote to it.

    Raises: ValueError, LookupError, TypeError: the record is malformed.  InvalidArgument: an output has another shape or dtype
      than the caller's array for it.
    """
    answer = Answer()
    prepared = record.prepared
    answer.version = prepared.version
    if prepared.parameters:
        answer.parameters = prepared.parameters
    answer.times = record.timing
    if prepared.plan and wire.arrays(answer, prepared.plan, record.contents, places):
        return answer
    contents = iter(record.contents)
    views: list[Array] = []
    for output in prepared.outputs:
        if output.placed:
            answer[output.name] = place = places[output.name]
            check_place(output.name, output.shape, dtype_of(output.datatype), place)
            continue
        content = next(contents)
        if type(content) is bytes:
            answer[output.name] = decode(bytearray(content), output.datatype, output.shape)
        elif lease is None:
            raise ValueError(f"output '{output.name}' lies in no lease")
        elif output.datatype == "BYTES":
            encoded = lease.view(content, (content[2],), np.dtype(np.uint8))
            answer[output.name] = decode_strings(encoded, output.shape)
        else:
            array = answer[output.name] = lease.view(content, output.shape, dtype_of(output.datatype))
            if output.name not in places:
                views.append(array)
    written(answer, places)
    if views and lease is not None:
        lease.hold(sum([array.nbytes for array in views]))
        answer.lease = lease
    return answer
