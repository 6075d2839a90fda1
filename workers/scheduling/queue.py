"""Queues the requests that wait for one model version: in order, limited in number, and grouped by batching key.

Only requests with the same batching key may run together. The requests of each priority level wait in two lists, called lines:
line ``2 * (level - 1)`` for requests in time, and the next line for requests whose queue timeout has passed. The second line
is used only if the level's queue policy says ``delay``. A line with a lower number is served first.

Each request has an owner, which is a user. In a line the owners take turns (start-time fair queueing), so a new owner's first
request runs soon even if another owner has thousands of requests. An owner's requests stay in the order of arrival. If the
queue is full, an owner with less than its share of the queue may still add a request (``Shares.below``).

At most one request with each replace key waits. A newer request with the same replace key takes the place of the older one
in the order, and counts as waiting since the older one began to wait.

A queue belongs to one thread, and takes the current time as an argument.
"""

from __future__ import annotations

import bisect
import heapq
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from tensord.shm.errors import Replaced, Unavailable


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Waiting:
    """The fields of a request that the scheduler reads. The subclass ``Request`` adds the others."""

    #: Requests of equal keys may run together.
    key: Hashable
    #: Size of the batch dimension, at least 1; 1 for a model that has none.
    rows: int
    arrived_ns: int
    #: The time since which its place in the queue is taken, by itself or by those that it replaced.
    since_ns: int = field(init=False)
    #: The client's id, "" when none was given.
    client_id: str = ""
    #: The next request of that key replaces it; "": of none, unless the rules say that all replace one another.
    replace_key: str = ""
    #: The client does not wait beyond this moment; 0: it waits for ever.
    deadline_ns: int = 0
    #: The queue timeout that the client asks for; 0: none.
    timeout_ns: int = 0
    #: 1 is the most urgent; 0: the model's default.
    priority: int = 0
    #: Set by the queue: the line in which the request waits (-1: none), and its place in the order of arrival.
    line: int = -1
    sequence: int = 0
    #: The owner of the request, among those who take turns.
    owner: Hashable = None

    def __post_init__(self) -> None:
        self.since_ns = self.arrived_ns


class SetKey(NamedTuple):
    """The batching key of requests that name a parameter set. Only requests with equal shapes and sets run together."""

    shapes: Hashable
    set: str


def shapes_of(key: Hashable) -> Hashable:
    """Returns the tensor shapes in ``key``, the batching key of a request. The key may also contain a parameter set's name."""
    return key.shapes if type(key) is SetKey else key


W = TypeVar("W", bound=Waiting)
#: Owner -> its requests by their ``sequence``, of one line and key.
_Waiters = dict[Hashable, OrderedDict[int, W]]


class Replacement(NamedTuple, Generic[W]):
    """A waiting request that was discarded (``old``), and the newer one with the same replace key (``new``)."""

    old: W
    new: W

    @property
    def error(self) -> Replaced:
        key, client_id = self.new.replace_key, self.new.client_id
        of_key = f" of key '{key}'" if key else ""
        with_id = f", request id '{client_id}'" if client_id else ""
        return Replaced(f"the request was replaced while it waited, by the next one{of_key}{with_id}")


class Expiries(Generic[W]):
    """The moments at which waiting requests may expire. A request that waits no more is passed over, and kept by nobody."""

    __slots__ = ("_moments", "_number")

    def __init__(self) -> None:
        #: A heap of (when, sequence, number, request). No two have one number: whom a request replaced had its sequence.
        self._moments: list[tuple[int, int, int, weakref.ref[W]]] = []
        self._number = 0

    def add(self, when_ns: int, request: W, waiting: int) -> None:
        """Makes ``take`` return ``request`` from ``when_ns`` on, if it still waits then. ``waiting``: how many requests wait."""
        self._number += 1
        heapq.heappush(self._moments, (when_ns, request.sequence, self._number, weakref.ref(request)))
        # Removes outdated entries once they are the majority.
        if len(self._moments) > 4 * waiting + 64:
            self._moments = [entry for entry in self._moments if _if_waiting(entry[3])]
            heapq.heapify(self._moments)

    def take(self, now_ns: int) -> W | None:
        """Removes the first moment that has come of a request that still waits, and returns the request; None: none has come."""
        while self._moments and self._moments[0][0] <= now_ns:
            if (request := _if_waiting(heapq.heappop(self._moments)[3])) is not None:
                return request
        return None

    @property
    def earliest_ns(self) -> int:
        """The earliest time in ns at which a request may expire; 0: never."""
        while self._moments and not _if_waiting(self._moments[0][3]):
            heapq.heappop(self._moments)
        return self._moments[0][0] if self._moments else 0

    def __len__(self) -> int:
        return len(self._moments)

    def __repr__(self) -> str:
        return f"<Expiries {len(self)} moments>"


