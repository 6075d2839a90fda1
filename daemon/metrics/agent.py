"""Answers HAProxy's agent-check on a port of its own: one line to whoever connects, and the connection ends.

    up ready 75%     a quarter of the last seconds the workers were busy: that is the weight which is left
    drain            the daemon is drained, or stops: it finishes what it has
    down #reason     it is not ready

Belongs to the supervisor's loop. Nothing is read, and nobody is waited for. Source: HAProxy's manual, "agent-check".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tensord.config.options import Metrics
from tensord.daemon.metrics.busy_part import BusyPart
from tensord.daemon.processes import listening
from tensord.daemon.processes.listening import Listener

_log = logging.getLogger(__name__)
#: Seconds between two looks at the workers.
_INTERVAL = 1.0
#: Seconds that a client may take to end its connection.
_LINGER = 2.0
#: Characters of a reason.
_MAX_TEXT = 100


def line(draining: bool, unreadiness: str, busy: float) -> bytes:
    """Words the state of the daemon for the agent-check.

    Args:
      unreadiness: why it is not ready; "": it is.
      busy: the part of the time in which the workers run something. A weight of 0 would be another way to drain: 1 is the least.
    """
    if draining:
        return b"drain\n"
    if unreadiness:
        text = "".join(each if each.isprintable() else " " for each in unreadiness[:_MAX_TEXT])
        return f"down #{text}\n".encode()
    return b"up ready %d%%\n" % max(1, round(100 * (1 - busy)))


class Agent:
    """Owns the listening socket.

    Args:
      state: tells whether the daemon drains, and why it is not ready ("": it is).
      look: looks at the workers, for the part of the time in which they are busy.
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

    async def open(self) -> None:
        """Serves on the running loop, if there is a port for it. Raises ListenError: address, port and reason."""
        if not self._options.agent_port:
            return
        self._listener = listening.listen(self._options.address, self._options.agent_port, "http")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Answer(self.line), sock=self._listener.socket)
        self._looking = loop.create_task(self._look_on())
        _log.info("answering agent checks on %s:%d", self._options.address, self._options.agent_port)

    def line(self) -> bytes:
        """Words the state of this moment."""
        return line(*self._state(), self._busy.value)

    async def _look_on(self) -> None:
        while True:
            await self._look(self._busy)
            await asyncio.sleep(_INTERVAL)

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        if self._looking is not None:
            self._looking.cancel()
        if self._server is not None:
            self._server.close()
        if self._listener is not None:
            self._listener.close()


class _Answer(asyncio.Protocol):
    """Says a line, which always fits into a socket's buffer, and ends the connection when its client does, or soon."""

    def __init__(self, line: Callable[[], bytes]) -> None:
        self._line = line
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._line())
        transport.write_eof()
        # What a client sends (``agent-send``) is not read: closing at once would throw the line away with it.
        self._end = asyncio.get_running_loop().call_later(_LINGER, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()
