"""A request that Starlette answers: uvicorn's cycle of a request and its response, in its connection's order of answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tensord.daemon.http.flow import Flow
from tensord.daemon.http.serving import Serving

_log = logging.getLogger(__name__)


class Cycle(RequestResponseCycle):
    """One. ``scope``: ASGI's; ``answered`` is called when its answer is written."""

    #: How fast its body comes is nobody's business.
    received = -1

    def __init__(
        self,
        serving: Serving,
        scope: dict[str, Any],
        flow: Flow,
        answered: Callable[[], None],
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        # Who speaks HTTP/1.0 must be told that the connection stays.
        headers = [(b"connection", b"keep-alive")] if keep_alive and scope["http_version"] == "1.0" else []
        more = headers, asyncio.Event(), expects_continue, keep_alive, answered
        super().__init__(scope, flow.transport, flow, _log, _log, False, *more)  # type: ignore[arg-type]
        self._serving = serving

    def take_body(self, content: bytes) -> None:
        """A piece of it."""
        if not self.response_complete:
            self.body += content
            if len(self.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            self.message_event.set()

    def complete(self) -> None:
        """Its body is whole."""
        if not self.response_complete:
            self.more_body = False
            self.message_event.set()

    def take_turn(self) -> None:
        """Everything before it is answered."""
        tasks = self._serving.tasks
        task = asyncio.create_task(self.run_asgi(self._serving.application))  # type: ignore[arg-type]
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def abandon(self) -> None:
        """Nobody hears what it says, its 100 Continue least of all."""
        self.disconnected = True
        self.waiting_for_100_continue = False
        self.message_event.set()
