"""The status page: what a reader finds after the writer is gone."""

from __future__ import annotations

import os

import pytest

from tensord.shm.errors import InvalidArgument
from tensord.shm.segment import Segment
from tensord.shm.status_page import IDS_PER_SLOT, SLOTS, StatusPage, WorkerState


def test_what_the_worker_notes_is_what_others_read() -> None:
    page = StatusPage.create()
    reader = StatusPage.attach(os.dup(page.fd))
    assert reader.state == (WorkerState.STARTING, 0)
    page.begin(0, [(1, 2), (3, 2**63 - 1)], 2**64 - 1, 5)
    page.beat(7)
    page.begin(SLOTS - 1, [(9, 9)], 1, 5)
    page.begin(SLOTS, [(4, 4)], 1, 5)
    page.close()
    assert reader.state == (WorkerState.EXECUTING, 5)
    assert reader.last_beat_ns == 7
    assert reader.oldest() == (5, 1)
    assert reader.executing() == {(1, 2), (3, 2**63 - 1), (9, 9)}
    reader.close()


def test_nobody_else_writes_to_it() -> None:
    page = StatusPage.create()
    with pytest.raises(InvalidArgument, match="mapping it writable"):
        Segment.attach(os.dup(page.fd), len(page.memory), writable=True)
    page.beat(7)
    assert page.last_beat_ns == 7
    page.close()


def test_the_loop_is_executing_while_its_slot_is_in_use() -> None:
    page = StatusPage.create()
    page.set_state(WorkerState.IDLE, 1)
    page.begin(3, [(1, 2)], 1, 2)
    assert page.state == (WorkerState.IDLE, 1)
    page.begin(0, [], 1, 3)
    page.end(3, 4)
    assert page.state == (WorkerState.EXECUTING, 3)
    page.end(0, 5)
    assert (page.state, page.last_beat_ns) == ((WorkerState.IDLE, 5), 5)
    page.resting = WorkerState.STOPPING
    page.begin(0, [], 1, 6)
    page.end(0, 7)
    assert page.state == (WorkerState.STOPPING, 7)
    page.close()


def test_a_batch_that_ended_is_gone_and_a_huge_one_is_cut() -> None:
    page = StatusPage.create()
    page.begin(3, [(1, i) for i in range(IDS_PER_SLOT + 50)], 1, 5)
    assert len(page.executing()) == IDS_PER_SLOT
    page.end(3, 9)
    page.begin(3, [(1, 999)], 1, 5)
    assert page.executing() == {(1, 999)}
    page.end(3, 9)
    page.end(SLOTS, 9)
    assert page.executing() == set()
    page.close()
