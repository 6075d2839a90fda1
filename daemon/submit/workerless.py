"""Requests in flight that no worker can run now: in order of arrival, each with the time it gives up."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tensord.daemon.submit.choice import Choice
from tensord.daemon.submit.pending import Pending
from tensord.shm.device_names import number_of
from tensord.shm.errors import Unavailable
from tensord.shm.messages import PreparedRequest


class Workerless:
    """One per front. ``in_flight``: all of its requests, by id; ``seconds``: how long one waits at most."""

    def __init__(self, in_flight: Mapping[int, Pending], choice: Choice, seconds: float) -> None:
        self._in_flight = in_flight
        self._choice = choice
        self._seconds = seconds
        self._deadlines: dict[Pending, float] = {}

    def add(self, pending: Pending, now: float) -> None:
        """There is no worker for it."""
        self._deadlines[pending] = now + self._seconds

    def retry(self, dispatch: Callable[[Pending], None]) -> None:
        """There may be one now. ``dispatch`` sends a request, or adds it again."""
        waiting, self._deadlines = self._deadlines, {}
        for pending, deadline in waiting.items():
            if not self._ended(pending):
                dispatch(pending)
                if pending in self._deadlines:
                    self._deadlines[pending] = deadline  # it waits since it came, not since we looked

    def expired(self, now: float) -> list[Pending]:
        """Takes out what waited too long."""
        late: list[Pending] = []
        for pending, deadline in list(self._deadlines.items()):
            if deadline > now and not self._ended(pending):
                break
            del self._deadlines[pending]
            if not self._ended(pending):
                late.append(pending)
        return late

    def refusal(self, prepared: PreparedRequest) -> Unavailable:
        """What one that waited too long is answered."""
        gpu = self._choice.gpu_of(prepared)
        where = f" on GPU {number_of(gpu)}, where its regions are," if gpu else ""
        state = self._choice.state_of(prepared)
        if state is not None and state.state == "LOADING":
            return loading(prepared.model, self._seconds)
        return Unavailable(f"no worker was ready for model '{prepared.model}'{where} within {self._seconds:g} s")

    def _ended(self, pending: Pending) -> bool:
        return pending.record.request_id not in self._in_flight

    def __len__(self) -> int:
        return len(self._deadlines)

    def __repr__(self) -> str:
        return f"<Workerless {len(self._deadlines)} requests>"


def loading(model: str, seconds: float) -> Unavailable:
    """Makes the error for a request that waited in vain for a model to be loaded."""
    return Unavailable(f"model '{model}' is still being loaded after {seconds:g} s; ask again later")
