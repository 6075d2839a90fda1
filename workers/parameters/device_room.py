"""The room that pushed parameters have on a worker's device, all models' together.

What is asked stays, or comes back; the set that was not asked for the longest time leaves for it. ``main`` of a model never
leaves, nor does what is staged.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

from tensord.shm.errors import Unavailable

if TYPE_CHECKING:
    from tensord.workers.parameters.parameter_set import ParameterSet


class DeviceRoom:
    """Counts the pushed sets that are on a device. Any thread may use it; ``lock`` is held while sets come and leave."""

    def __init__(self, byte_size: int) -> None:
        """``byte_size``: what all of them may take."""
        self._limit = byte_size
        self.lock = threading.RLock()
        #: Those that are on the device, for as long as anybody has them.
        self._resident: weakref.WeakSet[ParameterSet] = weakref.WeakSet()
        self._uses = itertools.count(1)
        #: Sets that are not in use any more and are kept in the host's memory, oldest first.
        self._former: OrderedDict[ParameterSet, None] = OrderedDict()

    def use(self) -> int:
        """Returns a number that grows with each use of any set."""
        return next(self._uses)

    @property
    def byte_size(self) -> int:
        """The bytes of all sets that are on the device."""
        return sum([each.byte_size for each in self._resident])

    def admit(self, parameters: ParameterSet) -> None:
        """Makes room for a set, which is about to be placed; ``lock`` is held. Raises Unavailable: there is none."""
        resident = [each for each in self._resident if each is not parameters]
        taken = sum([each.byte_size for each in resident])
        if taken + parameters.byte_size > self._limit:
            for each in sorted([each for each in resident if each.may_leave], key=lambda each: each.used):
                each.leave()
                each.sets.evictions += 1
                taken -= each.byte_size
                if taken + parameters.byte_size <= self._limit:
                    break
            else:
                raise Unavailable(
                    f"{parameters} has {parameters.byte_size} bytes beside {taken} of other sets that stay on the device, "
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
