"""Order, bounds, timeouts: a table of situations, and any mixture of events keeps the counters true."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.shm.errors import Unavailable
from tensord.workers.scheduling.queue import (
    ParkedRequests,
    QueuePolicy,
    QueueRules,
    Replacement,
    RequestQueue,
    Waiting,
    in_turns,
)
from tests.invariants import check_invariants


def request(key: str = "a", rows: int = 1, arrived_ns: int = 0, **fields: Any) -> Waiting:
    made = Waiting(key, rows, arrived_ns)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def queue_of(*requests: Waiting, rules: QueueRules | None = None) -> RequestQueue[Waiting]:
    queue: RequestQueue[Waiting] = RequestQueue(rules or QueueRules(100))
    for each in requests:
        queue.push(each)
    check_invariants(queue)
    return queue


def test_levels_cost_nothing_while_nobody_waits_there() -> None:
    """A configuration may name any number of levels: unused ones are not made, and empty ones are not kept."""
    many = (1 << 64) - 1
    queue = queue_of(rules=QueueRules(100, levels=many, default_level=1 << 40))
    last, normal, second = request(priority=many), request(), request(priority=2)
    for each in (last, normal, second):
        queue.push(each)
        check_invariants(queue)
    assert queue.head() is second
    assert queue.take("a", 8) == [second, normal, last]
    check_invariants(queue)
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


def test_who_has_less_than_a_share_finds_a_place_that_others_have_filled() -> None:
    """One owner alone may have all places; with others it gets no more before it has less than its share."""
    queue = queue_of(*[request(owner="many") for _ in range(8)], rules=QueueRules(8))
    for _ in range(3):
        queue.push(request(owner="few"))
    check_invariants(queue)
    for owner in ("many", "few"):
        with pytest.raises(Unavailable, match="Exceeds maximum queue size"):
            queue.push(request(owner=owner))
    assert len(queue.take("a", 6)) == 6
    assert len(queue) == 5
    queue.push(request(owner="many"))


def test_who_has_less_than_a_share_finds_a_place_in_a_full_level_and_beside_a_compilation() -> None:
    rules = QueueRules(100, policies={1: QueuePolicy(max_size=2)}, levels=2, default_level=2)
    queue = queue_of(request(priority=1), request(priority=1), rules=rules)
    queue.push(request(priority=1, owner="other"))
    with pytest.raises(Unavailable):
        queue.push(request(priority=1, owner="other"))
    parked: ParkedRequests[Waiting] = ParkedRequests(QueueRules(2))
    for owner in ("many", "many", "few"):
        parked.add(request(owner=owner))
    for owner in ("many", "few"):
        with pytest.raises(Unavailable):
            parked.add(request(owner=owner))
    assert [each.owner for each in in_turns(parked.requests)] == ["many", "few", "many"]


def test_what_is_known_of_owners_that_are_gone_is_bounded() -> None:
    queue = queue_of(rules=QueueRules(9))
    for owner in range(1000):
        queue.push(request(owner=owner))
        queue.take("a", 1)
    assert len(queue._last) < 100


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.integers(0, 3), st.sampled_from("ab")),
            st.tuples(st.just("many"), st.integers(0, 3), st.sampled_from("ab")),
            st.tuples(st.just("take"), st.just(0), st.just("")),
        ),
        max_size=80,
    )
)
def test_owners_take_turns(events: list[tuple[str, int, str]]) -> None:
    """While a request waits, of no other owner are more served than of its own, but for two; an owner's first comes first."""
    queue = queue_of(rules=QueueRules(24))
    waiting: list[Waiting] = []
    #: Of each waiting request: how many of its owner were before it, and whose were served since.
    before: dict[Waiting, int] = {}
    served: dict[Waiting, Counter[object]] = {}
    for what, owner, key in [*events, *[("take", 0, "")] * 100]:
        for _ in range({"push": 1, "many": 10, "take": 0}[what]):
            made, owners = request(key, owner=owner), {each.owner for each in waiting}
            own = sum(each.owner == owner for each in waiting)
            try:
                queue.push(made)
            except Unavailable:
                assert len(waiting) >= 24
                assert own >= (48 - len(waiting)) // len({*owners, owner})
                continue
            before[made], served[made] = own, Counter()
            waiting.append(made)
            assert len(waiting) <= 48
            assert len(waiting) <= 24 or {each.owner for each in waiting} != {owner}
        if what == "take" and (head := queue.head()) is not None:
            assert queue.take(head.key, 1) == [head]
            assert head is next(each for each in waiting if (each.owner, each.key) == (head.owner, head.key))
            waiting.remove(head)
            for each in waiting:
                served[each][head.owner] += 1
            others = [count for owner, count in served[head].items() if owner != head.owner]
            assert max(others, default=0) <= before[head] + 2
        check_invariants(queue)
    assert not waiting


