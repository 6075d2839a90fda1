"""Asks a model with the newest inputs only, and returns its newest answer: inputs that come too fast are skipped.

put ─▶ two requests under way? ─ no ─▶ model ─▶ newest answer ─▶ get
             ╰─ yes: these inputs wait, and replace others that waited

``tensord_client`` has the same for a served model (``client/tensord_client/latest.py``), and the same tests run against both.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np

from tensord.shm.errors import Cancelled, DeadlineExceeded, ServingError

#: One that is computed, and one that waits for it where the model is: so the model never waits for the next inputs.
_UNDER_WAY = 2
#: An answer.
A = TypeVar("A")


class Latest(Generic[A]):
    """Sends only the newest inputs to a model, skipping those that come too fast, and returns its newest answer. Thread-safe."""

    def __init__(self, submit: Callable[[Mapping[str, Any]], concurrent.futures.Future[A]]) -> None:
        """Sends nothing yet. ``submit``: sends a request with the given inputs to the model; returns a future of its answer."""
        self._submit = submit
        self._changed = threading.Condition()
        self._under_way: dict[int, concurrent.futures.Future[A]] = {}
        self._waiting: tuple[int, Mapping[str, Any]] | None = None
        self._put = 0
        #: The number of the newest answer, and of the newest one that was taken.
        self._came = self._taken = 0
        self._newest: A | ServingError | None = None
        self._closed = False
        #: How many inputs were put, and never asked because newer ones came.
        self.replaced = 0

    def put(self, inputs: Mapping[str, Any]) -> None:
        """Sends inputs to the model. While two requests are under way the inputs wait, in place of older inputs that waited.

        The caller may change the arrays as soon as this returns.

        Raises: InvalidArgument: an input cannot be an array.  Cancelled: ``close`` was called.
        """
        with self._changed:
            if self._closed:
                raise Cancelled("it was closed")
            self._put += 1
            if len(self._under_way) >= _UNDER_WAY:
                self.replaced += self._waiting is not None
                self._waiting = self._put, _copied(inputs)
                return
            number = self._put
            self._under_way[number] = future = self._submit(inputs)
        self._watch(number, future)

    def _watch(self, number: int, future: concurrent.futures.Future[A]) -> None:
        future.add_done_callback(lambda future: self._over(number, future))

    def _over(self, number: int, future: concurrent.futures.Future[A]) -> None:
        """Stores the answer, or error, of an ended request for ``get`` if it is the newest, and sends inputs that wait.

        ``number``: the request has the inputs of this call of ``put``, counted from 1.
        """
        asked: concurrent.futures.Future[A] | None = None
        with self._changed:
            del self._under_way[number]
            if not future.cancelled() and number > self._came:
                error = future.exception()
                self._came = number
                self._newest = error if isinstance(error, ServingError) else future.result()
            if self._waiting is not None and not self._closed:
                number, inputs = self._waiting
                self._waiting = None
                try:
                    self._under_way[number] = asked = self._submit(inputs)
                except ServingError as error:
                    self._came, self._newest = number, error
            self._changed.notify_all()
        if asked is not None:
            self._watch(number, asked)

    def get(self, timeout: float | None = None) -> A:
        """Waits for an answer that is newer than the last one returned, and returns it. ``timeout``: seconds; None: no limit.

        Raises: ServingError: the newest answer is this error.  DeadlineExceeded: no answer came in time.  Cancelled: ``close``
          was called.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._came == self._taken:
                if self._closed:
                    raise Cancelled("it was closed")
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise DeadlineExceeded
                self._changed.wait(left)
            self._taken = self._came
            newest, self._newest = self._newest, None
        if isinstance(newest, ServingError):
            raise newest
        assert newest is not None
        return newest

    @property
    def behind(self) -> int:
        """Returns how many inputs wait, are under way at the model, or have an answer that ``get`` can return.

        Inputs that newer ones have replaced do not count, nor do requests that are older than the answer last returned.
        """
        with self._changed:
            return len([number for number in self._under_way if number > self._taken]) + (
                (self._waiting is not None) + (self._came > self._taken)
            )

    def close(self) -> None:
        """Cancels the requests under way and drops inputs that wait. Idempotent.

        From then on ``put`` raises Cancelled, and so does ``get`` once it has returned an answer that was there.
        """
        with self._changed:
            self._closed = True
            self._waiting = None
            under_way = list(self._under_way.values())
            self._changed.notify_all()
        for future in under_way:
            future.cancel()

    def __enter__(self) -> Latest[A]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _copied(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the arrays in inputs, also in nested mappings, because the caller may change them afterwards."""
    return {
        name: _copied(value) if isinstance(value, Mapping) else np.array(value) if hasattr(value, "dtype") else value
        for name, value in inputs.items()
    }
