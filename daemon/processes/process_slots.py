"""Replaces child processes that have died, such as "http-0" or "worker-1". The delay grows if they die again and again."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable

from tensord.config.control_groups import memory_groups
from tensord.config.options import Expert
from tensord.daemon.processes.child import CAUSES, Child
from tensord.shm import child_process
from tensord.shm.descriptors import AGAIN_SECONDS

#: A process that came up and lived this long was healthy: its death starts a new series.
HEALTHY_NS = 60 * 10**9
#: The longest wait in seconds after the death of a process that had come up.
SERVED_MAXIMUM = 1.0


_log = logging.getLogger(__name__)
#: The number of deaths after which a slot that was never filled counts as one that never will be, while the daemon starts.
_MAX_START_DEATHS = 5


def retried(what: str, call: Callable[..., object], *words: object, told: bool = False) -> None:
    """Calls ``call(*words)``. If the call raises OSError, the event loop repeats the call every second until it succeeds.

    ``what``: a sentence that is logged at the first failure. ``told``: True if the sentence must not be logged.
    """
    try:
        call(*words)
    except OSError as error:
        if not told:
            _log.error("%s: %s", what, error.strerror)
        again = functools.partial(retried, what, call, *words, told=True)
        asyncio.get_running_loop().call_later(AGAIN_SECONDS, again)


class ProcessSlots:
    """Replaces dead child processes, each after a delay, and counts deaths and replacements by name."""

    def __init__(self, options: Expert, needs: Callable[[Child], bool], gives_up: Callable[[Child], bool]) -> None:
        """Stores the arguments. No process has died yet.

        Args:
          options: the delays before a dead process is replaced.
          needs: returns whether a dead process should be replaced now.
          gives_up: asks the daemon to stop and returns True, or returns False if the dead process should be replaced.
        """
        self._options = options
        self._needs = needs
        self._gives_up = gives_up
        #: Name of a slot -> processes that have died there in a row, of which none was healthy.
        self._series: Counter[str] = Counter()
        self._restarts: Counter[str] = Counter()
        #: Name of a slot and ``Child.cause`` -> processes that died there so and were to be replaced.
        self._deaths: Counter[tuple[str, str]] = Counter()
        #: The innermost control group around the daemon that counts kills for want of memory; None: none does.
        self._group = next((group for group in memory_groups() if group.kills is not None), None)
        self._memory_kills = self._count_memory_kills()
        #: The names of slots in which a process died that had been ready.
        self._filled: set[str] = set()

    def deaths(self, name: str) -> int:
        """Returns how many processes of this name have died in a row. A process that came up and lived for 60 s resets it."""
        return self._series[name]

    def restarts(self, name: str) -> int:
        """Returns how often a dead process of this name has been replaced."""
        return self._restarts[name]

    def was_filled(self, name: str) -> bool:
        """Returns whether a process called ``name``, such as "worker-1", has been ready and has died since."""
        return name in self._filled

    def deaths_by_cause(self, names: Iterable[str]) -> dict[tuple[str, str], int]:
        """Returns (name, cause) -> how many processes with these names died. Processes that the daemon stopped do not count."""
        return {(name, cause): self._deaths[name, cause] for name in names for cause in CAUSES}

    def look(self, dead: Child) -> None:
        """Sets ``dead.out_of_memory``, and counts the death in the metrics if a new process should replace ``dead``."""
        before, self._memory_kills = self._memory_kills, self._count_memory_kills()
        dead.out_of_memory = self._memory_kills > before and dead.killed_by_others
        if self._needs(dead):
            self._deaths[dead.name, dead.cause] += 1

    def _count_memory_kills(self) -> int:
        return 0 if self._group is None else self._group.kills or 0

    def forget(self, name: str) -> None:
        """Removes the counts of deaths and restarts of processes called ``name``, because no process gets this name again."""
        for key in [key for key in self._deaths if key[0] == name]:
            del self._deaths[key]
        self._series.pop(name, None)
        self._restarts.pop(name, None)
        self._filled.discard(name)

    def died(self, dead: Child, start: Callable[[], None], doing: str = "") -> None:
        """Calls ``start`` after a delay if a new process should replace ``dead``.

        If ``start`` raises OSError, the event loop calls ``start`` again every second.
        If no process with the name of ``dead`` was ever ready, the daemon may be asked to stop instead. This happens only if
        ``dead`` reported that it cannot use its device, or if ``deaths`` returns 5 or more for this name.
        ``doing``: what ``dead`` did, for the log, such as " while loading model 'm' version 1", or "" if unknown.
        """
        if not self._needs(dead):
            return
        if dead.ready and time.monotonic_ns() - dead.started_ns >= HEALTHY_NS:
            self._series[dead.name] = 0
        delay = replacement_delay(self._options, self._series[dead.name], dead.ready)
        self._series[dead.name] += 1
        if dead.ready:
            self._filled.add(dead.name)
        elif dead.name not in self._filled:
            if dead.returncode == child_process.NO_DEVICE and self._gives_up(dead):
                _log.critical("stopping: %s cannot use its device, as it says itself", dead.name)
                return
            if self._series[dead.name] >= _MAX_START_DEATHS and self._gives_up(dead):
                _log.critical("stopping: %s died %d times before it was ready", dead.name, self._series[dead.name])
                return
        _log.error(
            "%s (process %d) %s%s; its replacement starts in %.1f s",
            dead.name,
            dead.pid,
            dead.describe_exit(),
            doing,
            delay,
        )
        fill = functools.partial(retried, f"{dead.name} cannot be started", self._fill, dead, start)
        asyncio.get_running_loop().call_later(delay, fill)

    def _fill(self, dead: Child, start: Callable[[], None]) -> None:
        if self._needs(dead):
            start()
            self._restarts[dead.name] += 1


def replacement_delay(options: Expert, deaths: int, served: bool) -> float:
    """Returns how many seconds to wait before a dead process is replaced. The delay doubles with each death, to a maximum.

    ``deaths``: how many processes have died there in a row before. ``served``: whether the dead process was ever ready. If so,
    the delay is at most 1 s. Chance shortens each delay by up to a tenth.
    """
    maximum = min(options.max_restart_delay, SERVED_MAXIMUM) if served else options.max_restart_delay
    # 2**20 is beyond any maximum; without the bound a long series would overflow.
    delay: float = min(maximum, options.restart_delay * 2 ** min(deaths, 20))
    return delay * random.uniform(0.9, 1.0)