def _if_waiting(found: weakref.ref[W]) -> W | None:
    """Returns the request that ``found`` refers to, or None if this request does not wait any more."""
    request = found()
    return None if request is None or request.line < 0 else request


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """The limits of one priority level of a queue: the fields of ``ModelQueuePolicy`` in Triton's ModelConfig."""

    #: Requests that may wait in this level; 0: as many as in the whole queue.
    max_size: int = 0
    #: How long a request may wait; 0: for ever.
    timeout_ns: int = 0
    #: True if a request may ask for a shorter timeout.
    allow_override: bool = False
    #: True: a late request runs after those that are on time. False: it is refused.
    delay: bool = False


@dataclass(frozen=True, slots=True)
class QueueRules:
    """The policies of a queue's priority levels, and how many requests may wait in all levels together."""

    max_size: int
    default_policy: QueuePolicy = field(default_factory=QueuePolicy)
    #: Level -> policy, where it differs.
    policies: dict[int, QueuePolicy] = field(default_factory=dict)
    levels: int = 1
    default_level: int = 1
    #: True if requests without a replace key replace one another, as if they had a common one.
    replaces: bool = False

    @property
    def single_line(self) -> bool:
        """True if all fields except ``max_size`` have their default values: one priority level without timeouts."""
        one_level = self.levels == self.default_level == 1 and not self.policies
        return one_level and self.default_policy == QueuePolicy() and not self.replaces

    def level(self, priority: int) -> int:
        """Returns the priority level of a request. An unknown ``priority`` gives the default level, as in Triton."""
        return priority if 0 < priority <= self.levels else self.default_level

    def policy(self, level: int) -> QueuePolicy:
        return self.policies.get(level, self.default_policy)


