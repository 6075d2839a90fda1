"""A thread for long work beside the loop: loading models, compiling shapes. One job after the other, results to the inbox."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from workers.threads.inbox import Inbox

T = TypeVar("T")


class WorkThread:
    """Starts with its first job."""

    def __init__(self, name: str, inbox: Inbox) -> None:
        self._inbox = inbox
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        #: Jobs given and not yet answered; the loop's.
        self.pending = 0

    def do(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Runs ``job`` there; ``done`` gets its result, or what it raised, on the loop."""
        if not self._thread.is_alive():
            self._thread.start()
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

    def tell(self, call: Callable[[], None]) -> None:
        """From a job: has the loop do something before it is over."""
        self._inbox.post(call)

    def finish(self) -> None:
        """Returns when everything that was given has been done, and the thread has ended. It takes nothing after that."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            # An idle thread keeps nothing of its last job.
            del job

    def __repr__(self) -> str:
        return f"<WorkThread {self._thread.name} pending={self.pending}>"
