"""Cancels a long operation in another thread, such as loading a model, when nobody needs its result any more.

The worker's loop calls ``cancel``. The operation calls ``check`` between its steps, and uses ``interrupting`` for a step that
can be stopped. A step that cannot be stopped runs to its end.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from tensord.shm.errors import Cancelled

#: The reason that is told when there is no result.
REASON = "it was unloaded, or another load of it came, before it was ready"


class Cancellation:
    """Says whether one load of a model version is cancelled, and cancels it. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._interrupts: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Makes ``check`` raise Cancelled. Calls the function of each ``interrupting`` block that still runs. Idempotent."""
        with self._lock:
            self._cancelled = True
            interrupts, self._interrupts = self._interrupts, []
        for interrupt in interrupts:
            interrupt()

    def check(self) -> None:
        if self._cancelled:
            raise Cancelled(REASON)

    @contextlib.contextmanager
    def interrupting(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Makes ``cancel`` call ``interrupt`` if ``cancel`` is called during the ``with`` block.

        Raises Cancelled at the start of the block if ``cancel`` was called before.
        """
        with self._lock:
            self.check()
            self._interrupts.append(interrupt)
        try:
            yield
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._interrupts.remove(interrupt)

    def __repr__(self) -> str:
        return f"<Cancellation{' cancelled' if self._cancelled else ''}>"
