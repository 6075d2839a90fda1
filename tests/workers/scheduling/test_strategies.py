"""Rows of the strategy "direct": which slots run together, and when."""

from __future__ import annotations

import pytest

from tensord.workers.scheduling.sequence import Controls, LiveSequence, Sequenced, Slot
from tensord.workers.scheduling.sequence_batcher import DirectBatcher, DirectRules
from tests.invariants import check_invariants


def ready(batcher: DirectBatcher[Sequenced], number: int, key: str, arrived_ns: int) -> LiveSequence[Sequenced]:
    live: LiveSequence[Sequenced] = LiveSequence(number + 1, number)
    live.slot = Slot(number, 0)
    live.waiting.append(request := Sequenced(key, arrived_ns, Controls(number + 1, True, False)))
    request.live = live
    batcher.ready(live)
    return live


NO_DELAY = DirectRules(4)
WAITS = DirectRules(4, 10, 3)


@pytest.mark.parametrize(
    ("why", "rules", "slots", "now", "due", "batch"),
    [
        ("nothing is ready", NO_DELAY, [], 5, None, []),
        ("whatever is ready, by slots", NO_DELAY, [(2, "a", 1), (0, "a", 2)], 5, 1, [0, 2]),
        ("of the shape that is ready longest", NO_DELAY, [(2, "b", 1), (0, "a", 2), (3, "b", 3)], 5, 1, [2, 3]),
        ("a delay without utilization is none", DirectRules(4, 10, 0), [(0, "a", 1)], 5, 1, [0]),
        ("too few wait", WAITS, [(0, "a", 1), (1, "a", 2)], 5, 11, []),
        ("but not for ever", WAITS, [(0, "a", 1), (1, "a", 2)], 11, 11, [0, 1]),
        ("the oldest counts", WAITS, [(0, "a", 4), (1, "a", 2)], 5, 12, []),
        ("enough do not wait", WAITS, [(0, "a", 1), (1, "a", 2), (3, "a", 3)], 5, 1, [0, 1, 3]),
    ],
)
def test_decisions(
    why: str, rules: DirectRules, slots: list[tuple[int, str, int]], now: int, due: int | None, batch: list[int]
) -> None:
    batcher: DirectBatcher[Sequenced] = DirectBatcher(rules)
    for each in slots:
        ready(batcher, *each)
    check_invariants(batcher)
    assert batcher.due_ns() == due, why
    assert [request.live.slot.number for request in batcher.take(now) if request.live.slot] == batch, why


def test_no_more_rows_than_are_compiled() -> None:
    batcher: DirectBatcher[Sequenced] = DirectBatcher(NO_DELAY)
    for number in (3, 1, 2):
        ready(batcher, number, "a", number)
    batcher.limit("a", 2)
    assert [request.live.correlation_id for request in batcher.take(9)] == [2, 4]
    batcher.limit("a", 0)
    assert [request.live.correlation_id for request in batcher.take(9)] == [3]


def test_who_is_withdrawn_is_not_taken() -> None:
    batcher: DirectBatcher[Sequenced] = DirectBatcher(WAITS)
    live = ready(batcher, 0, "a", 1)
    ready(batcher, 1, "a", 2)
    batcher.withdraw(live)
    assert batcher.due_ns() == 12
    batcher.end_delays()
    assert batcher.due_ns() == 2
    assert len(batcher.take(3)) == 1
