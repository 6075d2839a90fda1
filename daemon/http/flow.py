"""Whether a client is read, and whether it takes what is written to it."""

from __future__ import annotations

import asyncio


class Flow:
    """One connection's."""

    __slots__ = ("_writable", "read_paused", "resting", "transport", "write_paused")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.read_paused = False
        #: Not read either way, because what came before waits for the next turn of the loop.
        self.resting = False
        #: Something that was written is still in the transport's buffer.
        self.write_paused = False
        self._writable: asyncio.Event | None = None

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._steer()

    def rest(self, resting: bool) -> None:
        """Begins or ends a rest."""
        self.resting = resting
        self._steer()

    def _steer(self) -> None:
        if self.read_paused or self.resting:
            self.transport.pause_reading()
        elif not self.transport.is_closing():
            self.transport.resume_reading()

    def resume_writing(self) -> None:
        """All that was written has left, or never will."""
        self.write_paused = False
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    async def drain(self) -> None:
        """Returns when ``write_paused`` has ended."""
        if self.write_paused:
            self._writable = self._writable or asyncio.Event()
            await self._writable.wait()
