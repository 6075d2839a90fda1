"""When a batch is due and who is in it: situations with the expected decision."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.scheduling.dynamic_batcher import BatchRules, DynamicBatcher
from workers.scheduling.queue import QueueRules, RequestQueue, Waiting


def batcher_of(rules: BatchRules, *waiting: tuple[str, int, int]) -> DynamicBatcher[Waiting]:
    """``waiting``: (key, rows, arrival) each."""
    queue: RequestQueue[Waiting] = RequestQueue(QueueRules(1000))
    for key, rows, arrived_ns in waiting:
        queue.push(Waiting(key, rows, arrived_ns))
    return DynamicBatcher(rules, queue)


def rows(batch: list[Waiting]) -> list[int]:
    return [request.rows for request in batch]


@pytest.mark.parametrize(
    ("why", "rules", "waiting", "now", "due", "batch"),
    [
        ("nothing waits", BatchRules(8), [], 5, None, []),
        ("whatever waits runs at once", BatchRules(8), [("a", 1, 1), ("a", 2, 2)], 5, 1, [1, 2]),
        ("up to the largest batch", BatchRules(4), [("a", 3, 1), ("a", 2, 2), ("a", 1, 3)], 5, 1, [3]),
        ("only what is compatible", BatchRules(8), [("a", 1, 1), ("b", 2, 2), ("a", 3, 3)], 5, 1, [1, 3]),
        ("a model that does not join", BatchRules(8, joins=False), [("a", 1, 1), ("a", 1, 2)], 5, 1, [1]),
        ("it waits for company", BatchRules(8, delay_ns=10), [("a", 1, 1)], 5, 11, []),
        ("but not for ever", BatchRules(8, delay_ns=10), [("a", 1, 1), ("a", 1, 11)], 11, 1, [1, 1]),
        ("nor when it is full", BatchRules(2, delay_ns=10), [("a", 1, 1), ("a", 1, 2)], 5, 1, [1, 1]),
        ("a preferred size is enough", BatchRules(8, 10, (2, 4)), [("a", 1, 1), ("a", 1, 2)], 5, 1, [1, 1]),
        ("the largest preferred one", BatchRules(8, 10, (2, 4)), [("a", 1, 1)] * 5, 5, 1, [1, 1, 1, 1]),
        ("below the preferred it waits", BatchRules(8, 10, (4,)), [("a", 1, 1)] * 3, 5, 11, []),
        ("past the delay all go", BatchRules(8, 10, (2,)), [("a", 1, 1)] * 5, 20, 1, [1] * 5),
    ],
)
def test_decisions(
    why: str, rules: BatchRules, waiting: list[tuple[str, int, int]], now: int, due: int | None, batch: list[int]
) -> None:
    batcher = batcher_of(rules, *waiting)
    assert batcher.due_ns(now) == due, why
    assert rows(batcher.take(now)) == batch, why
    batcher.check_invariants()


def test_a_key_grows_only_as_far_as_it_is_compiled() -> None:
    batcher = batcher_of(BatchRules(8), *[("a", 1, 1)] * 8)
    batcher.limits["a"] = 2
    assert rows(batcher.take(5)) == [1, 1]
    del batcher.limits["a"]
    assert rows(batcher.take(5)) == [1] * 6


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 8)), max_size=40),
    st.integers(0, 20),
    st.lists(st.integers(1, 8), unique=True, max_size=3).map(sorted),
)
def test_all_requests_run_once_and_the_head_always_first(
    arrivals: list[tuple[str, int]], delay_ns: int, preferred: list[int]
) -> None:
    batcher = batcher_of(
        BatchRules(8, delay_ns, tuple(preferred)), *[(key, count, at) for at, (key, count) in enumerate(arrivals, 1)]
    )
    ran = 0
    now = len(arrivals)
    while (due := batcher.due_ns(now)) is not None:
        if due > now:
            assert batcher.take(now) == []
            now = due
        oldest = batcher._queue.head()
        batch = batcher.take(now)
        assert batch[0] is oldest
        assert len({request.key for request in batch}) == 1
        assert sum(rows(batch)) <= 8
        ran += len(batch)
        batcher.check_invariants()
    assert ran == len(arrivals)
