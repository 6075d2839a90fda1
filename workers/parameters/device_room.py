"""Limits the memory that the pushed parameter sets of all models take on a worker's device.

A set that a batch needs stays on the device, or is brought back. If there is no room, the set that was not used for the longest
time leaves the device. A set that is staged never leaves, nor does a model's ``main`` (unless it is on demand). A set that has
left a GPU lies in page-locked host memory, as far as ``workers.pinned_byte_size`` allows, and comes back at the speed of the bus.
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
    """Tracks the parameter sets on a device and evicts sets when the memory for them is used up; any thread may use it.

    ``lock`` is held while sets are brought to the device or leave it.
    """

    def __init__(self, byte_size: int, pinned: PinnedBudget | None = None) -> None:
        """Starts without sets.

        Args:
          byte_size: how many bytes all sets together may take on the device.
          pinned: how many bytes of page-locked memory sets that left the device may take; None: none.
        """
        self._limit = byte_size
        self.pinned = pinned or PinnedBudget(0)
        self.lock = threading.RLock()
        #: The sets that are on the device; a set that nothing else refers to any more disappears.
        self._resident: weakref.WeakSet[ParameterSet] = weakref.WeakSet()
        #: The stacks of models whose batches mix sets.
        self._stacks: weakref.WeakSet[SetStack] = weakref.WeakSet()
        self._uses = itertools.count(1)
        #: Sets that are not in use any more and are kept in the host's memory, oldest first.
        self._former: OrderedDict[ParameterSet, None] = OrderedDict()

    def use(self) -> int:
        """Returns the next number of a counter of uses: the set with the lowest number was not used for the longest time."""
        return next(self._uses)

    @property
    def byte_size(self) -> int:
        """The bytes that all sets and stacks take on the device now."""
        with self.lock:
            return sum([each.placed_byte_size for each in self._resident], self._stacked)

    @property
    def _stacked(self) -> int:
        return sum([each.byte_size for each in self._stacks])

    def join_stack(self, stack: SetStack, model: str) -> None:
        """Reserves memory on the device for a model's stack of sets, until ``leave_stack``.

        Raises InvalidArgument: the stacks together would have more bytes than all sets may take.
        """
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
        """Frees the memory that ``join_stack`` reserved for a stack. May be called more than once."""
        with self.lock:
            self._stacks.discard(stack)

    def admit(self, parameters: ParameterSet) -> None:
        """Counts a set that is about to be placed on the device, and evicts others for it if necessary.

        The caller holds ``lock``. Raises Unavailable: the sets that cannot leave the device take too much memory.
        """
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
        """Returns whether a set is small enough to be kept in host memory after a newer version has replaced it."""
        return parameters.byte_size <= self._limit

    def keep(self, parameters: ParameterSet) -> None:
        """Stores a replaced set, in host memory, for later use. While such sets take too many bytes the oldest is forgotten."""
        self._former[parameters] = None
        while sum([each.byte_size for each in self._former]) > self._limit:
            oldest, _ = self._former.popitem(last=False)
            oldest.sets.forget_before(oldest)

    def forget(self, parameters: ParameterSet) -> None:
        """Removes a replaced set from the sets that are kept in host memory, if it is one of them."""
        self._former.pop(parameters, None)

    def left(self, parameters: ParameterSet) -> None:
        """Removes a set from the sets on the device: it has left the device or could not be placed. The caller holds ``lock``."""
        self._resident.discard(parameters)

    def __repr__(self) -> str:
        return f"<DeviceRoom {self.byte_size} of {self._limit} bytes>"
