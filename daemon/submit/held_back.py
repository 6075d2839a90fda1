"""Requests that are not sent now, because their connection, or their client, holds its share of answers that it has not taken.

    an answer comes ─▶ its connection holds its share ─▶ what it asked besides is called back from the workers ─▶ waits here
    its client holds its share ─▶ what all its connections asked, and would be answered with as much, likewise
    answers leave   ─▶ as many go as its share has room for, each taken to be answered with as much as its last large answer

Each connection's wait in their order, and for nothing but itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping

from tensord.daemon.submit.accounts import Account, Client
from tensord.daemon.submit.choice import Choice
from tensord.daemon.submit.lent import Lent
from tensord.daemon.submit.pending import Pending
from tensord.daemon.submit.sending import Sending
from tensord.shm.errors import Unavailable


class _Line:
    """One connection's."""

    __slots__ = ("sent", "waiting")

    def __init__(self) -> None:
        #: With the time they give up.
        self.waiting: deque[tuple[float, Pending]] = deque()
        #: Those that were let go, until they are answered.
        self.sent: set[int] = set()


class HeldBack:
    """One per front. ``in_flight``: all of its requests, by id; ``seconds``: how long one waits at most."""

    def __init__(
        self, in_flight: Mapping[int, Pending], seconds: float, lent: Lent, choice: Choice, sending: Sending
    ) -> None:
        self._in_flight = in_flight
        self._seconds = seconds
        self._lent = lent
        self._choice = choice
        self._sending = sending
        #: By connection; empty: nobody waits.
        self.lines: dict[Account, _Line] = {}
        #: Those that wait for what others of their client hold, in order.
        self._barred: dict[Client, dict[Account, None]] = {}

    def filled(self, pending: Pending | None) -> None:
        """With an answer to that request its connection, or its client, holds its share."""
        account = None if pending is None else pending.account
        if account is None or pending is None:
            return
        full, client = self._lent.full, account.client
        if client.answers >= client.limit:
            if account.last > client.sizes[0]:
                client.last = account.last
                account.note_bulky(kind_of(pending))
            if client not in full:
                full.add(client)
                self._recall(lambda other: other.account is not None and self._is_too_much(other.account, other))
        if account.is_full and account not in full:
            full.add(account)
            self._recall(lambda other: other.account is account)

    def _is_too_much(self, account: Account, pending: Pending) -> bool:
        """Whether the client of a request holds its share, and would be answered with as much again."""
        client = account.client
        return client.answers >= client.limit and kind_of(pending) in client.bulky

    def _recall(self, concerned: Callable[[Pending], bool]) -> None:
        """What has not begun of those comes back as cancelled."""
        for worker in self._choice.workers.values():
            for request_id, pending in worker.in_flight.items():
                if not (pending.cancelled or pending.recalled) and concerned(pending) and self._may_come_back(pending):
                    pending.recalled = True
                    worker.lane.cancel(request_id)
        self._sending.flush_all_later(self._choice.workers.values())

    def _may_come_back(self, pending: Pending) -> bool:
        """What keeps state in its worker, or answers again and again, may have begun, and is not sent twice."""
        state = self._choice.state_of(pending.prepared)
        return state is not None and state.repeatable and not state.sticky and not state.streams

    def came_back(self, pending: Pending, now: float) -> None:
        """One that was called back had not begun: it waits."""
        pending.recalled, pending.worker = False, None
        self.add(pending, now)

    def holds(self, pending: Pending) -> bool:
        """Whether a request has to wait."""
        account = pending.account
        if account is None:
            return False
        kind = kind_of(pending)
        if account in self.lines or not account.may_send(kind):
            return True
        # Others of its client wait already: it does not overtake them.
        return account.client in self._barred and kind in account.client.bulky

    def add(self, pending: Pending, now: float) -> None:
        """It waits."""
        account = pending.account
        assert account is not None
        self.lines.setdefault(account, _Line()).waiting.append((now + self._seconds, pending))
        if not account.is_full:
            self._barred.setdefault(account.client, {})[account] = None

    def let_go(self, account: Account, send: Callable[[Pending], None]) -> None:
        """An answer of that connection was taken: sends what may go now of its own, and of its client's others."""
        going = self._take(account)
        barred = self._barred.get(account.client)
        while barred:
            first = next(iter(barred))
            going += self._take(first)
            if first in barred:
                break  # it waits still, and so do those behind it
        for pending in going:
            send(pending)

    def let_all_go(self, send: Callable[[Pending], None]) -> None:
        """Sends what may go, where something else than an answer that was taken makes it possible."""
        for pending in [pending for account in list(self.lines) for pending in self._take(account)]:
            send(pending)

    def _take(self, account: Account) -> list[Pending]:
        """Takes out what may go of one connection's."""
        line, client = self.lines.get(account), account.client
        going: list[Pending] = []
        if line is None:
            self._unbar(account)
            return going
        line.sent &= self._in_flight.keys()
        client.sent &= self._in_flight.keys()
        while line.waiting:
            _, pending = line.waiting[0]
            if not self._ended(pending):
                if not _has_own_room(account, line):
                    break
                if not _has_common_room(client, kind_of(pending)):
                    self._barred.setdefault(client, {})[account] = None
                    return going
                line.sent.add(pending.record.request_id)
                client.sent.add(pending.record.request_id)
                going.append(pending)
            line.waiting.popleft()
        if not line.waiting:
            del self.lines[account]
        self._unbar(account)
        return going

    def _unbar(self, account: Account) -> None:
        barred = self._barred.get(account.client)
        if barred is not None:
            barred.pop(account, None)
            if not barred:
                del self._barred[account.client]

    def expired(self, now: float) -> Iterator[tuple[Pending, Unavailable]]:
        """Takes out what waited too long, each with what it is answered."""
        for account, line in list(self.lines.items()):
            while line.waiting and (line.waiting[0][0] <= now or self._ended(line.waiting[0][1])):
                _, pending = line.waiting.popleft()
                if not self._ended(pending):
                    yield pending, Unavailable(f"{account.describe()}; that did not change within {self._seconds:g} s")
            if not line.waiting:
                del self.lines[account]
                self._unbar(account)

    def _ended(self, pending: Pending) -> bool:
        return pending.record.request_id not in self._in_flight

    def __len__(self) -> int:
        return sum(len(line.waiting) for line in self.lines.values())

    def __repr__(self) -> str:
        return f"<HeldBack {len(self)} requests of {len(self.lines)} connections>"


def _has_own_room(account: Account, line: _Line) -> bool:
    """Whether a connection's share has room for an answer beside those that are still to come."""
    expected = account.answers + (len(line.sent) + 1) * account.last
    return not account.is_full and (expected <= account.limit or not (line.sent or account.answers))


def _has_common_room(client: Client, kind: Hashable) -> bool:
    """Whether a client's share, of all its connections, has room for an answer of that kind."""
    expected = client.answers + (len(client.sent) + 1) * client.last
    return kind not in client.bulky or expected <= client.limit or not (client.sent or client.answers)


def kind_of(pending: Pending) -> Hashable:
    """What requests with answers of one size have in common."""
    prepared = pending.prepared
    return prepared.model, prepared.version, tuple([tensor.shape for tensor in prepared.inputs])
