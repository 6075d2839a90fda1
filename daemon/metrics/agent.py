"""Answers HAProxy's agent checks on a separate TCP port. Each client that connects gets one line about the daemon's state.

    up ready 75%     the daemon is ready, and the workers ran models for 25% of the last 5 seconds
    drain            the daemon is being drained or stops
    down #reason     the daemon is not ready

The daemon ignores what a client sends, and ends a connection that the client has not closed after 2 seconds.
Source: HAProxy's manual, "agent-check".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from tensord.config.options import Metrics
from tensord.daemon.processes import listening
from tensord.daemon.processes.listening import Listener

_log = logging.getLogger(__name__)
#: Seconds between two looks at the workers.
_INTERVAL = 1.0
#: Seconds that a client may take to end its connection.
_LINGER = 2.0
#: The most bytes that are read at a time of what an agent-check client sends, which is ignored.
_READ_BYTE_SIZE = 4096
#: Characters of a reason.
_MAX_TEXT = 100


#: The busy part is that of about so many ns.
WINDOW_NS = 5 * 10**9


class BusyPart:
    """Measures the fraction of the last 5 seconds in which the workers ran models."""

    def __init__(self) -> None:
        #: When it was looked, and the busy time of all workers so far, in ns.
        self._looks: deque[tuple[int, int]] = deque()
        self._workers = self._running = 0

    def look(self, now_ns: int, busy_ns: int, workers: int, running: int = 0) -> None:
        """Notes at the time ``now_ns`` how long the workers have run models. Times are CLOCK_MONOTONIC ns.

        Args:
          busy_ns: the sum of the times of all runs that have ended.
          workers: the number of workers.
          running: how many workers are in a run that has lasted longer than ``WINDOW_NS``.
        """
        while len(self._looks) > 1 and now_ns - self._looks[1][0] >= WINDOW_NS:
            self._looks.popleft()
        self._looks.append((now_ns, busy_ns))
        self._workers, self._running = workers, running

    @property
    def value(self) -> float:
        """Returns how busy the workers were in the last few seconds, from 0 to 1. Returns 1 if there is no worker."""
        if not self._workers:
            return 1.0
        (began_ns, before_ns), (now_ns, busy_ns) = self._looks[0], self._looks[-1]
        whole = (now_ns - began_ns) * self._workers
        part = (busy_ns - before_ns) / whole if whole else 0.0
        return min(1.0, max(part, self._running / self._workers))

    def __repr__(self) -> str:
        return f"<BusyPart {self.value:.2f} of {self._workers} workers>"


def line(draining: bool, unreadiness: str, busy: float) -> bytes:
    """Returns the state of the daemon as one line for HAProxy's agent-check.

    Args:
      draining: whether the daemon is being drained or stops.
      unreadiness: why the daemon is not ready, or "".
      busy: the fraction of time in which the workers run models, 0 to 1. The line's weight is the rest in percent, at least 1%.
    """
    if draining:
        return b"drain\n"
    if unreadiness:
        text = "".join(each if each.isprintable() else " " for each in unreadiness[:_MAX_TEXT])
        return f"down #{text}\n".encode()
    return b"up ready %d%%\n" % max(1, round(100 * (1 - busy)))


class Agent:
    """Answers HAProxy's agent checks on a TCP port. Each connection gets one line about the daemon's state.

    Args:
      state: returns whether the daemon is being drained or stops, and why the daemon is not ready ("" if it is ready).
      look: called about every second with a ``BusyPart``. Stores in this object how busy the workers have been.
    """

    def __init__(
        self, options: Metrics, state: Callable[[], tuple[bool, str]], look: Callable[[BusyPart], Awaitable[None]]
    ) -> None:
        self._options = options
        self._state = state
        self._look = look
        self._busy = BusyPart()
        self._listener: Listener | None = None
        self._server: asyncio.Server | None = None
        self._looking: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Binds the port for HAProxy's agent checks, if a port is configured. Raises ListenError if it cannot be bound."""
        if self._options.agent_port:
            with listening.named("metrics", "agent_port"):
                self._listener = listening.listen(self._options.address, self._options.agent_port, "http")

    async def open(self) -> None:
        """Starts to answer HAProxy's agent checks on the running event loop, if ``listen`` has bound a port."""
        if self._listener is None:
            return
        self._server = await asyncio.start_server(self._serve, sock=self._listener.socket)
        self._looking = asyncio.get_running_loop().create_task(self._look_on())
        _log.info("answering agent checks on %s:%d", self._options.address, self._options.agent_port)

    def line(self) -> bytes:
        return line(*self._state(), self._busy.value)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self.line())
        # What a client sends (``agent-send``) means nothing; closing at once would throw the line away with it.
        # It has gone already, or does not close, or the daemon ends.
        with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(_LINGER):
                writer.write_eof()
                while await reader.read(_READ_BYTE_SIZE):
                    pass
        writer.transport.abort()

    async def _look_on(self) -> None:
        while True:
            await self._look(self._busy)
            await asyncio.sleep(_INTERVAL)

    def close(self) -> None:
        """Stops the agent: closes its listening socket, and no longer asks the workers how busy they are. May be called again."""
        if self._looking is not None:
            self._looking.cancel()
        if self._server is not None:
            self._server.close()
        if self._listener is not None:
            self._listener.close()
