"""The rules of a submitter in every order of events: a request ends once, with the right error, and runs as often as it may."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensord.shm.common.submission import UNKNOWN_MODEL, Submission, least_busy
from tensord.shm.errors import NotFound

#: What the worker does that has the request, what is heard of workers, and what the caller does.
EVENTS = ("begins", "responds", "answers", "unloads", "dies", "is fenced", "is replaced", "cancels", "waited too long")
_LONGEST = 6


class Request(Submission):
    def __init__(self) -> None:
        self.cancelled = self.answered = False
        self.strikes = 0
        self.ends: list[str] = []
        #: The workers that it was sent to, and those that have begun it.
        self.sent: list[Worker] = []
        self.begun: list[Worker] = []
        #: How many had it when it was given up, or had its first response.
        self.most = 9
        #: True: a worker has refused it, and another one had its model.
        self.was_elsewhere = False


class Worker:
    def __init__(self) -> None:
        self.in_flight: list[Request] = []
        self.usable = self.alive = self.has_model = True


class Submitter:
    """Drives the rules for one request.

    ``is_front``: as a front does, which may send again only after the fence and knows then what was begun; else as a client does.
    """

    def __init__(self, is_front: bool, is_pure: bool) -> None:
        self.is_front, self.is_pure = is_front, is_pure
        self.workers = [Worker()]
        self.request = Request()
        self.waits = False
        self.send()

    def send(self) -> None:
        worker = least_busy([each for each in self.workers if each.usable])
        self.waits = worker is None
        if worker is not None:
            self.put(worker)
            if not worker.has_model:
                self.refuse(worker)

    def put(self, worker: Worker) -> None:
        worker.in_flight.append(self.request)
        self.request.sent.append(worker)

    def refuse(self, worker: Worker) -> None:
        worker.in_flight.clear()
        refusal = NotFound(UNKNOWN_MODEL + "'m' is not found")
        where = [each for each in self.workers if each.usable and each.has_model]
        if where and self.request.may_be_elsewhere(refusal.code, refusal.message):
            self.put(where[0])
        else:
            self.request.was_elsewhere |= bool(where) and not self.request.answered
            self.end("is unknown")

    def end(self, how: str) -> None:
        if not self.request.cancelled:
            self.request.ends.append(how)

    def ended(self, worker: Worker) -> None:
        worker.usable = False
        while worker.in_flight:
            request = worker.in_flight.pop()
            begun = worker in request.begun or not self.is_front
            if request.cancelled:
                continue
            if error := request.after_end("it ended", begun, self.is_pure):
                self.end(error.message)
            else:
                self.send()

    def happens(self, event: str) -> bool:
        """Returns whether the event could happen."""
        request, worker = self.request, next((each for each in self.workers if each.in_flight), self.workers[-1])
        has_it = worker.alive and bool(worker.in_flight)
        runs = has_it and worker in request.begun
        if event == "begins" and has_it and not runs:
            request.begun.append(worker)
        elif event == "responds" and runs:
            request.answered, request.most = True, len(request.sent)
        elif event == "answers" and runs:
            worker.in_flight.clear()
            self.end("answered")
        elif event == "unloads" and worker.alive and worker.has_model:
            worker.has_model = False
            if has_it and (request.answered or not runs):
                self.refuse(worker)
        elif event == "dies" and worker.alive:
            worker.alive = worker.usable = False
            if not self.is_front:
                self.ended(worker)
        elif event == "is fenced" and self.is_front and not worker.alive:
            self.ended(worker)
        elif event == "is replaced" and len(self.workers) < 4:
            self.workers.append(Worker())
            if self.waits:
                self.send()
        elif event in ("cancels", "waited too long") and not request.ends and not request.cancelled:
            self.end(event)
            request.cancelled, self.waits, request.most = True, False, len(request.sent)
        else:
            return False
        return True

    def wrong(self) -> Iterator[str]:
        """Yields what is wrong, after ending what is left."""
        for event in ("is fenced", "is replaced", "begins", "answers"):
            self.happens(event)
        request, dead = self.request, sum(not worker.alive for worker in self.workers)
        end, runs = (request.ends or ["never ends"])[0], len(request.begun)
        if len(request.ends) != 1:
            yield f"it ends {len(request.ends)} times"
        if self.waits or any(worker.in_flight for worker in self.workers):
            yield "something is in flight"
        if runs > (2 if self.is_pure else 1) or len(request.sent) > request.most:
            yield "it is sent once more than it may be"
        begun = [each for each in (request.begun if self.is_front else request.sent) if not each.alive]
        if end.endswith("which may not be run twice") and not (begun and (request.answered or not self.is_pure)):
            yield "it might have been sent again"
        if "given up" in end and (dead < 2 or not self.is_pure):
            yield "it was given up too early"
        if end == "is unknown" and request.was_elsewhere:
            yield "a worker has its model"


def histories(before: tuple[str, ...], is_front: bool, is_pure: bool) -> Iterator[tuple[tuple[str, ...], Submitter]]:
    """Yields every history that begins with ``before``, and in which each event can happen."""
    submitter = Submitter(is_front, is_pure)
    if all(submitter.happens(event) for event in before):
        yield before, submitter
        for event in EVENTS if len(before) < _LONGEST else ():
            yield from histories((*before, event), is_front, is_pure)


@pytest.mark.parametrize("is_front", [True, False], ids=["front", "client"])
@pytest.mark.parametrize("is_pure", [True, False], ids=["pure", "not pure"])
def test_every_order_of_events(is_front: bool, is_pure: bool) -> None:
    count = 0
    for history, submitter in histories((), is_front, is_pure):
        assert [*submitter.wrong()] == [], history
        count += 1
    assert count > 1000
