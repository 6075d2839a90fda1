"""Drains the daemon: it reports that it is not ready, later refuses new requests, and is drained once none is in flight.

    begin ─▶ not ready, requests still accepted ─ after the drain time ─▶ new requests get 503 ─▶ none in flight: drained
    end   ─▶ everything as before

The processes stay, and a process that dies is replaced. Models can be loaded and settings changed as always: only inference
requests are refused.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from typing import TYPE_CHECKING

from tensord.daemon.processes.child import Child, FrontProcess
from tensord.shm.errors import ServingError, Unavailable
from tensord.shm.operations import AwaitIdle, EndIdleLanes

if TYPE_CHECKING:
    from tensord.daemon.supervisor import Supervisor

_log = logging.getLogger(__name__)
#: Seconds between two looks whether requests are refused, and at lanes on which something is in flight.
_POLL_SECONDS = 0.05


class DrainPhase(enum.Enum):
    """Names the phases of a drain."""

    #: Nothing is drained.
    NONE = "none"
    #: The daemon is not ready, and requests are taken.
    ANNOUNCED = "announced"
    #: New requests are refused, and some may be in flight.
    REFUSING = "refusing"
    #: Nothing is in flight.
    DRAINED = "drained"


class Drain:
    """Drains the daemon: the daemon reports that it is not ready, and later refuses new inference requests, until ``end``."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.phase = DrainPhase.NONE
        self._draining: asyncio.Task[None] | None = None
        #: The names of the processes that the drain still waits for.
        self._busy: set[str] = set()
        #: The time of the drain, in seconds, and when it is over, loop time.
        self.seconds = self._refuses_at = 0.0

    @property
    def refuses(self) -> bool:
        """Returns whether new inference requests are refused."""
        return self.phase in (DrainPhase.REFUSING, DrainPhase.DRAINED)

    def begin(self, seconds: float | None = None) -> None:
        """Begins a drain, unless one has begun. From now on the daemon reports that it is not ready.

        After ``seconds`` it refuses new requests. If ``seconds`` is None, the option ``supervisor.drain_time`` applies.
        """
        if self.phase is not DrainPhase.NONE:
            return
        self.seconds = self._supervisor.options.supervisor.drain_time if seconds is None else seconds
        _log.info("draining: not ready from now on, and no new requests are taken in %g s", self.seconds)
        self.announce()
        loop = asyncio.get_running_loop()
        self._refuses_at = loop.time() + self.seconds
        self._draining = loop.create_task(self._drain(self.seconds))

    @property
    def time_left(self) -> float:
        """Returns for how many seconds the daemon would go on accepting requests if it were asked to stop now."""
        if self.phase is DrainPhase.NONE:
            return self._supervisor.options.supervisor.drain_time
        return 0.0 if self.refuses else max(0.0, self._refuses_at - asyncio.get_running_loop().time())

    def announce(self) -> None:
        """Reports to clients and load balancers that the daemon is not ready. Requests are still accepted."""
        self.phase = DrainPhase.ANNOUNCED
        self._supervisor.models.drain(True)

    async def finished(self) -> None:
        """Waits until the daemon refuses new requests and every earlier request is answered.

        Raises Unavailable if no drain has begun, or if an operator ends the drain during the wait. Raises Unavailable if
        requests are still unanswered ``supervisor.exit_timeout`` seconds after this call, or after the daemon began to refuse
        new requests, whichever is later. The drain goes on then.
        """
        draining = self._draining
        if draining is None:
            raise Unavailable("the server is not being drained")
        while not (self.refuses or draining.done()):
            await asyncio.sleep(_POLL_SECONDS)
        await asyncio.wait((draining,), timeout=self._supervisor.options.supervisor.exit_timeout)
        if draining is not self._draining:
            raise Unavailable("the drain was ended")
        if self.phase is not DrainPhase.DRAINED:
            raise Unavailable(self._late())

    def end(self) -> None:
        """Ends the drain. Requests are accepted again, and the daemon is ready if its models are."""
        if self.phase is DrainPhase.NONE:
            return
        _log.info("draining: ended, requests are taken")
        if self._draining is not None:
            self._draining.cancel()
            self._draining = None
        self.phase = DrainPhase.NONE
        self._supervisor.refuse_requests(False)
        self._supervisor.models.drain(False)

    async def _drain(self, seconds: float) -> None:
        await self._supervisor.fronts.settled()
        await asyncio.sleep(seconds)
        self._busy = {child.name for child in self._children()}
        self.phase = DrainPhase.REFUSING
        self._supervisor.refuse_requests(True)
        await self._supervisor.fronts.settled()
        _log.info("draining: new requests are refused; finishing those in flight")
        children = self._children()
        self._busy = {child.name for child in children}
        timeout = self._supervisor.options.supervisor.exit_timeout
        late = asyncio.get_running_loop().call_later(timeout, lambda: _log.warning("draining: %s", self._late()))
        try:
            await asyncio.gather(*map(self._waits, children))
        finally:
            late.cancel()
        self.phase = DrainPhase.DRAINED
        _log.info("drained: nothing is in flight")

    def _children(self) -> list[Child]:
        return [*self._supervisor.fronts, *self._supervisor.workers.ready()]

    def _late(self) -> str:
        timeout = self._supervisor.options.supervisor.exit_timeout
        return f"requests are still in flight after {timeout:g} s: {', '.join(sorted(self._busy))}"

    async def _waits(self, child: Child) -> None:
        """Waits until a child process has no unanswered request, or has ended."""
        try:
            if isinstance(child, FrontProcess):
                await child.result_of(AwaitIdle())
            else:
                while await child.result_of(EndIdleLanes()) != b"0":
                    await asyncio.sleep(_POLL_SECONDS)
        except ServingError as error:
            _log.debug("%s is not waited for: %s", child.name, error)
        self._busy.discard(child.name)

    def __repr__(self) -> str:
        return f"<Drain {self.phase.value}>"
