"""On which core each loop is kept, where there are two or three: those of fronts on others than those of workers.

Fronts, workers and clients wake each other all the time. The kernel puts who is woken beside who wakes unless it finds an idle
core, and it stops searching for one where the cores look busy: two loops that look before they sleep make two cores look so. With
four requests in flight on two cores, front, worker and client all ran on one, and the other one was idle (measured). With more
cores than a few a loop that is kept on one of them has more to lose.

A decision only: ``shm.loop_core`` acts upon it in the process, ``--loop-core`` on its command line takes it there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from config import core_list
from config.options import Options
from daemon.devices import Device

#: So many cores are few.
FEW = (2, 3)


@dataclass(frozen=True, slots=True)
class LoopCores:
    """Empty: every loop runs where the kernel puts it."""

    #: By the worker's number.
    workers: tuple[int, ...] = ()
    #: In the order in which the fronts of a protocol take them; there are as many as cores.
    fronts: tuple[int, ...] = ()

    def of_worker(self, number: int) -> int | None:
        """None: wherever the kernel puts it."""
        return self.workers[number] if self.workers else None

    def of_front(self, row: int) -> int | None:
        """``row``: its place among the fronts of its protocol. None: wherever the kernel puts it."""
        return self.fronts[row % len(self.fronts)] if self.fronts else None


def choose(usable: Collection[int], masks: Sequence[Collection[int]]) -> LoopCores:
    """Workers from the last core downwards, each within its mask; fronts from the first one upwards that has no worker.

    Args:
      usable: the cores that the daemon may use.
      masks: the cores of each worker, by its number; none of them empty.
    Returns: nothing where there are not few cores, or none is left without a worker: then nothing can be kept apart.
    """
    if len(usable) not in FEW:
        return LoopCores()
    taken: Counter[int] = Counter()
    workers = []
    for mask in masks:
        core = min(mask, key=lambda core: (taken[core], -core))
        taken[core] += 1
        workers.append(core)
    if all(taken[core] for core in usable):
        return LoopCores()
    return LoopCores(tuple(workers), tuple(sorted(usable, key=lambda core: (taken[core], core))))


def of_daemon(options: Options, devices: Sequence[Device], usable: Collection[int]) -> LoopCores:
    """What the operator's settings say, with a worker for each device."""
    if not (options.lanes.apart and options.workers.pin):
        return LoopCores()
    return choose(usable, [_mask(options, device, len(devices), usable) for device in devices])


def arguments(core: int | None) -> list[str]:
    """What the command line of a process says of the core of its loop."""
    return [] if core is None else ["--loop-core", str(core)]


def _mask(options: Options, device: Device, count: int, usable: Collection[int]) -> Collection[int]:
    """The cores that its worker will have, of all ``count``."""
    if not device.name.startswith("cpu:"):
        return usable
    if options.workers.cores:
        return core_list.parse(options.workers.cores[device.number])
    return core_list.share(sorted(usable), device.number, count)