def test_a_batch_takes_of_all_owners_in_turn() -> None:
    many = [request(owner="many") for _ in range(6)]
    queue = queue_of(*many)
    assert queue.take("a", 2) == many[:2]
    few = [request(owner="few") for _ in range(2)]
    for each in few:
        queue.push(each)
    assert list(queue.waiting("a")) == [few[0], many[2], few[1], *many[3:]]
    assert queue.take("a", 3) == [few[0], many[2], few[1]]
    check_invariants(queue)


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
    assert queue.expiries.earliest_ns == expires_ns
    if expires_ns:
        assert queue.expire(expires_ns - 1) == []
        assert queue.expire(expires_ns) == [waiting]
        assert queue.head() is None
    check_invariants(queue)


def test_delayed_requests_run_after_those_on_time() -> None:
    rules = QueueRules(9, default_policy=QueuePolicy(timeout_ns=10, delay=True))
    late, on_time = request(arrived_ns=0), request(arrived_ns=8)
    queue = queue_of(late, on_time, rules=rules)
    assert queue.expire(12) == []
    check_invariants(queue)
    assert queue.head() is on_time
    assert queue.take("a", 9) == [on_time, late]


def test_a_deadline_ends_even_a_delayed_request() -> None:
    rules = QueueRules(9, default_policy=QueuePolicy(timeout_ns=10, delay=True))
    late = request(deadline_ns=20)
    queue = queue_of(late, rules=rules)
    assert queue.expire(10) == []
    assert queue.expire(19) == []
    assert queue.expire(20) == [late]


def test_restored_requests_stand_before_those_that_came_later() -> None:
    a, b, c = request(deadline_ns=5), request(), request()
    queue = queue_of(a, b)
    taken = queue.take("a", 2)
    queue.push(c)
    assert queue.expire(5) == []
    queue.restore(taken)
    check_invariants(queue)
    assert queue.head() is a
    assert queue.expire(6) == [a]
    assert queue.take("a", 9) == [b, c]


def test_entries_of_requests_that_left_do_not_pile_up() -> None:
    queue = queue_of(rules=QueueRules(9))
    for _ in range(10_000):
        queue.push(request(deadline_ns=1 << 60))
        queue.take("a", 1)
    assert len(queue.expiries) < 200
    assert queue.expiries.earliest_ns == 0
    queue.push(request(key="b", deadline_ns=5))
    for _ in range(10_000):
        queue.push(request(deadline_ns=1 << 60))
        queue.take("a", 1)
    assert len(queue.expiries) < 200


def test_a_request_that_left_is_kept_by_nobody() -> None:
    """Also while one waits that would expire before it."""
    queue = queue_of(
        request(key="b", deadline_ns=5), request(deadline_ns=1 << 60), removed := request(deadline_ns=1 << 60)
    )
    queue.remove(removed)
    left = weakref.ref(removed), *map(weakref.ref, queue.take("a", 1))
    del removed
    assert [each() for each in left] == [None, None]
    assert len(queue.expire(6)) == 1
    assert (len(queue), queue.expiries.earliest_ns) == (0, 0)


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
    queue.changed = {}
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
        check_invariants(queue)
        for key in "abc":
            waiting = list(queue.waiting(key))
            assert key in queue.changed or waiting == seen.get(key, [])
            seen[key] = waiting
        queue.changed.clear()
        head = queue.head()
        assert (head is None) == (len(queue) == 0)
    assert len(left) == len({id(each) for each in left})
    assert {id(each) for each in left} | {id(each) for each in queue.requests()} == {id(each) for each in pushed}


# --------------------------------------------------------------------------------------------------------- replace keys


def test_a_full_queue_takes_whoever_replaces() -> None:
    queue = queue_of(request(replace_key="k"), request(), rules=QueueRules(2))
    assert queue.push(request(replace_key="k")) is not None
    with pytest.raises(Unavailable):
        queue.push(request(replace_key="other"))
    check_invariants(queue)


def test_a_full_level_keeps_the_one_that_waits_elsewhere() -> None:
    rules = QueueRules(100, policies={1: QueuePolicy(max_size=1)}, levels=2, default_level=2)
    waiting = request(replace_key="k")
    queue = queue_of(request(priority=1), waiting, rules=rules)
    with pytest.raises(Unavailable):
        queue.push(request(priority=1, replace_key="k"))
    assert waiting in queue.requests()
    check_invariants(queue)


def test_one_that_comes_late_does_not_replace_a_newer_one() -> None:
    """From a worker that has died, say."""
    newer, older = request(arrived_ns=5, replace_key="k"), request(arrived_ns=4, replace_key="k")
    queue = queue_of(newer)
    assert queue.push(older) == (older, newer)
    assert queue.requests() == [newer]
    check_invariants(queue)


def test_a_restored_one_gives_its_place_to_the_newer_one() -> None:
    old, other, new = request(replace_key="k"), request(), request(arrived_ns=1, replace_key="k")
    queue = queue_of(old, other)
    taken = queue.take("a", 1)
    queue.push(new)
    assert list(queue.waiting("a")) == [other, new]
    assert queue.restore(taken) == [(old, new)]
    check_invariants(queue)
    assert queue.take("a", 9) == [new, other]


