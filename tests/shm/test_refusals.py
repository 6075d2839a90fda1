"""One line a minute, whatever is refused; what it says adds up."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.shm.refusals import Refusal, RefusalLog

SECOND = 10**9


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    log = RefusalLog()
    assert log.due_ns is None
    log.settle(5 * SECOND)
    assert lines(caplog) == []
    for _ in range(9):
        log.note("slow", Refusal.QUEUE_FULL.value, 7 * SECOND)
    log.note("other", Refusal.NO_WORKER.value, 7 * SECOND)
    log.note("", Refusal.REQUEST_ROOM.value, 7 * SECOND)
    # What comes in the same moment is in the same line.
    log.settle(7 * SECOND + SECOND // 2)
    assert lines(caplog) == []
    assert log.due_ns == 8 * SECOND
    log.settle(8 * SECOND)
    assert lines(caplog) == [
        "refused with 503 in the last 1 s: 9 for model 'slow' (queue_full), 1 for model 'other' (no_worker), 1 (request_room)"
    ]
    assert log.due_ns is None
    log.note("slow", Refusal.QUEUE_FULL.value, 9 * SECOND)
    log.settle(20 * SECOND)
    assert lines(caplog) == []
    assert log.due_ns == 68 * SECOND
    log.settle(68 * SECOND)
    assert lines(caplog) == ["refused with 503 in the last 59 s: 1 for model 'slow' (queue_full)"]


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(Refusal), st.integers(0, 200))))
def test_the_lines_add_up(refused: list[tuple[int, Refusal, int]]) -> None:
    """However many models, seconds and reasons: every request is in one line, the lines are apart and short."""
    log, now_ns, said = RefusalLog(), 0, list[tuple[int, str]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensord.shm.refusals._log.warning", lambda text, *given: said.append((now_ns, text % given)))
        for model, refusal, seconds in refused:
            now_ns += seconds * SECOND
            log.settle(now_ns)
            log.note(f"m{model}", refusal.value, now_ns)
        if log.due_ns is not None:
            now_ns = max(now_ns, log.due_ns)
            log.settle(now_ns)
    assert log.due_ns is None
    counts = [int(number) for _, line in said for number in re.findall(r"(?:: |, )(\d+) (?:for|others|\()", line)]
    assert sum(counts) == len(refused)
    assert all(later - earlier >= 60 * SECOND for (earlier, _), (later, _) in itertools.pairwise(said))
    assert all(len(line) < 1000 for _, line in said)
