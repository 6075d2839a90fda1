"""Sends a model the newest inputs only, and returns the newest answer. Inputs that the model has no time for are dropped.

put ─▶ two requests in flight? ─ no ─▶ model ─▶ newest answer ─▶ get
             ╰─ yes: the inputs are stored in place of inputs stored before, and sent when a request ends
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import numpy as np

from .errors import Cancelled, DeadlineExceeded
from .forks import forgotten_by_children
from .tensors import array

#: One request is executed while the next waits at the server: so the model never waits for the next inputs.
_UNDER_WAY = 2
#: An answer.
A = TypeVar("A")


class Newest(Generic[A]):
    """Base class of ``Latest`` and ``AsyncLatest``. It sends the inputs of ``put``, and stores the newest answer for ``get``."""

    def __init__(self, submit: Callable[[Mapping[str, Any]], Any]) -> None:
        """Stores ``submit``, which sends given inputs to the model and returns a future of the model's answer."""
        self._submit = submit
        self._put = 0
        #: The number of the newest answer, and of the newest one that ``get`` has returned.
        self._came = self._taken = 0
        self._closed = False
        #: How many inputs were put but never sent, because newer ones replaced them.
        self.replaced = 0
        #: How many answers and errors came that ``get`` never returns, because newer ones came before it was called.
        self.missed = 0
        self.forget()
        forgotten_by_children(self)

    def forget(self) -> None:
        """Removes all requests and answers from this object. It is also called in a child process after a fork."""
        self._changed = threading.Condition()
        #: Futures of the requests in flight, by number.
        self._under_way: dict[int, Any] = {}
        self._waiting: tuple[int, Mapping[str, Any]] | None = None
        self._newest: A | BaseException | None = None
        self._taken = self._came

    def put(self, inputs: Mapping[str, Any]) -> None:
        """Sends inputs to the model at once. If two requests are in flight already, it stores a copy to send next.

        The copy replaces inputs that were stored before. The caller may change the arrays as soon as this returns.

        Raises: InvalidArgument: an input cannot be an array.  Cancelled: ``close`` was called.
        """
        with self._changed:
            if self._closed:
                raise Cancelled("it was closed")
            copied = _copied(inputs) if len(self._under_way) >= _UNDER_WAY else None
            self._put = number = self._put + 1
            self.replaced += self._waiting is not None
            if copied is not None:
                self._waiting = number, copied
                return
            self._waiting = None
            self._under_way[number] = future = self._submit(inputs)
        self._watch(number, future)

    def _watch(self, number: int, future: Any) -> None:
        future.add_done_callback(lambda future: self._over(number, future))

    def _over(self, number: int, future: Any) -> None:
        asked: Any = None
        with self._changed:
            del self._under_way[number]
            if not future.cancelled():
                self._keep(number, future.exception() or future.result())
            # One that is cancelled ends with its event loop.
            if self._waiting is not None and not (self._closed or future.cancelled()):
                number, inputs = self._waiting
                self._waiting = None
                try:
                    self._under_way[number] = asked = self._submit(inputs)
                except Exception as error:
                    self._keep(number, error)
            self._notify()
        if asked is not None:
            self._watch(number, asked)

    def _keep(self, number: int, outcome: Any) -> None:
        """Stores ``outcome``, the answer or error of the ``number``-th ``put``, unless a later ``put`` was already answered."""
        self.missed += number < self._came or self._came != self._taken
        if number > self._came:
            self._came, self._newest = number, outcome

    def _notify(self) -> None:
        raise NotImplementedError

    def _has_newer(self) -> bool:
        if self._came == self._taken and self._closed:
            raise Cancelled("it was closed")
        return self._came != self._taken

    def _take(self) -> A:
        self._taken = self._came
        newest, self._newest = self._newest, None
        if isinstance(newest, BaseException):
            raise newest
        assert newest is not None
        return newest

    @property
    def behind(self) -> int:
        """Returns how many inputs are stored or in flight, plus 1 if there is an answer that ``get`` has not returned yet.

        Inputs do not count if ``get`` has already returned the answer to inputs that were put later.
        """
        with self._changed:
            return len([number for number in self._under_way if number > self._taken]) + (
                (self._waiting is not None) + (self._came > self._taken)
            )

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            self._waiting = None
            under_way = list(self._under_way.values())
            self._notify()
        for future in under_way:
            future.cancel()


class Latest(Newest[A], AbstractContextManager["Latest[A]"]):
    """Sends inputs to a model with ``put``, which does not wait. Returns answers with ``get``, which waits for an answer.

    While two requests are in flight, ``put`` only stores the inputs, in place of inputs stored before, to send them next.
    If several answers have come, ``get`` returns only the answer to the inputs that were put last.
    """

    def _notify(self) -> None:
        self._changed.notify_all()

    def get(self, timeout: float | None = None) -> A:
        """Waits for an answer to inputs that were put later than those of the last answer returned, and returns it.

        If several answers have come, returns only the answer to the inputs that were put last.

        Args:
          timeout: the seconds to wait, or None for no limit.

        Raises: ServingError: the answer is an error.  DeadlineExceeded: no answer came in time.  Cancelled: ``close`` was
          called, and there is no such answer.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._has_newer():
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise DeadlineExceeded
                self._changed.wait(left)
            return self._take()

    def close(self) -> None:
        """Cancels the requests in flight. ``put`` then raises Cancelled, and so does ``get`` if it has no new answer.

        Idempotent.
        """
        self._end()

    def __exit__(self, *_: object) -> None:
        self.close()


def _copied(value: Any, name: str = "") -> Any:
    """Returns nested inputs with copies of all arrays on the host. Raises InvalidArgument as ``array`` of tensors.py does."""
    if isinstance(value, Mapping):
        return {key: _copied(each, str(key)) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return getattr(value, "_make", list)(_copied(each, name) for each in value)
    if isinstance(value, np.generic):
        return value  # nobody can change it
    if hasattr(value, "__array__") or hasattr(value, "__dlpack__"):
        made = array(name, value, None)
        return np.array(made) if isinstance(made, np.ndarray) else made
    return value
