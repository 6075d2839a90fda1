"""Reaps orphans where the daemon is the first process of a container: who loses its parent there becomes a child of the daemon.

Such are processes that models start and leave alone. Nobody else waits for them, and each would stay in the table of processes. A
child that the daemon has started is waited for by whoever started it, and never here.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable

from tensord.daemon.processes.child import Child

#: Seconds until a look again behind a child that its owner has yet to wait for.
_AGAIN_SECONDS = 0.05


class Orphans:
    """Waits for each child process that ends and is none of ``own()``, which are waited for elsewhere. On an event loop."""

    def __init__(self, own: Callable[[], Iterable[Child]]) -> None:
        self._own = own

    def watch(self) -> None:
        """Begins to reap orphans, now and whenever a child process ends."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
        self._reap()

    def _reap(self) -> None:
        while (pid := _ended()) and pid not in {child.pid for child in self._own()}:
            os.waitpid(pid, 0)
        if pid:
            # The kernel shows one at a time: those behind it are seen when it is gone.
            asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._reap)

    def __repr__(self) -> str:
        return f"<Orphans beside {sum(1 for _ in self._own())} children>"


def _ended() -> int:
    """Returns the pid of a child process that has ended and that nobody has waited for; 0: there is none."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return 0 if found is None else found.si_pid
