"""One request of a model to another one, as the thread sees it that makes it.

    Call ─▶ desk (loop): an inner request ─▶ answered, answered, ... ─▶ next, next, ... in whichever thread takes them
                                                                  ◀─ took: there is room for a further one

Where the model that is called answers with many responses, at most ``responses.max_ahead`` bytes of them wait here.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Mapping

from tensord.shm.arrays import Array
from tensord.shm.messages import PreparedRequest, RequestRecord
from tensord.workers.calls.caller import Caller
from tensord.workers.requests.result import Result
from tensord.workers.requests.timeline import RequestTimeline


class Call:
    """``begin`` once; then ``next`` until the last response. ``answered`` and ``abandoned`` are for the loop."""

    __slots__ = (
        "_answered",
        "_asked",
        "_came",
        "_desk",
        "_first",
        "_over",
        "_taken",
        "_thread",
        "abandoned",
        "arrays",
        "began_ns",
        "caller",
        "hint",
        "outputs",
        "own",
        "prepared",
        "refused",
        "requests",
        "streams",
        "timeline",
    )

    def __init__(
        self,
        caller: Caller,
        prepared: PreparedRequest,
        own: RequestRecord,
        arrays: Mapping[str, Array],
        outputs: tuple[str, ...] = (),
        streams: bool = False,
        hint: str = "",
        timeline: RequestTimeline | None = None,
    ) -> None:
        """
        Args:
          prepared, own: say everything of it but its inputs and outputs.
          arrays: nobody writes to them any more.
          outputs: which are wanted; none: all.
          streams: whether any number of responses will be taken.
          hint: what to say where that should be, and is not.
          timeline: of the traced request that it is told with, if any.
        """
        assert caller.port.desk is not None
        self._desk = caller.port.desk
        self.caller = caller
        #: Those that it is made for: it ends with them.
        self.requests = caller.requests
        self.prepared = prepared
        self.own = own
        self.arrays = arrays
        self.outputs = outputs
        self.streams = streams
        self.hint = hint
        self.timeline = timeline
        #: It was answered without being made: its error says why it could not be.
        self.refused = False
        #: The thread that waited for it last; 0: a coroutine did.
        self._thread = 0
        #: Responses that were waited for, and of them those that were taken: the thread's. Those that have come: the loop's.
        self._asked = self._taken = self._answered = 0
        #: When the loop has begun it.
        self.began_ns = 0
        #: Its responses are thrown away.
        self.abandoned = False
        self._came: queue.SimpleQueue[tuple[Result | None, bool]] = queue.SimpleQueue()
        self._over = False
        self._first: Callable[[], None] | None = None

    def begin(self, by_coroutine: bool = False) -> None:
        """Whoever begins it waits for it next."""
        self._thread = 0 if by_coroutine else threading.get_ident()
        self._asked = 1
        self._desk.begin(self)

    @property
    def thread(self) -> int:
        """The thread that waits for it; 0: none does."""
        return self._thread if self.is_awaited else 0

    @property
    def is_awaited(self) -> bool:
        """Whether a thread or a coroutine waits for it."""
        return self._asked > self._answered

    def answered(self, result: Result | None, final: bool) -> None:
        """A response, or (None) only that there is no further one."""
        self._answered += 1
        self._came.put((result, final))
        first, self._first = self._first, None
        if first is not None:
            first()

    def next(self) -> tuple[Result | None, bool]:
        """The next response, when it has come, and whether it is the last. After the last one not to be called."""
        self._thread = threading.get_ident()
        self._taken += 1
        self._asked = self._taken
        result, final = self._came.get()
        self._over = final
        if self.streams and not final:
            self._desk.took(self)
        return result, final

    def first(self) -> asyncio.Task[tuple[Result | None, bool]]:
        """As ``next``, for the running event loop, which goes on meanwhile. Who stops waiting cancels the call."""
        waiting = asyncio.ensure_future(self._wait())
        waiting.add_done_callback(lambda done: self.cancel() if done.cancelled() else None)
        return waiting

    async def _wait(self) -> tuple[Result | None, bool]:
        loop = asyncio.get_running_loop()
        came: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            # Its event loop may have ended.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: None if came.done() else came.set_result(None))

        self._first = wake
        if self._came.empty():
            await came
        return self.next()

    def cancel(self) -> None:
        """It ends with an error, if it has not ended. Idempotent."""
        if not self._over:
            self._desk.cancel(self)

    def stop(self) -> None:
        """Its model may stop; what that still sends comes. Idempotent."""
        if not self._over:
            self._desk.stop(self)

    def abandon(self) -> None:
        """Nobody takes the responses that are still to come."""
        if not self._over:
            self._over = True
            self._desk.abandon(self)

    def __repr__(self) -> str:
        return f"<Call to {self.prepared.model!r} by {self.caller!r}>"
