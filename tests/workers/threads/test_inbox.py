"""Calls posted by threads run on the loop, once, in order, and wake it."""

from __future__ import annotations

import select
import threading

from tensord.workers.threads.inbox import Inbox


def test_posted_calls_run_in_order() -> None:
    inbox = Inbox()
    ran: list[int] = []
    threads = [
        threading.Thread(target=lambda: [inbox.post(lambda i=i: ran.append(i)) for i in range(200)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    while len(ran) < 800:
        assert select.select([inbox.fileno()], [], [], 600)[0]
        inbox.drain()
    for thread in threads:
        thread.join()
    assert sorted(ran) == sorted(list(range(200)) * 4)
    inbox.drain()
    assert not select.select([inbox.fileno()], [], [], 0)[0]
    inbox.close()
    inbox.close()
    inbox.post(lambda: None)


def test_a_call_posted_by_a_call_waits_for_the_next_turn() -> None:
    inbox = Inbox()
    ran: list[str] = []

    def first() -> None:
        ran.append("first")
        inbox.post(lambda: ran.append("second"))

    inbox.post(first)
    inbox.drain()
    assert ran == ["first"]
    assert select.select([inbox.fileno()], [], [], 0)[0]
    inbox.drain()
    assert ran == ["first", "second"]
    inbox.close()


def test_a_call_that_may_wait_does_not_wake_a_loop_that_looks() -> None:
    inbox = Inbox()
    ran: list[str] = []

    def woken() -> bool:
        return bool(select.select([inbox.fileno()], [], [], 0)[0])

    assert not inbox.look(True)
    inbox.post(lambda: ran.append("may wait"), soon=False)
    assert not woken()
    # A loop that is about to sleep sees it.
    assert inbox.look(False)
    inbox.run()
    assert ran == ["may wait"]
    assert not inbox.look(False)
    inbox.post(lambda: ran.append("wakes"), soon=False)
    assert woken()
    inbox.drain()
    assert not woken()
    assert not inbox.look(True)
    inbox.post(lambda: ran.append("soon"))
    assert woken()
    # It looks before it was told.
    inbox.run()
    assert ran == ["may wait", "wakes", "soon"]
    inbox.drain()
    assert not woken()
    inbox.close()
