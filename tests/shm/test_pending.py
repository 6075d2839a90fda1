"""A request under way, whatever happens to it and in whatever order: it ends once, and whoever waits for it is told so."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from tensord.shm.common.errors import Cancelled, DeadlineExceeded, Internal, ServingError, Unavailable
from tensord.shm.common.pending import Deadlines, Pending, WaitEnded

EVENTS = ("response", "last", "error", "cancel", "late", "fork", "callback")
#: What ends a request, and the error that its caller gets.
ENDS = {"last": None, "error": Internal, "cancel": Cancelled, "late": DeadlineExceeded, "fork": Unavailable}


class Scripted(Pending[str]):
    """A request to which one event after the other happens; in ``wait`` the rest of them."""

    def __init__(self, events: tuple[str, ...]) -> None:
        super().__init__("m", None, Deadlines())
        self.left = list(events)
        self.withdrawn = 0
        self.called: list[int] = []
        self.added = 0

    def happens(self) -> None:
        event = self.left.pop(0) if self.left else "last"
        if self._ended and event in ("response", "last", "error"):
            return  # a transport says nothing more
        if event == "response":
            self.add(f"{len(self.left)}")
        elif event == "last":
            self.add("last")
            self.end()
        elif event == "error":
            self.fail(Internal("it failed"))
        elif event == "callback":
            self.added += 1
            number = self.added
            self.add_done_callback(lambda _: self.called.append(number))
        else:
            {"cancel": self.cancel, "late": self.expire, "fork": self.forget}[event]()
        self.notify()
        self.call_back()

    def wait(self, until: float | None) -> None:
        self.happens()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon(self.happens)

    def withdraw(self) -> None:
        self.withdrawn += 1


def expected(events: tuple[str, ...]) -> tuple[list[str], type[ServingError] | None, int, list[int]]:
    """Returns what a caller gets who looks at the end: responses, an error; how often nobody waits; which callbacks run."""
    responses: list[str] = []
    end: str | None = None
    called: list[int] = []
    waiting: list[int] = []
    withdrawn = added = 0
    for at, event in enumerate((*events, "last")):
        if event == "callback":
            added += 1
            (waiting if end is None else called).append(added)
        elif event == "fork":
            responses, end, waiting = [], "fork", []
        elif end is None:
            if event in ("response", "last"):
                responses.append("last" if event == "last" else f"{len(events) - at - 1}")
            if event in ("cancel", "late"):
                responses, withdrawn = [], 1
            if event in ENDS:
                end, called, waiting = event, [*called, *waiting], []
    assert end is not None
    return responses, ENDS[end], withdrawn, called


def test_every_order_of_events() -> None:
    for count in range(6):
        for events in itertools.product(EVENTS, repeat=count):
            pending = Scripted(events)
            while pending.left:
                was_done = pending.done()
                pending.happens()
                assert pending.done() or not was_done, events
            responses, error, withdrawn, called = expected(events)
            got: list[str] = []
            raised: type[ServingError] | None = None
            try:
                got.extend(pending.responses())
            except ServingError as failed:
                raised = type(failed)
            assert (got, raised, pending.withdrawn, sorted(pending.called)) == (responses, error, withdrawn, called), (
                events
            )
            assert pending.done(), events


@pytest.mark.parametrize("way", ["thread", "task"])
def test_who_waits_gets_the_first_response_or_the_end(way: str) -> None:
    """And the same each time; the request is over then, whatever comes behind."""

    async def awaited(pending: Scripted) -> str:
        return await pending

    # A task that waits in a process is not in one that is forked off it.
    for events in itertools.product(EVENTS if way == "thread" else set(EVENTS) - {"fork"}, repeat=3):
        pending = Scripted(events)
        got: list[Any] = []
        for _ in range(2):
            try:
                got.append(pending.result() if way == "thread" else asyncio.run(awaited(pending)))
            except ServingError as error:
                got.append(error)
        assert got[0] is got[1], events
        first = next((event for event in events if event != "callback"), "last")
        kind = ENDS.get(first)
        assert got[0] == ("last" if first == "last" else got[0]) if kind is None else type(got[0]) is kind, events


def test_a_wait_that_ends_gives_the_request_up() -> None:
    class Late(Scripted):
        def wait(self, until: float | None) -> None:
            raise WaitEnded

    pending = Late(())
    with pytest.raises(DeadlineExceeded):
        pending.result(0.001)
    assert pending.withdrawn == 1
