"""Runs long functions, such as loading a model, one by one in a thread, and passes their results to the worker's loop."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from tensord.workers.threads.inbox import Inbox

T = TypeVar("T")
#: Jobs that may stand aside at a time; further ones keep the thread busy.
_MAX_ASIDE = 16


class WorkThread:
    """A thread that calls functions one after the other. It is started when the first function is queued."""

    def __init__(self, name: str, inbox: Inbox) -> None:
        self._inbox = inbox
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._name = name
        #: Threads that take jobs, and how many of them are to end since a job came back.
        self._threads: list[threading.Thread] = []
        self._surplus = 0
        self._lock = threading.Lock()
        #: Jobs that are in ``standing_aside``.
        self._aside = 0
        #: Threads that were started in the place of such jobs.
        self._covering = 0
        #: Jobs given and not yet answered; used on the loop only.
        self.pending = 0

    def do(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Queues ``job`` for the thread. When it has ended, the worker's loop calls ``done`` with its result or exception."""
        if not self._threads:
            self._start()
        self.pending += 1

        def finish(outcome: T | Exception) -> None:
            self.pending -= 1
            done(outcome)

        def work() -> None:
            try:
                outcome: T | Exception = job()
            except Exception as error:
                outcome = error
            except BaseException as error:  # sys.exit() in somebody's code ends the job, not the thread
                outcome = RuntimeError(f"it ended with {type(error).__name__}")
            self._inbox.post(lambda: finish(outcome))

        self._jobs.put(work)
        self._cover()

    def tell(self, call: Callable[[], None]) -> None:
        """Makes the worker's loop call ``call`` later. Functions that this thread runs may use it. Does not wait."""
        self._inbox.post(call)

    @contextlib.contextmanager
    def standing_aside(self, always: bool = False) -> Iterator[None]:
        """Lets another thread run queued functions while the calling function waits in the ``with`` block.

        If 16 functions are in such blocks already, no other thread is started, unless ``always`` is True.
        """
        with self._lock:
            stands = always or self._aside < _MAX_ASIDE
            self._aside += stands
        self._cover()
        try:
            yield
        finally:
            with self._lock:
                self._aside -= stands
                if surplus := self._covering > self._aside:
                    self._covering -= 1
                    self._surplus += 1
            if surplus:
                # Wakes a thread that waits for a job, so that it sees that it is to end.
                self._jobs.put(lambda: None)

    def _cover(self) -> None:
        with self._lock:
            if self._covering < self._aside and not self._jobs.empty():
                self._covering += 1
                self._start()

    def finish(self) -> None:
        """Waits until all queued functions have returned, and ends the thread that calls them. Do not call ``do`` afterwards."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=self._main, name=self._name, daemon=True))
        self._threads[-1].start()

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            # An idle thread keeps nothing of its last job.
            del job
            with self._lock:
                if self._surplus:
                    self._surplus -= 1
                    return

    def __repr__(self) -> str:
        return f"<WorkThread {self._name} pending={self.pending}>"
