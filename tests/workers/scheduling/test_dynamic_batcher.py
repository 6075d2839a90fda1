"""Tests when a batch is due and who is in it: situations with the expected decision."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.workers.scheduling.dynamic_batcher import BatchRules, DynamicBatcher
from tensord.workers.scheduling.queue import QueueRules, RequestQueue, Waiting
from tests.invariants import check_invariants


def batcher_of(
    rules: BatchRules, *waiting: tuple[str, int, int], queue_rules: QueueRules | None = None
) -> DynamicBatcher[Waiting]:
    """Returns a batcher with requests. ``waiting``: (key, rows, arrival) of each."""
    batcher: DynamicBatcher[Waiting] = DynamicBatcher(rules, RequestQueue(queue_rules or QueueRules(1000)))
    for each in waiting:
        arrive(batcher, *each)
    return batcher


def arrive(batcher: DynamicBatcher[Waiting], key: str, rows: int, arrived_ns: int, priority: int = 0) -> Waiting:
    made = Waiting(key, rows, arrived_ns)
    made.priority = priority
    batcher._queue.push(made)
    return made


def rows(batch: list[Waiting]) -> list[int]:
    return [request.rows for request in batch]


def singles(count: int, key: str = "a") -> list[tuple[str, int, int]]:
    """Returns requests of one row, which came one after the other."""
    return [(key, 1, at) for at in range(1, count + 1)]


NO_DELAY = BatchRules(8)
WAITS = BatchRules(8, delay_ns=10)
PREFERS = BatchRules(8, 10, (2, 4))
AT_ONCE = BatchRules(8, 0, (4, 6))
ALONE = BatchRules(8, 0, (2,), joins=False)


@pytest.mark.parametrize(
    ("why", "rules", "waiting", "now", "due", "batch"),
    [
        ("nothing waits", NO_DELAY, [], 5, None, []),
        ("whatever waits runs at once", NO_DELAY, [("a", 1, 1), ("a", 2, 2)], 5, 1, [1, 2]),
        ("up to the largest batch", BatchRules(4), [("a", 3, 1), ("a", 2, 2), ("a", 1, 3)], 5, 1, [3]),
        ("only what is compatible", NO_DELAY, [("a", 1, 1), ("b", 2, 2), ("a", 3, 3)], 5, 1, [1, 3]),
        ("a model that does not join", BatchRules(8, joins=False), [("a", 1, 1), ("a", 1, 2)], 5, 1, [1]),
        ("nor waits", BatchRules(8, delay_ns=10, joins=False), [("a", 1, 1)], 5, 1, [1]),
        ("preferred sizes without a delay", AT_ONCE, singles(7), 5, 1, [1] * 6),
        ("the largest that the requests make at once", AT_ONCE, singles(5), 5, 1, [1] * 4),
        ("less than all of them is not kept", AT_ONCE, singles(3), 5, 1, [1] * 3),
        ("what misses all of them goes together", AT_ONCE, [("a", 3, 1), ("a", 2, 2)], 5, 1, [3, 2]),
        ("the next would be beyond all of them, at once", AT_ONCE, [("a", 3, 1), ("a", 5, 2)], 5, 1, [3]),
        ("beyond all of them by itself, at once", AT_ONCE, [("a", 7, 1), ("a", 1, 2)], 5, 1, [7]),
        ("a preferred size is nothing to one that does not join", ALONE, singles(3), 5, 1, [1]),
        ("it waits for company", WAITS, [("a", 1, 1)], 5, 11, []),
        ("but not for ever", WAITS, [("a", 1, 1), ("a", 1, 11)], 11, 11, [1, 1]),
        ("nor when it is full", BatchRules(2, delay_ns=10), singles(2), 5, 1, [1, 1]),
        ("nor when the next one does not fit", BatchRules(4, delay_ns=10), [("a", 3, 1), ("a", 2, 2)], 5, 1, [3]),
        ("a preferred size is enough", PREFERS, singles(2), 5, 1, [1, 1]),
        ("but one less is not", BatchRules(8, 10, (4,)), singles(3), 5, 11, []),
        ("nor is one more", PREFERS, [("a", 3, 1)], 5, 11, []),
        ("it is one where a request ends", PREFERS, [("a", 1, 1), ("a", 2, 2)], 5, 11, []),
        ("the largest that the requests make", PREFERS, [("a", 2, 1), ("a", 1, 2), ("a", 1, 3)], 5, 1, [2, 1, 1]),
        ("and no more than that", PREFERS, singles(5), 5, 1, [1, 1, 1, 1]),
        ("what is between two sizes stays", PREFERS, singles(3), 5, 1, [1, 1]),
        ("the next would be beyond all of them", PREFERS, [("a", 3, 1), ("a", 2, 2)], 5, 1, [3]),
        ("what was one before that goes alone", PREFERS, [("a", 2, 1), ("a", 1, 2), ("a", 3, 3)], 5, 1, [2]),
        ("beyond all of them by itself", PREFERS, [("a", 7, 1)], 5, 1, [7]),
        ("with nobody else", PREFERS, [("a", 7, 1), ("a", 1, 2)], 5, 1, [7]),
        ("past the delay all go", BatchRules(8, 10, (2,)), singles(5), 20, 1, [1] * 5),
        ("up to the largest batch, too", BatchRules(4, 10, (2,)), singles(5), 20, 1, [1] * 4),
        ("another key does not end the wait", WAITS, [("a", 1, 1), ("b", 1, 2)], 5, 11, []),
        ("one that waits holds up no other", BatchRules(2, delay_ns=10), [("a", 1, 1), ("b", 2, 2)], 5, 2, [2]),
        ("each has its own delay", WAITS, [("a", 1, 1), ("b", 1, 4)], 11, 11, [1]),
        ("a size of another key is none", PREFERS, [("a", 1, 1), ("b", 1, 2)], 5, 11, []),
    ],
)
def test_decisions(
    why: str, rules: BatchRules, waiting: list[tuple[str, int, int]], now: int, due: int | None, batch: list[int]
) -> None:
    batcher = batcher_of(rules, *waiting)
    check_invariants(batcher)
    assert batcher.due_ns() == due, why
    assert rows(batcher.take(now)) == batch, why
    check_invariants(batcher)


def test_of_two_that_are_due_the_most_urgent_goes_first() -> None:
    rules = QueueRules(9, levels=2, default_level=2)
    batcher = batcher_of(BatchRules(2, delay_ns=10), queue_rules=rules)
    first, second = arrive(batcher, "a", 2, 1), arrive(batcher, "b", 2, 2)
    urgent = arrive(batcher, "c", 2, 3, priority=1)
    assert [batcher.take(4) for _ in range(4)] == [[urgent], [first], [second], []]


def test_the_oldest_of_a_batch_decides_and_not_the_most_urgent() -> None:
    rules = QueueRules(9, levels=2, default_level=2)
    batcher = batcher_of(WAITS, queue_rules=rules)
    patient, urgent = arrive(batcher, "a", 1, 1), arrive(batcher, "a", 1, 9, priority=1)
    assert batcher.due_ns() == 11
    assert batcher.take(11) == [urgent, patient]


def test_a_request_that_left_is_not_waited_for() -> None:
    batcher = batcher_of(BatchRules(2, delay_ns=10))
    first, second = arrive(batcher, "a", 1, 1), arrive(batcher, "a", 1, 4)
    assert batcher.due_ns() == 1
    batcher._queue.remove(first)
    assert batcher.due_ns() == 14
    batcher._queue.remove(second)
    assert batcher.due_ns() is None


@pytest.mark.parametrize("delay_ns", [0, 1 << 40])
def test_a_key_grows_only_as_far_as_it_is_compiled(delay_ns: int) -> None:
    batcher = batcher_of(BatchRules(8, delay_ns), *singles(7))
    batcher.limit("a", 2)
    check_invariants(batcher)
    assert rows(batcher.take(8)) == [1, 1]
    batcher.limit("a", 0)
    check_invariants(batcher)
    assert rows(batcher.take(8 + delay_ns)) == [1] * 5


SIZES = st.lists(st.integers(1, 8), unique=True, max_size=3).map(lambda sizes: tuple(sorted(sizes)))


@given(SIZES, st.integers(0, 8), st.lists(st.integers(1, 8), min_size=1, max_size=8))
def test_what_is_a_batch_as_it_is_need_not_be_taken_here(
    preferred: tuple[int, ...], limit: int, sizes: list[int]
) -> None:
    """The longest beginning that fits into what ``at_once`` allows is what ``take`` returns, if ``at_once`` has its size."""
    batcher = batcher_of(BatchRules(8, 0, preferred), *[("a", size, at) for at, size in enumerate(sizes, 1)])
    batcher.limit("a", limit)
    allowed = [size for some in batcher.at_once("a") for size in some]
    fits = [sum(sizes[:count]) for count in range(1, len(sizes) + 1) if sum(sizes[:count]) <= max(allowed)]
    taken = sum(rows(batcher.take(99)))
    if fits and fits[-1] in allowed:
        assert taken == fits[-1]


def test_when_no_more_come_nothing_waits() -> None:
    batcher = batcher_of(WAITS, ("a", 1, 1), ("b", 1, 2))
    assert batcher.take(3) == []
    batcher.end_delays()
    assert batcher.due_ns() == 1
    assert [rows(batcher.take(3)) for _ in range(3)] == [[1], [1], []]
    assert batcher.due_ns() is None
    check_invariants(batcher)


def test_what_is_told_of_keys_is_not_kept() -> None:
    batcher = batcher_of(NO_DELAY)
    for key in range(1000):
        batcher.limit(key, 1)
        batcher.limit(key, 0)
    assert not batcher._limits
    assert not batcher._changed


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 8)), max_size=40), st.integers(0, 20), SIZES)
def test_all_requests_run_once_and_in_order(
    arrivals: list[tuple[str, int]], delay_ns: int, preferred: tuple[int, ...]
) -> None:
    """Asked whenever a batch is due, nobody waits longer than the delay allows, and each key keeps its order."""
    batcher = batcher_of(BatchRules(8, delay_ns, preferred))
    ran: dict[str, list[int]] = {"a": [], "b": []}
    sent = 0
    for now in range(1, len(arrivals) + delay_ns + 2):
        if now <= len(arrivals):
            arrive(batcher, *arrivals[now - 1], now)
        while (due := batcher.due_ns()) is not None and due <= now:
            batch = batcher.take(now)
            assert len({request.key for request in batch}) == 1
            assert sum(rows(batch)) <= 8
            assert all(now - request.arrived_ns <= delay_ns for request in batch)
            ran[str(batch[0].key)] += [request.arrived_ns for request in batch]
            sent += len(batch)
            check_invariants(batcher)
        assert batcher.take(now) == []
    assert sent == len(arrivals)
    assert all(order == sorted(order) for order in ran.values())


@given(st.lists(st.integers(1, 8), min_size=1, max_size=12), SIZES)
def test_before_the_delay_is_over_a_batch_runs_for_a_reason(sizes: list[int], preferred: tuple[int, ...]) -> None:
    """It has a preferred size and could have no larger one, or nothing fits behind it below the largest."""
    batcher = batcher_of(BatchRules(8, 100, preferred), *[("a", size, at) for at, size in enumerate(sizes, 1)])
    boundaries = [sum(sizes[:count]) for count in range(1, len(sizes) + 1)]
    largest = max(preferred, default=8)
    batch = sum(rows(batcher.take(50)))
    exact = [size for size in boundaries if size in (preferred or (8,))]
    if batch and batch in exact:
        assert batch == max(exact)
    elif batch:
        assert not exact
        assert batch >= largest or boundaries[boundaries.index(batch) + 1] > largest
    else:
        assert not exact
        assert boundaries[-1] < largest
