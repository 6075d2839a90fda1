"""A thread for long work beside the loop: loading models, compiling shapes. One job after the other, results to the inbox.

A job that stands aside lets the next one begin.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from tensord.workers.threads.inbox import Inbox

T = TypeVar("T")
#: So many jobs stand aside by themselves; the next ones hold the thread up.
_MAX_ASIDE = 16


class WorkThread:
    """Starts with its first job."""

    def __init__(self, name: str, inbox: Inbox) -> None:
        self._inbox = inbox
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._name = name
        #: Those that take jobs, and how many of them are too many since a job came back.
        self._threads: list[threading.Thread] = []
        self._surplus = 0
        self._lock = threading.Lock()
        #: Jobs that are in ``standing_aside``.
        self._aside = 0
        #: Threads that were started in their place.
        self._covering = 0
        #: Jobs that stand aside; the loop's.
        self.aside = 0
        #: Jobs given and not yet answered; the loop's.
        self.pending = 0

    def do(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Runs ``job`` there; ``done`` gets its result, or what it raised, on the loop."""
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
        """From a job: has the loop do something before it is over."""
        self._inbox.post(call)

    def step_aside(self) -> None:
        """A job waits for later ones: another thread takes these meanwhile."""
        self.aside += 1
        with self._lock:
            self._start()

    @contextlib.contextmanager
    def standing_aside(self) -> Iterator[None]:
        """From a job: it waits, or does what others need not wait for; another thread takes later jobs meanwhile."""
        with self._lock:
            stands = self._aside < _MAX_ASIDE
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
                self._jobs.put(lambda: None)

    def _cover(self) -> None:
        """A thread in the place of one that stands aside, once there is something for it to do."""
        with self._lock:
            if self._covering < self._aside and not self._jobs.empty():
                self._covering += 1
                self._start()

    def step_back(self) -> None:
        """It goes on: there is a thread too many, which ends with what it does."""
        self.aside -= 1
        with self._lock:
            self._surplus += 1
        # One that waits for a job looks.
        self._jobs.put(lambda: None)

    def finish(self) -> None:
        """Returns when everything that was given has been done, and the thread has ended. It takes nothing after that."""
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