def test_requests_without_a_key_replace_one_another_where_the_rules_say_so() -> None:
    a, b, keyed = request(), request(), request(replace_key="k")
    queue = queue_of(a, keyed, rules=QueueRules(9, replaces=True))
    assert queue.push(b) == (a, b)
    check_invariants(queue)
    assert queue.take("a", 9) == [b, keyed]


def test_the_answer_says_by_what_a_request_was_replaced() -> None:
    told = Replacement(request(), request(replace_key="camera", client_id="7")).error
    assert told.message == "the request was replaced while it waited, by the next one of key 'camera', request id '7'"
    assert (
        Replacement(request(), request()).error.message == "the request was replaced while it waited, by the next one"
    )


def test_whoever_waits_for_a_program_is_replaced_as_well() -> None:
    parked: ParkedRequests[Waiting] = ParkedRequests(QueueRules(3))
    first, plain = request(arrived_ns=1, replace_key="k"), request(arrived_ns=2)
    assert parked.extend([first, plain]) == []
    newer, late = request(arrived_ns=3, replace_key="k"), request(arrived_ns=2, replace_key="k")
    assert parked.add(newer) == (first, newer)
    assert parked.add(late) == (late, newer)
    assert (parked.requests, newer.since_ns) == ([newer, plain], 1)
    assert parked.add(request()) is None
    with pytest.raises(Unavailable, match="Exceeds maximum queue size"):
        parked.add(request())
    assert parked.add(request(arrived_ns=4, replace_key="k")) is not None


def test_what_is_kept_of_many_that_replace_one_another_is_bounded() -> None:
    queue = queue_of(rules=QueueRules(9))
    for number in range(10_000):
        queue.push(request("ab"[number % 2], deadline_ns=1 << 60, arrived_ns=number, replace_key="k"))
    assert len(queue) == 1
    assert len(queue.expiries) < 200
    check_invariants(queue)


class Model:
    """Models the queue as one list of requests with their levels and places; the next of a key takes over its place."""

    def __init__(self, replaces: bool) -> None:
        self.replaces = replaces
        self.places: list[tuple[int, int, Waiting]] = []
        self.count = 0

    def push(self, made: Waiting) -> Waiting | None:
        level = made.priority or 1
        for i, (_, place, waiting) in enumerate(self.places):
            if waiting.replace_key == made.replace_key and (made.replace_key or self.replaces):
                self.places[i] = (level, place, made)
                return waiting
        self.count += 1
        self.places.append((level, self.count, made))
        return None

    def take(self, key: str, rows: int) -> list[Waiting]:
        taken: list[Waiting] = []
        for place in sorted(self.places, key=lambda place: place[:2]):
            if place[2].key == key:
                if taken and sum(each.rows for each in taken) + place[2].rows > rows:
                    break
                taken.append(place[2])
        self.places = [place for place in self.places if place[2] not in taken]
        return taken


@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("push"),
                st.sampled_from("ab"),
                st.integers(1, 3),
                st.integers(0, 2),
                st.sampled_from(["", "k", "l"]),
            ),
            st.tuples(st.just("take"), st.sampled_from("ab"), st.integers(0, 5)),
            st.tuples(st.just("remove"), st.integers(0, 30)),
            st.tuples(st.just("restore"), st.sampled_from("ab"), st.integers(1, 5)),
        ),
        max_size=60,
    ),
    st.booleans(),
)
def test_any_mixture_with_replace_keys(events: list[tuple[Any, ...]], replaces: bool) -> None:
    """At most the newest of a key waits, in the place of the first; all others keep theirs, and nothing stays behind."""
    queue: RequestQueue[Waiting] = RequestQueue(QueueRules(1000, levels=2, replaces=replaces))
    queue.changed = {}
    model, pushed, left = Model(replaces), list[Waiting](), list[Waiting]()
    for now, event in enumerate(events):
        if event[0] == "push":
            made = request(event[1], event[2], now, priority=event[3], replace_key=event[4])
            replaced, expected = queue.push(made), model.push(made)
            pushed.append(made)
            assert replaced == (None if expected is None else (expected, made))
            left += [] if expected is None else [expected]
        elif event[0] == "take":
            taken = queue.take(event[1], event[2])
            assert taken == model.take(event[1], event[2])
            left += taken
        elif event[0] == "restore":
            taken = queue.take(event[1], event[2])
            assert queue.restore(taken) == []
        elif event[1] < len(pushed) and queue.remove(pushed[event[1]]):
            left.append(pushed[event[1]])
            model.places = [place for place in model.places if place[2] is not pushed[event[1]]]
        check_invariants(queue)
        for key in "ab":
            places = sorted(place for place in model.places if place[2].key == key)
            assert list(queue.waiting(key)) == [waiting for _, _, waiting in places]
        keys = [each.replace_key for each in queue.requests() if each.replace_key or replaces]
        assert len(keys) == len(set(keys))
    assert len(left) == len({id(each) for each in left})
    assert {id(each) for each in left} | {id(each) for each in queue.requests()} == {id(each) for each in pushed}
    for key in "ab":
        queue.take(key, 1000)
    assert not queue.replaceable
