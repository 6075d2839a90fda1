"""Order, bounds, timeouts: a table of situations, and any mixture of events keeps the counters true."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.shm.errors import Unavailable
from tensord.workers.scheduling.queue import QueuePolicy, QueueRules, RequestQueue, Waiting


def request(key: str = "a", rows: int = 1, arrived_ns: int = 0, **fields: Any) -> Waiting:
    made = Waiting(key, rows, arrived_ns)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def queue_of(*requests: Waiting, rules: QueueRules | None = None) -> RequestQueue[Waiting]:
    queue: RequestQueue[Waiting] = RequestQueue(rules or QueueRules(100))
    for each in requests:
        queue.push(each)
    queue.check_invariants()
    return queue


def test_first_come_first_served_whatever_the_key() -> None:
    a, b, c = request("a"), request("b"), request("a")
    queue = queue_of(a, b, c)
    assert queue.head() is a
    assert queue.take("a", 1) == [a]
    assert queue.head() is b
    assert queue.take("b", 8) == [b]
    assert queue.take("b", 8) == []
    assert queue.take("a", 8) == [c]
    assert queue.head() is None
    assert len(queue) == 0
    queue.check_invariants()


def test_take_stops_at_what_does_not_fit_but_takes_at_least_one() -> None:
    a, b, c = request(rows=3), request(rows=6), request(rows=1)
    queue = queue_of(a, b, c)
    assert queue.rows("a") == 10
    assert queue.take("a", 8) == [a]
    assert queue.take("a", 2) == [b]
    assert queue.take("a", 2) == [c]
    assert queue.rows("a") == 0


def test_urgent_levels_come_first_and_fill_up_with_the_next() -> None:
    rules = QueueRules(100, levels=3, default_level=2)
    normal, late, urgent = request(), request(priority=3), request(priority=1)
    beyond = request(priority=99)
    queue = queue_of(normal, late, urgent, beyond, rules=rules)
    assert queue.head() is urgent
    assert list(queue.waiting("a")) == [urgent, normal, beyond, late]
    assert queue.take("a", 8) == [urgent, normal, beyond, late]


def test_levels_cost_nothing_while_nobody_waits_there() -> None:
    """As many as a configuration can say: what is not used is not there, and what is left is not kept."""
    many = (1 << 64) - 1
    queue = queue_of(rules=QueueRules(100, levels=many, default_level=1 << 40))
    last, normal, second = request(priority=many), request(), request(priority=2)
    for each in (last, normal, second):
        queue.push(each)
        queue.check_invariants()
    assert queue.head() is second
    assert queue.take("a", 8) == [second, normal, last]
    queue.check_invariants()
    assert queue._order == [0]


def test_the_oldest_of_a_key_may_stand_in_any_line() -> None:
    rules = QueueRules(100, levels=2, default_level=2)
    queue = queue_of(request(arrived_ns=3), request(priority=1, arrived_ns=5), rules=rules)
    assert queue.oldest_ns("a") == 3


def test_full() -> None:
    queue = queue_of(request(), request(), rules=QueueRules(2))
    with pytest.raises(Unavailable, match="Exceeds maximum queue size"):
        queue.push(request())
    queue.take("a", 1)
    queue.push(request())


def test_a_level_of_its_own_size() -> None:
    rules = QueueRules(100, policies={1: QueuePolicy(max_size=1)}, levels=2, default_level=2)
    queue = queue_of(request(priority=1), request(), request(), rules=rules)
    with pytest.raises(Unavailable):
        queue.push(request(priority=1))


@pytest.mark.parametrize(
    ("policy", "timeout_ns", "expires_ns"),
    [
        (QueuePolicy(), 0, 0),
        (QueuePolicy(), 5, 0),  # as in Triton a request's wish means nothing without a default
        (QueuePolicy(timeout_ns=10), 0, 10),
        (QueuePolicy(timeout_ns=10), 5, 10),
        (QueuePolicy(timeout_ns=10, allow_override=True), 5, 5),
        (QueuePolicy(timeout_ns=10, allow_override=True), 50, 10),
    ],
)
def test_timeout(policy: QueuePolicy, timeout_ns: int, expires_ns: int) -> None:
    waiting = request(timeout_ns=timeout_ns)
    queue = queue_of(waiting, rules=QueueRules(9, default_policy=policy))
    assert [expiry[0] for expiry in queue.expiries] == [expires_ns] * (expires_ns > 0)
    if expires_ns:
        assert queue.expire(expires_ns - 1) == []
        assert queue.expire(expires_ns) == [waiting]
        assert queue.head() is None
    queue.check_invariants()


def test_delayed_requests_run_after_those_on_time() -> None:
    rules = QueueRules(9, default_policy=QueuePolicy(timeout_ns=10, delay=True))
    late, on_time = request(arrived_ns=0), request(arrived_ns=8)
    queue = queue_of(late, on_time, rules=rules)
    assert queue.expire(12) == []
    queue.check_invariants()
    assert queue.head() is on_time
    assert queue.take("a", 9) == [on_time, late]


def test_a_deadline_ends_even_a_delayed_request() -> None:
    rules = QueueRules(9, default_policy=QueuePolicy(timeout_ns=10, delay=True))
    late = request(deadline_ns=20)
    queue = queue_of(late, rules=rules)
    assert queue.expire(10) == []
    assert queue.expire(19) == []
    assert queue.expire(20) == [late]


def test_remove() -> None:
    a, b = request(), request()
    queue = queue_of(a, b)
    assert queue.remove(a)
    assert not queue.remove(a)
    assert queue.take("a", 9) == [b]
    assert not queue.remove(b)


def test_restored_requests_stand_before_those_that_came_later() -> None:
    a, b, c = request(deadline_ns=5), request(), request()
    queue = queue_of(a, b)
    taken = queue.take("a", 2)
    queue.push(c)
    assert queue.expire(5) == []
    queue.restore(taken)
    queue.check_invariants()
    assert queue.head() is a
    assert queue.expire(6) == [a]
    assert queue.take("a", 9) == [b, c]


def test_entries_of_requests_that_left_do_not_pile_up() -> None:
    queue = queue_of(rules=QueueRules(9))
    for _ in range(10_000):
        queue.push(request(deadline_ns=1 << 60))
        queue.take("a", 1)
    assert len(queue.expiries) < 200


@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("push"), st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 4), st.integers(0, 30)
            ),
            st.tuples(st.just("take"), st.sampled_from("abc"), st.integers(0, 9)),
            st.tuples(st.just("remove"), st.integers(0, 50)),
            st.tuples(st.just("restore"), st.sampled_from("abc"), st.integers(0, 9)),
            st.tuples(st.just("expire"), st.integers(1, 5)),
        ),
        max_size=60,
    ),
    st.booleans(),
)
def test_any_mixture(events: list[tuple[Any, ...]], delay: bool) -> None:
    """Every request pushed leaves exactly once, in order within its key and level, and the counters are always true.

    Who asks is told of every key of which something came or went.
    """
    rules = QueueRules(20, QueuePolicy(max_size=10, timeout_ns=12, allow_override=True, delay=delay), levels=3)
    queue: RequestQueue[Waiting] = RequestQueue(rules)
    queue.changed = set()
    seen: dict[Any, list[Waiting]] = {}
    pushed: list[Waiting] = []
    left: list[Waiting] = []
    now = 0
    for event in events:
        now += 1
        if event[0] == "push":
            made = request(event[1], event[2], now, priority=event[3], deadline_ns=event[4] and now + event[4])
            try:
                queue.push(made)
            except Unavailable:
                assert len(queue) >= 10
            else:
                pushed.append(made)
        elif event[0] == "take":
            waits = queue.rows(event[1])
            taken = queue.take(event[1], event[2])
            assert bool(taken) == bool(waits)
            assert len(taken) <= 1 or sum(each.rows for each in taken) <= event[2]
            left += taken
        elif event[0] == "restore":
            before = [each.sequence for each in queue.take(event[1], 100)] if event[2] > 4 else []
            restored = [each for each in pushed if each.sequence in before]
            queue.restore(restored)
            if restored:
                assert queue.rows(event[1]) == sum(each.rows for each in restored)
        elif event[0] == "remove" and event[1] < len(pushed):
            if queue.remove(pushed[event[1]]):
                left.append(pushed[event[1]])
        elif event[0] == "expire":
            now += event[1]
            left += queue.expire(now)
        queue.check_invariants()
        for key in "abc":
            waiting = list(queue.waiting(key))
            assert key in queue.changed or waiting == seen.get(key, [])
            seen[key] = waiting
        queue.changed.clear()
        head = queue.head()
        assert (head is None) == (len(queue) == 0)
    assert len(left) == len({id(each) for each in left})
    assert {id(each) for each in left} | {id(each) for each in queue.requests()} == {id(each) for each in pushed}
