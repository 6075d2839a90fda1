"""The page that the fronts of a protocol share: each writes its row, all see the sum."""

from __future__ import annotations

import os

import pytest

from tensord.config.options import MAX_PROCESSES
from tensord.daemon.control.refusals import OF_FRONTS
from tensord.daemon.control.shared_counters import CODES, SharedCounters
from tensord.daemon.processes.child import FrontProcess
from tensord.shm.control_records import Serve


def test_every_process_sees_every_row() -> None:
    ours = SharedCounters.create()
    theirs = SharedCounters(os.dup(ours.fd))
    first, last = ours.front(0), theirs.front(MAX_PROCESSES - 1)
    assert (first.total(), first.least(), last.least()) == (0, None, None)
    first.count(5)
    last.count(7)
    assert (first.own(), last.own()) == (5, 7)
    assert first.total() == last.total() == 12
    assert [theirs.connections(row) for row in (0, 1, MAX_PROCESSES - 1)] == [5, 0, 7]
    # Only who takes connections may be left some.
    assert (first.least(), last.least()) == (None, None)
    last.serve(True)
    assert (first.least(), last.least()) == (7, None)
    first.serve(True)
    assert (first.least(), last.least()) == (7, 5)
    ours.front(3).serve(True)
    assert (first.least(), last.least()) == (0, 0)
    ours.clear(3)
    ours.clear(MAX_PROCESSES - 1)
    assert (first.total(), first.least(), last.least()) == (5, None, 5)
    ours.close()
    theirs.close()


def test_dropped_traces_are_beside_everything_else() -> None:
    counters = SharedCounters.create()
    for row in (0, 1, MAX_PROCESSES - 1):
        words, at = counters.front(row).codes
        for place in range(max(map(len, CODES.values()))):
            words[at + place] = 1
        counters.front(row).drop_traces(64)
        counters.front(row).drop_traces(row)
    counters.clear(1)
    assert [counters.counts(row, "http").dropped_traces for row in (0, 1, 2, MAX_PROCESSES - 1)] == [
        64,
        65,
        0,
        63 + MAX_PROCESSES,
    ]
    assert set(counters.counts(1, "grpc").answers.values()) == {1}
    counters.close()


def test_a_front_knows_that_it_has_not_read_everything() -> None:
    """What was sent to a front that has died says nothing of its successor."""
    counters = SharedCounters.create()
    supervisor = FrontProcess("http", 1, counters, 7, lambda *_: None, lambda _: None)
    front, other = counters.front(1), counters.front(0)
    assert not front.is_behind()
    for _ in range(2):
        supervisor.send(Serve())
    assert (front.is_behind(), other.is_behind()) == (True, False)
    front.read = 1
    assert front.is_behind()
    front.read = 2
    assert not front.is_behind()
    counters.clear(1)
    assert not counters.front(1).is_behind()
    counters.close()


def test_its_size_is_fixed() -> None:
    """A front could otherwise take the page from under the others."""
    counters = SharedCounters.create()
    for byte_size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(counters.fd, byte_size)
    counters.close()


def test_another_descriptor() -> None:
    read, write = os.pipe()
    with pytest.raises(OSError):
        SharedCounters(read)
    os.close(read)
    os.close(write)


def prepared(counters: SharedCounters, row: int) -> tuple[int, int, int]:
    found = counters.counts(row, "http")
    return found.prepared_requests, found.prepared_numbered, found.prepared_evicted


def test_prepared_requests_are_counted_over_the_fronts_of_a_row() -> None:
    """The present count is the present front's; the total is that of all fronts of the row."""
    counters = SharedCounters.create()
    first, other = counters.front(0), counters.front(1)
    for numbered, evicted in ((1, 0), (2, 0), (1, 2)):
        first.note_number(numbered, evicted)
    other.note_number(1, 0)
    assert (prepared(counters, 0), prepared(counters, 1), prepared(counters, 2)) == (
        (1, 3, 2),
        (1, 1, 0),
        (0, 0, 0),
    )
    counters.clear(0)
    assert prepared(counters, 0) == (0, 3, 2)
    counters.front(0).note_number(1, 0)
    assert (prepared(counters, 0), prepared(counters, 1)) == ((1, 4, 2), (1, 1, 0))
    assert (counters.connections(0), set(counters.counts(0, "http").refused.values())) == (0, {0})
    counters.close()


@pytest.mark.parametrize("protocol", CODES)
def test_no_count_is_another_one(protocol: str) -> None:
    """Each reason of a refusal and each code has a place of its own, and none is another row's."""
    counters = SharedCounters.create()
    front = counters.front(1)
    front.count(1)
    front.note_number(1, 0)
    for number, refusal in enumerate(OF_FRONTS, 10):
        for _ in range(number):
            front.refuse(refusal)
    words, at = front.codes
    for number in range(len(CODES[protocol])):
        words[at + number] += 100 + number
    assert counters.counts(1, protocol).refused == {refusal: number for number, refusal in enumerate(OF_FRONTS, 10)}
    assert counters.counts(1, protocol).answers == {code: 100 + number for number, code in enumerate(CODES[protocol])}
    assert (counters.connections(1), prepared(counters, 1)) == (1, (1, 1, 0))
    for row in (0, 2):
        assert (counters.connections(row), prepared(counters, row)) == (0, (0, 0, 0))
        others = counters.counts(row, protocol)
        assert not any([*others.refused.values(), *others.answers.values()])
    counters.close()
