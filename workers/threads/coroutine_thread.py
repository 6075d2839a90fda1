"""Runs the coroutines of a model's code in a separate thread, which has an event loop and starts with the first coroutine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any


class CoroutineThread:
    """A thread that runs the coroutines of one model instance. Only the thread that created the object may use the object."""

    def __init__(self, name: str, code: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext) -> None:
        """Does not start the thread yet. ``name`` is the thread's name.

        ``code`` returns a context manager. All of the model's code in the thread runs within its ``with`` block.
        """
        self._name = name
        self._code = code
        #: Of the thread's loop, which a coroutine may stop as well: done once the thread is to end.
        self._closing: asyncio.Future[None] | None = None
        self._thread: threading.Thread | None = None

    @property
    def thread(self) -> int:
        """The thread's identifier (``threading.get_ident``). Starts the thread if it is not running."""
        self._begun()
        assert self._thread is not None
        return self._thread.ident or -1

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine in the thread, waits, and returns the result. Exceptions of the coroutine are raised unchanged."""
        return self._start(coroutine).result()

    def begin(self, coroutine: Coroutine[Any, Any, Any], ended: Callable[[BaseException | None], None]) -> None:
        """Starts a coroutine. At the end the thread calls ``ended`` with the exception that the coroutine raised, or None."""

        def done(future: concurrent.futures.Future[Any]) -> None:
            ended(concurrent.futures.CancelledError() if future.cancelled() else future.exception())

        self._start(coroutine).add_done_callback(done)

    def close(self) -> None:
        """Cancels coroutines that are still running, and ends the thread."""
        closing, self._closing = self._closing, None
        if closing is not None and self._thread is not None:
            closing.get_loop().call_soon_threadsafe(closing.set_result, None)
            self._thread.join()

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._begun())

    def _begun(self) -> asyncio.AbstractEventLoop:
        if self._closing is None:
            closing = asyncio.new_event_loop().create_future()
            self._thread = threading.Thread(target=self._main, args=(closing,), name=self._name, daemon=True)
            self._thread.start()
            self._closing = closing
        return self._closing.get_loop()

    def _main(self, closing: asyncio.Future[None]) -> None:
        loop = closing.get_loop()
        with self._code():
            asyncio.set_event_loop(loop)
            _run_until(closing)
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            _run_until(asyncio.gather(*tasks, return_exceptions=True))
            _run_until(loop.create_task(loop.shutdown_asyncgens()))
            loop.close()

    def __repr__(self) -> str:
        return f"<CoroutineThread {self._name}{'' if self._closing is None else ', running'}>"


def _run_until(future: asyncio.Future[Any]) -> None:
    loop = future.get_loop()
    future.add_done_callback(lambda _: loop.stop())
    while not future.done():
        # What a coroutine ends itself with is raised here as well.
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
