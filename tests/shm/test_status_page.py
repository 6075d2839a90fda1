"""The status page: what a reader finds after the writer is gone."""

from __future__ import annotations

import os

from tensord.shm.status_page import IDS_PER_SLOT, SLOTS, StatusPage, WorkerState


def test_what_the_worker_notes_is_what_others_read() -> None:
    page = StatusPage.create()
    reader = StatusPage.attach(os.dup(page.fd))
    assert reader.state == (WorkerState.STARTING, 0)
    page.set_state(WorkerState.EXECUTING, 5)
    page.beat(7)
    page.begin(0, [(1, 2), (3, 2**63 - 1)], 2**64 - 1, 5)
    page.begin(SLOTS - 1, [(9, 9)], 1, 5)
    page.begin(SLOTS, [(4, 4)], 1, 5)
    page.close()
    assert reader.state == (WorkerState.EXECUTING, 5)
    assert reader.last_beat_ns == 7
    assert reader.oldest() == (5, 1)
    assert reader.executing() == {(1, 2), (3, 2**63 - 1), (9, 9)}
    reader.close()


def test_a_batch_that_ended_is_gone_and_a_huge_one_is_cut() -> None:
    page = StatusPage.create()
    page.begin(3, [(1, i) for i in range(IDS_PER_SLOT + 50)], 1, 5)
    assert len(page.executing()) == IDS_PER_SLOT
    page.end(3)
    page.begin(3, [(1, 999)], 1, 5)
    assert page.executing() == {(1, 999)}
    page.end(3)
    page.end(SLOTS)
    assert page.executing() == set()
    page.close()
