"""The room that pushed parameters have on a worker's device, all models' together.

What is asked stays, or comes back; the set that was not asked for the longest time leaves for it. ``main`` of a model never
leaves, nor does what is staged. What has left a GPU lies in page-locked host memory, as far as there is some
(``workers.pinned_byte_size``), and comes back at the speed of the bus.
"""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.workers.devices.pinned_budget import PinnedBudget

if TYPE_CHECKING:
    from tensord.workers.parameters.parameter_set import ParameterSet
    from tensord.workers.parameters.set_stack import SetStack


class DeviceRoom:
    """Counts the pushed sets that are on a device. Any thread may use it; ``lock`` is held while sets come and leave."""

    def __init__(self, byte_size: int, pinned: PinnedBudget | None = None) -> None:
        """``byte_size``: what all of them may take. ``pinned``: what may be page-locked of those that leave; None: nothing."""
        self._limit = byte_size
        self.pinned = pinned or PinnedBudget(0)
        self.lock = threading.RLock()
        #: Those that are on the device, for as long as anybody has them.
        self._resident: weakref.WeakSet[ParameterSet] = weakref.WeakSet()
        #: Those of models that compute several sets in one batch.
        self._stacks: weakref.WeakSet[SetStack] = weakref.WeakSet()
        self._uses = itertools.count(1)
        #: Sets that are not in use any more and are kept in the host's memory, oldest first.
        self._former: OrderedDict[ParameterSet, None] = OrderedDict()

    def use(self) -> int:
        """Returns a number that grows with each use of any set."""
        return next(self._uses)

    @property
    def byte_size(self) -> int:
        """The bytes of all sets that are on the device."""
        with self.lock:
            return sum([each.placed_byte_size for each in self._resident], self._stacked)

    @property
    def _stacked(self) -> int:
        return sum([each.byte_size for each in self._stacks])

    def join_stack(self, stack: SetStack, model: str) -> None:
        """Counts a stack until its load has ended. Raises InvalidArgument: there is no room for it."""
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
        """Counts a stack no longer. Idempotent."""
        with self.lock:
            self._stacks.discard(stack)

    def admit(self, parameters: ParameterSet) -> None:
        """Makes room for a set, which is about to be placed; ``lock`` is held. Raises Unavailable: there is none."""
        resident = [each for each in self._resident if each is not parameters]
        needed, taken = parameters.placed_byte_size, sum([each.placed_byte_size for each in resident], self._stacked)
        if needed and taken + needed > self._limit:
            for each in sorted(resident, key=operator.attrgetter("used")):
                if not each.may_leave:
                    continue
                each.evict()
                each.sets.evictions += 1
                taken -= each.placed_byte_size
                if taken + needed <= self._limit:
                    break
            else:
                raise Unavailable(
                    f"{parameters} has {needed} bytes beside {taken} of other sets that stay on the device, "
                    f"workers.parameter_byte_size allows {self._limit}"
                )
        self._resident.add(parameters)

    def may_keep(self, parameters: ParameterSet) -> bool:
        """Returns whether a set may be kept in the host's memory when it is not in use any more."""
        return parameters.byte_size <= self._limit

    def keep(self, parameters: ParameterSet) -> None:
        """Keeps a set that is not in use any more; what was kept longest goes for it."""
        self._former[parameters] = None
        while sum([each.byte_size for each in self._former]) > self._limit:
            oldest, _ = self._former.popitem(last=False)
            oldest.sets.forget_before(oldest)

    def forget(self, parameters: ParameterSet) -> None:
        """Keeps a set no longer, if it was kept."""
        self._former.pop(parameters, None)

    def left(self, parameters: ParameterSet) -> None:
        """Notes that a set has left the device, or was not placed; ``lock`` is held."""
        self._resident.discard(parameters)

    def __repr__(self) -> str:
        return f"<DeviceRoom {self.byte_size} of {self._limit} bytes>"
