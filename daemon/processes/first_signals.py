"""Handles signals from a process's first line on: until there is a loop, SIGTERM and SIGINT are kept for it.

As the first process of a container one that has no handler yet would lose them; elsewhere it would end without a word. SIGHUP,
SIGUSR1 and SIGUSR2 end nothing: a reload has nothing to do before the start is over, and the other two mean nothing here.
"""

from __future__ import annotations

import signal
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGINT)
_PASSED_OVER = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class FirstSignals:
    """Signal handlers for the time before the event loop installs its own."""

    def __init__(self) -> None:
        #: The signal that asked the daemon to stop, SIGTERM or SIGINT; None: none has come.
        self.came: signal.Signals | None = None

    def watch(self) -> None:
        """Installs the handlers, from the main thread.

        They handle signals and do not ignore them: that would be inherited by the processes it starts.
        """
        for number in _ENDING:
            signal.signal(number, self._ending)
        for number in _PASSED_OVER:
            signal.signal(number, _pass_over)

    def _ending(self, number: int, frame: FrameType | None) -> None:
        self.came = signal.Signals(number)

    def __repr__(self) -> str:
        return f"<FirstSignals {self.came}>"


def _pass_over(number: int, frame: FrameType | None) -> None:
    pass
