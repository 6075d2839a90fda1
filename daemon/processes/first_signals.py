"""Remembers a SIGTERM or SIGINT that comes before the daemon's event loop runs, and ignores signals while the daemon exits.

Without a handler, SIGTERM and SIGINT would not stop the first process of a container, and would end any other process without a
message. A signal that comes while the daemon exits would change the daemon's exit status.
"""

from __future__ import annotations

import signal
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGINT)
_PASSED_OVER = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class FirstSignals:
    """Stores a SIGTERM or SIGINT that comes before the event loop runs in ``came``. Until one comes, ``came`` is None."""

    def __init__(self) -> None:
        #: The signal that asked the daemon to stop, SIGTERM or SIGINT; None: none has come.
        self.came: signal.Signals | None = None

    def watch(self) -> None:
        # SIGHUP, SIGUSR1 and SIGUSR2 get empty handlers, because children would inherit SIG_IGN.
        for number in _ENDING:
            signal.signal(number, self._ending)
        for number in _PASSED_OVER:
            signal.signal(number, _pass_over)

    def block(self) -> None:
        """Ignores SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 from now on. Call this in the main thread, from a coroutine."""
        signal.pthread_sigmask(signal.SIG_BLOCK, (*_ENDING, *_PASSED_OVER))
        import asyncio  # which takes longer than a signal may wait for its handler

        # Other threads block nothing, and a loop that closes gives each signal that it handles its default action again.
        loop = asyncio.get_running_loop()
        for number in (*_ENDING, *_PASSED_OVER):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _ending(self, number: int, frame: FrameType | None) -> None:
        self.came = signal.Signals(number)

    def __repr__(self) -> str:
        return f"<FirstSignals {self.came}>"


def _pass_over(number: int, frame: FrameType | None) -> None:
    pass