class Shares(dict[Hashable, int]):
    """Counts the waiting requests of each owner (user). Owners without a waiting request are left out."""

    __slots__ = ()

    def enter(self, owner: Hashable) -> None:
        self[owner] = self.get(owner, 0) + 1

    def leave(self, owner: Hashable) -> None:
        left = self[owner] - 1
        if left:
            self[owner] = left
        else:
            del self[owner]

    def below(self, owner: Hashable, waiting: int, most: int) -> bool:
        """Returns whether the user ``owner`` may queue one more request although the queue is full.

        The result is True if other users' requests wait, and ``owner`` has fewer waiting requests than its share of the queue.
        All users have equal shares, of at least one request. The shares shrink as ``waiting`` grows beyond ``most``.
        ``waiting``: how many requests wait in the queue. ``most``: with how many waiting requests the queue is full.
        """
        others = len(self) - (owner in self)
        return others > 0 and self.get(owner, 0) < max(1, (2 * most - waiting) // (others + 1))


def in_turns(requests: list[W]) -> list[W]:
    """Orders requests so that their owners take turns. The requests of each owner keep their order."""
    shares, turns = Shares(), list[int]()
    for request in requests:
        turns.append(shares.get(request.owner, 0))
        shares.enter(request.owner)
    if len(shares) < 2:
        return requests
    return [requests[at] for at in sorted(range(len(requests)), key=turns.__getitem__)]


class RequestQueue(Generic[W]):
    """The waiting requests of one model version. Level 1 is served before level 2. In a level, owners (users) take turns."""

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        #: The line of all requests without a deadline; -1: the rules know several lines, or timeouts.
        self._line = 0 if rules.single_line else -1
        #: Number -> line. The first one stays when it is empty: most queues never have another.
        #: The requests of a key and owner by their ``sequence``, so that one is replaced or removed without a look at the others.
        self._lines: dict[int, dict[Hashable, _Waiters[W]]] = {0: {}}
        #: The numbers of the lines, ascending.
        self._order = [0]
        self._rows: dict[Hashable, int] = {}
        #: Level - 1 -> its waiting requests, for levels that have a line.
        self._level_sizes = {0: 0}
        #: Requests that wait.
        self.size = 0
        #: Requests that left the queue for a thread, and wait there: they take their place of ``max_size`` as if they were here.
        self.ahead = 0
        #: Whose requests wait; the highest ``sequence`` of an owner's requests; and that of the request that was served last.
        self._shares = Shares()
        self._last: dict[Hashable, int] = {}
        self._served = 0
        #: Counts down for requests that are restored and never waited before.
        self._before = 0
        #: Replace key -> the request of that key that waits.
        self._replaceable: dict[str, W] = {}
        self.expiries: Expiries[W] = Expiries()
        #: Keys whose waiting requests have changed since the batcher last looked; None: it never looks.
        self.changed: dict[Hashable, None] | None = None

    def __len__(self) -> int:
        return self.size

    def rows(self, key: Hashable) -> int:
        return self._rows.get(key, 0)

    @property
    def replaceable(self) -> bool:
        """True while a request with a replace key waits. A newer request with the same key would replace it."""
        return bool(self._replaceable)

    def push(self, request: W) -> Replacement[W] | None:
        """Appends a request. If a request with the same replace key waits, only the one that arrived later stays.

        Returns both requests if one was discarded, else None. Raises Unavailable, and changes nothing, if the queue is full.
        """
        if request.replace_key or self._rules.replaces:
            waiting = self._replaceable.get(request.replace_key)
            if waiting is not None:
                return self._push_newer(request, waiting)
        if self._line >= 0 and not request.deadline_ns and self.size + self.ahead < self._rules.max_size:
            self._append(request, self._line)
            return None
        level, most = self._rules.level(request.priority), self._rules.max_size
        policy = self._rules.policy(level)
        held = self.size + self.ahead
        full = held >= most and not self._shares.below(request.owner, held, most)
        if full or self._is_full(level, policy, request.owner):
            raise Unavailable("Exceeds maximum queue size")
        self._append(request, 2 * (level - 1))
        self._watch(request, policy)
        return None

    def _is_full(self, level: int, policy: QueuePolicy, owner: Hashable) -> bool:
        most, waiting = policy.max_size, self._level_sizes.get(level - 1, 0)
        return 0 < most <= waiting and not self._shares.below(owner, waiting, most)

    def _append(self, request: W, number: int) -> None:
        last, owner = self._last, request.owner
        if owner not in last and len(last) > 2 * len(self._shares) + 64:
            # Who has nothing waiting and is not ahead of the others begins like one that was never there.
            last = self._last = {one: at for one, at in last.items() if at > self._served or one in self._shares}
        request.sequence = last[owner] = max(last.get(owner, 0), self._served) + 1
        self._insert(request, number)

    def _push_newer(self, request: W, waiting: W) -> Replacement[W]:
        if request.arrived_ns < waiting.arrived_ns:
            # It was with a worker that has died, say, and comes from there.
            return Replacement(request, waiting)
        level = self._rules.level(request.priority)
        policy, number, former = self._rules.policy(level), 2 * (level - 1), waiting.line
        if number // 2 != former // 2 and self._is_full(level, policy, request.owner):
            raise Unavailable("Exceeds maximum queue size")
        self._take_place(request, waiting)
        if number == former and request.key == waiting.key and request.owner is waiting.owner:
            self._lines[number][request.key][request.owner][request.sequence] = request
            self._rows[request.key] += request.rows - waiting.rows
            request.line, waiting.line = number, -1
            self._replaceable[request.replace_key] = request
            if self.changed is not None:
                self.changed[request.key] = None
        else:
            self.remove(waiting)
            self._insert_in_order(request, number)
        self._watch(request, policy)
        return Replacement(waiting, request)

    @staticmethod
    def _take_place(newer: W, older: W) -> None:
        newer.sequence, newer.since_ns = older.sequence, older.since_ns

    def _insert_in_order(self, request: W, number: int) -> None:
        self._insert(request, number)
        self._last[request.owner] = max(self._last.get(request.owner, 0), request.sequence)
        waiting = self._lines[number][request.key][request.owner]
        for sequence in [each for each in waiting if each > request.sequence]:
            waiting.move_to_end(sequence)

    def restore(self, requests: list[W]) -> list[Replacement[W]]:
        """Puts back requests that ``take`` returned and the caller could not run, even if the queue is full.

        ``requests`` must be in order of arrival, and older than all waiting requests with the same batching key. If a request
        and a waiting request have the same ``replace_key``, the queue keeps only the newer request. Returns a ``Replacement``
        for each discarded request.
        """
        replacements: list[Replacement[W]] = []
        for request in reversed(requests):
            if not request.sequence:
                self._before -= 1
                request.sequence = self._before
            if request.replace_key or self._rules.replaces:
                waiting = self._replaceable.get(request.replace_key)
                if waiting is not None and waiting.arrived_ns >= request.arrived_ns:
                    number = waiting.line
                    self.remove(waiting)
                    self._take_place(waiting, request)
                    self._insert_in_order(waiting, number)
                    replacements.append(Replacement(request, waiting))
                    continue
                if waiting is not None:
                    self.remove(waiting)
                    replacements.append(Replacement(waiting, request))
            level = self._rules.level(request.priority)
            self._insert(request, 2 * (level - 1), first=True)
            self._watch(request, self._rules.policy(level))
        return replacements

    def _watch(self, request: W, policy: QueuePolicy) -> None:
        expires_ns = self._expiry(request, policy)
        if expires_ns:
            self.expiries.add(expires_ns, request, self.size)

    @staticmethod
    def _expiry(request: W, policy: QueuePolicy) -> int:
        timeout = policy.timeout_ns
        if not timeout:
            return request.deadline_ns
        if policy.allow_override and 0 < request.timeout_ns < timeout:
            timeout = request.timeout_ns
        late_ns = request.arrived_ns + timeout
        return min(late_ns, request.deadline_ns or late_ns)

    def head(self) -> W | None:
        """Returns the request that is to run next, without removing it; None: no request waits."""
        for number in self._order:
            line = self._lines[number]
            if line:
                if len(line) == 1:
                    (owners,) = line.values()
                    return _next_of(owners)
                return min(map(_next_of, line.values()), key=_sequence)
        return None

    def waiting(self, key: Hashable) -> Iterator[W]:
        """Iterates over the waiting requests with the batching key ``key``, in the order in which ``take`` would return them."""
        for number in self._order:
            owners = self._lines[number].get(key)
            if owners is not None:
                yield from _in_order(owners)

    def oldest_ns(self, key: Hashable) -> int:
        """Returns since when (CLOCK_MONOTONIC, ns) the oldest request with a batching key waits. At least one must wait.

        A request that has replaced another counts from the arrival of the replaced request.
        """
        found = [line[key] for line in self._lines.values() if key in line]
        return min(_first(waiting).since_ns for owners in found for waiting in owners.values())

    def take(self, key: Hashable, max_rows: int) -> list[W]:
        """Removes requests with this batching key from the queue and returns them. Together they have at most ``max_rows`` rows.

        If the first request alone has more rows, only this request is returned. Requests of priority level 1 come first. Within
        a level, requests that are past their timeout come last.
        """
        taken: list[W] = []
        rows = 0
        for number in self._order.copy():
            line = self._lines[number]
            if not line or (owners := line.get(key)) is None:
                continue
            before = len(taken)
            for request in _in_order(owners):
                if taken and rows + request.rows > max_rows:
                    break
                rows += request.rows
                taken.append(request)
            for request in taken[before:]:
                self._withdraw(request, owners)
                if self._replaceable:
                    self._forget(request)
            self._level_sizes[number // 2] -= len(taken) - before
            if owners:
                break
            self._end(number, line, key)
        if taken:
            self._served = max(self._served, taken[0].sequence)
            self.size -= len(taken)
            self._less(key, rows)
        return taken

    def remove(self, request: W) -> bool:
        """Removes a request. Returns False if the request does not wait in the queue."""
        if request.line < 0:
            return False
        number = request.line
        line = self._lines[number]
        owners = line[request.key]
        self._withdraw(request, owners)
        self._forget(request)
        self._level_sizes[number // 2] -= 1
        if not owners:
            self._end(number, line, request.key)
        self.size -= 1
        self._less(request.key, request.rows)
        return True

    def _withdraw(self, request: W, owners: _Waiters[W]) -> None:
        owner = request.owner
        waiting = owners[owner]
        del waiting[request.sequence]
        request.line = -1
        if not waiting:
            del owners[owner]
        self._shares.leave(owner)

    def expire(self, now_ns: int) -> list[W]:
        """Removes and returns the requests whose queue timeout or deadline has passed.

        If the queue policy says ``delay``, only requests whose deadline has passed are removed. A request whose queue
        timeout has passed then runs after the requests of its priority level whose queue timeout has not passed.
        """
        refused: list[W] = []
        while (request := self.expiries.take(now_ns)) is not None:
            level = request.line // 2 + 1
            gone = 0 < request.deadline_ns <= now_ns
            self.remove(request)
            if gone or not self._rules.policy(level).delay:
                refused.append(request)
                continue
            self._insert(request, 2 * (level - 1) + 1)
            if request.deadline_ns:
                self.expiries.add(request.deadline_ns, request, self.size)
        return refused

    def requests(self) -> list[W]:
        """Returns all waiting requests, in no particular order."""
        owners = [owners for line in self._lines.values() for owners in line.values()]
        return [request for each in owners for waiting in each.values() for request in waiting.values()]

    def _forget(self, request: W) -> None:
        if self._replaceable.get(request.replace_key) is request:
            del self._replaceable[request.replace_key]

    def _insert(self, request: W, number: int, *, first: bool = False) -> None:
        line = self._lines.get(number)
        if line is None:
            line = self._lines[number] = {}
            bisect.insort(self._order, number)
            self._level_sizes.setdefault(number // 2, 0)
        request.line = number
        self.size += 1
        self._level_sizes[number // 2] += 1
        self._rows[request.key] = self._rows.get(request.key, 0) + request.rows
        if self.changed is not None:
            self.changed[request.key] = None
        if request.replace_key or self._rules.replaces:
            self._replaceable[request.replace_key] = request
        owner = request.owner
        self._shares.enter(owner)
        owners = line.get(request.key)
        if owners is None:
            owners = line[request.key] = {}
        waiting = owners.get(owner)
        if waiting is None:
            waiting = owners[owner] = OrderedDict()
        waiting[request.sequence] = request
        if first:
            waiting.move_to_end(request.sequence, last=False)

    def _end(self, number: int, line: dict[Hashable, _Waiters[W]], key: Hashable) -> None:
        del line[key]
        if not line and number:
            del self._lines[number]
            self._order.remove(number)
            if number > 1 and number ^ 1 not in self._lines:
                del self._level_sizes[number // 2]

    def _less(self, key: Hashable, rows: int) -> None:
        if self.changed is not None:
            self.changed[key] = None
        left = self._rows[key] - rows
        if left:
            self._rows[key] = left
        else:
            del self._rows[key]

    def __repr__(self) -> str:
        return f"<RequestQueue {self.size} waiting, {len(self._rows)} keys>"


def _first(waiting: OrderedDict[int, W]) -> W:
    return next(iter(waiting.values()))


def _in_order(owners: _Waiters[W]) -> Iterable[W]:
    """Iterates over the waiting requests of several owners in the order in which they run: owners take turns."""
    if len(owners) == 1:
        (waiting,) = owners.values()
        return waiting.values()
    return heapq.merge(*[waiting.values() for waiting in owners.values()], key=_sequence)


def _next_of(owners: _Waiters[W]) -> W:
    if len(owners) == 1:
        (waiting,) = owners.values()
        return _first(waiting)
    return min(map(_first, owners.values()), key=_sequence)


def _sequence(request: Waiting) -> int:
    return request.sequence


class ParkedRequests(Generic[W]):
    """Requests of equal shapes that wait for a compiled program. A new request replaces any that has the same ``replace_key``."""

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        #: The waiting requests, in the order of their arrival.
        self.requests: list[W] = []
        self._shares = Shares()
        #: Replace key -> where the request of that key is.
        self._at: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: W) -> Replacement[W] | None:
        """Adds a request to the queue. Of two requests with the same replace key, the queue keeps only the newer request.

        Returns both requests if one was discarded, otherwise None. Raises Unavailable if the queue is full.
        """
        most, waiting = self._rules.max_size, len(self.requests)
        full = waiting >= most and not self._shares.below(request.owner, waiting, most)
        if full and request.replace_key not in self._at:
            raise Unavailable("Exceeds maximum queue size")
        return self._place(request)

    def extend(self, batch: Iterable[W]) -> list[Replacement[W]]:
        """Adds requests like ``add``, even if the queue is full. Returns a ``Replacement`` for each discarded request."""
        return [replacement for request in batch if (replacement := self._place(request)) is not None]

    def _place(self, request: W) -> Replacement[W] | None:
        at, former = self._at.get(request.replace_key), None
        if at is None:
            if request.replace_key or self._rules.replaces:
                self._at[request.replace_key] = len(self.requests)
            self.requests.append(request)
        else:
            former = self.requests[at]
            if request.arrived_ns < former.arrived_ns:
                return Replacement(request, former)
            request.since_ns = former.since_ns
            self._shares.leave(former.owner)
            self.requests[at] = request
        self._shares.enter(request.owner)
        return None if former is None else Replacement(former, request)

    def __repr__(self) -> str:
        return f"<ParkedRequests {len(self.requests)}>"
