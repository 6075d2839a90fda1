"""Limits the memory that the pushed parameter sets of all models take on a worker's device.

A set that a batch needs stays on the device, or is brought back. If there is no room, the least recently used set leaves the
device. A set that is being pushed never leaves. A model's ``main`` leaves only if the model's configuration says that
parameters are loaded on demand. A set that has left a GPU lies in page-locked host memory, as far as
``workers.pinned_byte_size`` allows, so that it comes back faster.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import weakref
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple

from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.workers.devices.pinned_memory import PinnedBudget

if TYPE_CHECKING:
    from tensord.workers.parameters.parameter_set import ParameterSet
    from tensord.workers.parameters.set_stack import SetStack

#: Entries of the heap that are out of date, beyond as many as there are sets, before they are removed.
_MAX_OUT_OF_DATE = 64


class _Resident(NamedTuple):
    """An entry of the heap of parameter sets on the device. The heap orders them by their last use."""

    #: When the set was last used, as far as the heap knows: by then or later.
    used: int
    #: Tells the entries of one set apart, and orders those with the same ``used``.
    number: int
    set: weakref.ref[ParameterSet]


class DeviceRoom:
    """Limits the bytes that parameter sets take on a device, by evicting sets.

    The ``main`` with which a model was loaded does not count, unless the model loads parameters on demand. Any thread may use
    this object, but only the thread of the worker's event loop may call ``keep`` and ``forget``.
    """

    def __init__(self, byte_size: int, pinned: PinnedBudget | None = None) -> None:
        """Makes an object that limits a device's memory for parameter sets. No set is on the device yet.

        Args:
          byte_size: the most bytes that all sets together may take on the device.
          pinned: the page-locked memory for sets that have left the device. If it is None, there is no page-locked memory.
        """
        self._limit = byte_size
        self.pinned = pinned or PinnedBudget(0)
        self.lock = threading.RLock()
        #: The sets that are on the device: the bytes of each, and the number of its entry in the heap ``_order``. A set that
        #: nothing else refers to any more is noted in ``_gone``, by whichever thread drops it.
        self._resident: dict[weakref.ref[ParameterSet], tuple[int, int]] = {}
        self._gone: deque[weakref.ref[ParameterSet]] = deque()
        self._taken = 0
        #: A heap, least recently used first. An entry is out of date if its set was used since, or is not resident by its number.
        self._order: list[_Resident] = []
        self._numbers = itertools.count()
        #: The stacks of models whose batches mix sets.
        self._stacks: weakref.WeakSet[SetStack] = weakref.WeakSet()
        self._uses = itertools.count(1)
        #: Sets that are not in use any more and are kept in the host's memory, oldest first.
        self._former: OrderedDict[ParameterSet, None] = OrderedDict()

    def use(self) -> int:
        """Returns a number for one use of a parameter set. Each call returns a higher number than all earlier calls.

        The caller stores the number in the set's ``used``. The set with the lowest number is evicted first, if it may leave.
        """
        return next(self._uses)

    @property
    def byte_size(self) -> int:
        """The number of bytes that all parameter sets take on the device now."""
        with self.lock:
            self._forget_gone()
            return self._taken + self._stacked

    @property
    def _stacked(self) -> int:
        return sum([each.byte_size for each in self._stacks])

    def join_stack(self, stack: SetStack, model: str) -> None:
        """Reserves device memory for ``stack``. Raises InvalidArgument: all stacks together would exceed the device's limit."""
        with self.lock:
            taken = self._stacked
            if taken + stack.byte_size > self._limit:
                others = f" beside {taken} of others" if taken else ""
                raise InvalidArgument(
                    f"model '{model}': {stack.slots} parameter sets side by side (resident_sets) have {stack.byte_size} "
                    f"bytes{others}, workers.parameter_byte_size allows {self._limit}"
                )
            self._stacks.add(stack)

    def leave_stack(self, stack: SetStack) -> None:
        """Gives back the device memory that ``join_stack`` reserved for the parameter sets in ``stack``. May be called again."""
        with self.lock:
            self._stacks.discard(stack)

    def admit(self, parameters: ParameterSet) -> None:
        """Counts the memory of a set that is about to be copied to the device. Evicts other sets if there is no room.

        The caller must hold ``lock``.
        Raises Unavailable: the sets that cannot leave the device take too much memory.
        """
        self._forget_gone()
        self.left(parameters)
        needed = parameters.placed_byte_size
        if needed and self._taken + self._stacked + needed > self._limit:
            self._make_room(self._limit - self._stacked - needed)
            if (taken := self._taken + self._stacked) + needed > self._limit:
                raise Unavailable(
                    f"{parameters} has {needed} bytes beside {taken} of other sets that stay on the device, "
                    f"workers.parameter_byte_size allows {self._limit}"
                )
        entry = _Resident(parameters.used, next(self._numbers), weakref.ref(parameters, self._gone.append))
        self._resident[entry.set] = needed, entry.number
        self._taken += needed
        heapq.heappush(self._order, entry)
        if len(self._order) > 2 * len(self._resident) + _MAX_OUT_OF_DATE:
            self._order = [each for each in self._order if self._resident.get(each.set, (0, -1))[1] == each.number]
            heapq.heapify(self._order)

    def _make_room(self, limit: int) -> None:
        """Evicts the least recently used sets until sets on the device take at most ``limit`` bytes, if this is possible."""
        stay: list[_Resident] = []
        while self._taken > limit and self._order:
            entry = heapq.heappop(self._order)
            each = entry.set()
            if each is None or self._resident.get(entry.set, (0, -1))[1] != entry.number:
                continue
            if each.used > entry.used:
                # It goes where it belongs by now, and comes up again if it is still among the first.
                heapq.heappush(self._order, entry._replace(used=each.used))
            elif each.may_leave:
                each.evict()
                each.sets.evictions += 1
            else:
                stay.append(entry)
        for entry in stay:
            heapq.heappush(self._order, entry)

    def keep(self, parameters: ParameterSet) -> None:
        """Keeps a replaced set in memory for the rollback of a push.

        If the kept sets together have more bytes than sets may take on the device, drops the oldest ones, perhaps also this.
        """
        self._former[parameters] = None
        while sum([each.byte_size for each in self._former]) > self._limit:
            oldest, _ = self._former.popitem(last=False)
            oldest.sets.forget_before(oldest)

    def forget(self, parameters: ParameterSet) -> None:
        """Removes a set from the sets that ``keep`` has kept. Does nothing if ``keep`` has not kept this set."""
        self._former.pop(parameters, None)

    def left(self, parameters: ParameterSet) -> None:
        """Stops counting the memory of a set that has left the device. The caller must hold ``lock``."""
        self._taken -= self._resident.pop(weakref.ref(parameters), (0, 0))[0]

    def _forget_gone(self) -> None:
        while self._gone:
            self._taken -= self._resident.pop(self._gone.popleft(), (0, 0))[0]

    def __repr__(self) -> str:
        return f"<DeviceRoom {self.byte_size} of {self._limit} bytes>"
