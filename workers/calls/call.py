"""A request that a model's code sends to another model on the same worker, and the responses to the request.

The model's code calls ``begin`` to send the request, and then calls ``next`` for each response. The worker's event loop calls
``answered`` to hand over a response.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tensord.shm.arrays import Array
from tensord.shm.messages import PreparedRequest, RequestRecord
from tensord.workers.calls.caller import Caller
from tensord.workers.calls.own_spans import innermost
from tensord.workers.requests.result import Result
from tensord.workers.requests.timeline import RequestTimeline


@dataclass(eq=False, repr=False)
class ModelCall:
    """A call of another model by a model's code.

    Call ``begin`` once. Then call ``next`` until the call has ended. Only the worker's event loop may call ``answered``.
    Only the worker's event loop may set ``abandoned``.
    """

    caller: Caller
    #: The part of the request that other requests may share: model, version, parameters.
    prepared: PreparedRequest
    #: The rest of the request without its tensors: id, priority, timeout, sequence.
    own: RequestRecord
    #: The inputs by name, which must not be written to any more.
    arrays: Mapping[str, Array]
    #: Names of the wanted outputs; empty: all.
    outputs: tuple[str, ...] = ()
    #: True if the caller takes any number of responses; False: exactly one.
    streams: bool = False
    #: The error message if the called model streams although ``streams`` is False.
    hint: str = ""
    #: The timeline of the traced request that this call is traced with; None: it is not traced.
    timeline: RequestTimeline | None = None

    def __post_init__(self) -> None:
        assert self.caller.port.server is not None
        self._server = self.caller.port.server
        #: The open span of the caller's code that the call is a part of; None: there is none.
        self.within = None if self.timeline is None else self.timeline.within(innermost())
        #: Requests that the call is made for: it ends with them.
        self.requests = self.caller.requests
        #: True if the call could not be made: its error says why.
        self.refused = False
        #: The thread that waited for the call last; 0: a coroutine did.
        self._thread = 0
        #: Counts of responses: waited for and taken (written by the thread), come (written by the loop).
        self._asked = self._taken = self._answered = 0
        #: When the loop has begun the call.
        self.began_ns = 0
        #: True if its responses are discarded.
        self.abandoned = False
        self._came: queue.SimpleQueue[tuple[Result | None, bool]] = queue.SimpleQueue()
        self._over = False
        self._first: Callable[[], None] | None = None

    def begin(self, by_coroutine: bool = False) -> None:
        """Sends the request to the called model without waiting. ``next``, or ``first`` in a coroutine, waits for the response.

        ``by_coroutine``: True if a coroutine waits for the first response. False: the calling thread waits for it.
        """
        self._thread = 0 if by_coroutine else threading.get_ident()
        self._asked = 1
        self._server.begin(self)

    @property
    def thread(self) -> int:
        """The identifier of the thread that waits for a response; 0: no thread waits."""
        return self._thread if self.is_awaited else 0

    @property
    def is_awaited(self) -> bool:
        """True while a thread or a coroutine of the caller waits for a response."""
        return self._asked > self._answered

    def answered(self, result: Result | None, final: bool) -> None:
        """Passes a response to the caller, who gets it from ``next``. Only the worker's event loop may call this method.

        ``result``: the response, or None if the call ends without a further response. ``final``: whether the call ends now.
        """
        self._answered += 1
        self._came.put((result, final))
        first, self._first = self._first, None
        if first is not None:
            first()

    def next(self) -> tuple[Result | None, bool]:
        """Waits for the next response. Returns the response, and whether the call has ended.

        The response is None if the call ended without one.
        """
        self._thread = threading.get_ident()
        self._taken += 1
        self._asked = self._taken
        result, final = self._came.get()
        self._over = final
        if self.streams and not final:
            self._server.took(self)
        return result, final

    def first(self) -> asyncio.Task[tuple[Result | None, bool]]:
        """Returns a task that waits for the first response. Cancelling the task cancels the call.

        The task's result is the response, and whether the call has ended. The response is None if the call ended without one.
        """
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
        """Cancels the request. A call that has not ended ends with Cancelled. Idempotent."""
        if not self._over:
            self._server.cancel(self)

    def stop(self) -> None:
        """Asks the called model to end its stream of responses early. The caller still gets the responses that the model sends.

        Cancels the call if the called model cannot be asked, for example because the model has not begun to work on the call.
        """
        if not self._over:
            self._server.stop(self)

    def abandon(self) -> None:
        """Discards all further responses, while the called model continues. Do not call ``next`` any more."""
        if not self._over:
            self._over = True
            self._server.abandon(self)

    def __repr__(self) -> str:
        return f"<ModelCall to {self.prepared.model!r} by {self.caller!r}>"
