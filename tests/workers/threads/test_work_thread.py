"""Long work beside the loop: one job after the other, whatever becomes of it."""

from __future__ import annotations

import select
from collections.abc import Callable

from tensord.workers.threads.inbox import Inbox
from tensord.workers.threads.work_thread import WorkThread


def test_results_and_errors_arrive_on_the_loop() -> None:
    inbox = Inbox()
    thread = WorkThread("test", inbox)
    outcomes: list[object] = []

    def fail() -> int:
        raise ValueError("no")

    def leave() -> int:
        raise SystemExit(1)

    jobs: list[Callable[[], int]] = [lambda: 1, fail, leave, lambda: 2]
    for job in jobs:
        thread.do(job, outcomes.append)
    assert thread.pending == 4
    while thread.pending:
        assert select.select([inbox.fileno()], [], [], 600)[0]
        inbox.drain()
    assert outcomes[0] == 1
    assert isinstance(outcomes[1], ValueError)
    assert isinstance(outcomes[2], RuntimeError)
    assert outcomes[3] == 2
    inbox.close()
