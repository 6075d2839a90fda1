"""Calls ``TritonPythonModel.is_ready()`` of all instances of a Triton Python model, one after another, in a separate thread.

If not all of them return True within five seconds, the model counts as not ready, as in Triton. Callers that ask while the
thread runs get the same answer. ``is_ready`` may run while ``execute`` runs, so a model can be ready while it runs a batch.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from tensord.workers.threads.inbox import Inbox

_log = logging.getLogger(__name__)
#: Seconds until a call counts as failed, as in Triton.
_SECONDS = 5.0


class IsReadyCalls:
    """Calls ``is_ready()`` of a version's instances.

    Instances' threads use ``join`` and ``leave``. The worker's loop uses the other methods.
    """

    def __init__(self, name: str, inbox: Inbox) -> None:
        self._name = name
        self._inbox = inbox
        self._models: list[Callable[[], object]] = []
        #: Callers, each with the time until which it waits (monotonic seconds).
        self._waiting: deque[tuple[float, Callable[[bool], None]]] = deque()
        self._thread: threading.Thread | None = None
        #: Ends when the first caller has waited long enough; None: nobody waits.
        self._timer: threading.Timer | None = None
        #: True if the log says that the running call is late.
        self._logged = False

    def join(self, is_ready: Callable[[], object]) -> None:
        """Adds the function ``is_ready`` to the functions that must return True for the model version to be ready."""
        self._models.append(is_ready)

    def leave(self, is_ready: Callable[[], object]) -> None:
        """Removes a function that was added by ``join``. Does nothing if this function was not added."""
        with contextlib.suppress(ValueError):
            self._models.remove(is_ready)

    def ask(self, answered: Callable[[bool], None]) -> None:
        """Asks the instances, in a separate thread, whether they are ready. The worker's loop then calls ``answered``.

        ``answered`` gets True if all instances say yes, and False if one does not or if 5 seconds have passed.
        """
        until = time.monotonic() + _SECONDS
        if self._thread is None:
            thread = threading.Thread(target=self._check, name=f"{self._name} is_ready", daemon=True)
            thread.start()
            self._thread = thread
        if self._timer is None:
            self._wait(_SECONDS)
        self._waiting.append((until, answered))

    def _wait(self, seconds: float) -> None:
        timer = threading.Timer(seconds, lambda: self._inbox.post(lambda: self._late(timer)))
        timer.daemon = True
        timer.start()
        self._timer = timer

    def _check(self) -> None:
        ready = False
        try:
            ready = all(is_ready() is True for is_ready in list(self._models))
        except BaseException:
            _log.exception("is_ready of model '%s' failed", self._name)
        self._inbox.post(lambda: self._checked(ready))

    def _checked(self, ready: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._thread = self._timer = None
        self._logged = False
        while self._waiting:
            self._waiting.popleft()[1](ready)

    def _late(self, timer: threading.Timer) -> None:
        # One that ended as the answer came says nothing of those who have asked since.
        if timer is not self._timer:
            return
        if not self._logged:
            _log.warning("is_ready of model '%s' has not answered within %g s: it is not ready", self._name, _SECONDS)
        self._logged, self._timer, now = True, None, time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            self._waiting.popleft()[1](False)
        try:
            if self._waiting:
                self._wait(self._waiting[0][0] - now)
        except RuntimeError:  # no thread can be started: nobody waits longer
            while self._waiting:
                self._waiting.popleft()[1](False)

    def __repr__(self) -> str:
        return f"<IsReadyCalls of {self._name} {'asked' if self._thread else 'idle'}>"
