"""Handles the signals of the daemon's process: SIGTERM and SIGINT stop it, SIGHUP has it read its configuration again.

From the first moment until the process has ended no signal finds its default action. Without a handler, SIGTERM and SIGINT would
not stop the first process of a container, and would end any other process without a message. While the daemon exits, they would
change the daemon's exit status: so an event loop's own handlers are not used, in whose place a loop that closes puts the default.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

_ENDING = (signal.SIGTERM, signal.SIGINT)
_ALL = (*_ENDING, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Passes signals on to the daemon's event loop. Stores a SIGTERM or SIGINT that comes before that in ``came``."""

    def __init__(self) -> None:
        #: The signal that asked the daemon to stop before its event loop ran, SIGTERM or SIGINT; None: none has come.
        self.came: signal.Signals | None = None
        #: A signal's number -> the function to call when the signal comes. A handler drops other signals, because children would
        #: inherit SIG_IGN.
        self._actions: dict[int, Callable[[], object]] = {}

    def watch(self) -> None:
        """Handles all signals from now on. Call this in the main thread."""
        for number in _ALL:
            signal.signal(number, self._handle)

    def pass_on(self, loop: AbstractEventLoop, stop: Callable[[], object], reload: Callable[[], object]) -> None:
        """Has the running event loop call ``stop`` at each SIGTERM and SIGINT, and ``reload`` at each SIGHUP, until ``ignore``.

        Calls ``stop`` at once if a SIGTERM or SIGINT has come. Call this in the main thread.
        """
        self._actions = dict.fromkeys(_ENDING, lambda: loop.call_soon_threadsafe(stop))
        self._actions[signal.SIGHUP] = lambda: loop.call_soon_threadsafe(reload)
        self.watch()
        # A loop that has a handler is woken by any signal, whichever thread takes that. By default SIGCHLD does nothing.
        loop.add_signal_handler(signal.SIGCHLD, lambda: None)
        if self.came is not None:
            stop()

    def ignore(self) -> None:
        """Ignores all signals from now on. Call this in the main thread, before the event loop closes."""
        for number in _ALL:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in self._actions:
            self._actions[number]()
        elif number in _ENDING:
            self.came = signal.Signals(number)

    def __repr__(self) -> str:
        return f"<Signals {self.came}>"
