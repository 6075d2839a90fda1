"""Decides which requests wait because their connection or their client has too many bytes of unread answers.

    a connection is at its limit ─▶ all requests of the connection wait
    a client is at its limit     ─▶ a request of the client waits if a request of the same kind had a large answer before
    answers have been sent       ─▶ waiting requests may be sent, in the order in which they came on their connection

Two requests are of the same kind if they have the same model, version and input shapes.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tensord.daemon.submit.accounts import Account, ClientAccount, Holdings
from tensord.daemon.submit.in_flight import InFlight, WorkerLink
from tensord.shm.arena import LeaseKey, taken_by
from tensord.shm.errors import Unavailable
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, Slice


@dataclass(slots=True)
class _Line:
    #: The requests that wait, each with the time at which it gives up.
    waiting: deque[tuple[float, InFlight]] = field(default_factory=deque)
    sent: set[int] = field(default_factory=set)


class Throttle:
    """Decides which requests must wait until their client has read more bytes of earlier answers.

    ``in_flight``: the requests in flight, by id. ``seconds``: how long a request waits at most.
    """

    def __init__(self, in_flight: Mapping[int, InFlight], seconds: float) -> None:
        self._in_flight = in_flight
        self._seconds = seconds
        #: Connections, and clients, that hold their share of answers.
        self.full: set[Holdings] = set()
        #: The lines of requests that wait, by connection; empty: nobody waits.
        self.lines: dict[Account, _Line] = {}
        #: The connections that wait for what others of their client hold, in order.
        self._barred: dict[ClientAccount, dict[Account, None]] = {}
        #: Leases of workers' response arenas that are outstanding, from the answer that brought one until its bytes have left:
        #: the account that it counts for, its size, and the worker.
        self._outstanding: dict[tuple[SubmitterLane, LeaseKey], tuple[Account, int, WorkerLink]] = {}
        self._nobody = Account(ClientAccount("nobody", sys.maxsize, (0, 0, 0)), sys.maxsize)

    # ---------------------------------------------------------------------------------------------------- who holds its share

    def hold(
        self, worker: WorkerLink, key: LeaseKey, request: InFlight | None, record: AnswerRecord
    ) -> Sequence[Callable[[InFlight], bool]]:
        """Counts an answer's bytes for the request's connection and client, until ``leave`` is called with ``key``.

        Returns functions that take a request. The caller must ask workers to give back each request for which any function
        returns True. ``worker``: the worker that sent the answer. ``key``: the lease of the answer's memory.
        ``request``: the answered request. If ``request`` is None, the bytes count for no connection and no client.
        """
        size = 0
        for content in record.contents:
            if type(content) is Slice:
                size += content.byte_size
        # What of the arena it takes, which is more than it is. Behind another block lies what is in segment 0 or the reserve.
        size = taken_by(0 if key[1] else key[0], size)
        account = (None if request is None else request.account) or self._nobody
        self._outstanding[worker.lane, key] = account, size, worker
        client, account.last = account.client, size
        account.answers += size
        client.answers += size
        if (account.answers < account.limit and client.answers < client.limit) or request is None:
            return ()
        full: list[Callable[[InFlight], bool]] = []
        if account is not self._nobody:
            if self._fills_client(account, request):
                full.append(self._is_too_much)
            if self._fills_connection(account):
                full.append(lambda other: other.account is account)
        return full

    def leave(self, lane: SubmitterLane, key: LeaseKey) -> tuple[Account, WorkerLink] | None:
        """Stops counting the memory of an answer, given the lane and the key of the answer's lease.

        Returns the client connection's account and the worker that answered, or None if the memory was not counted.
        """
        found = self._outstanding.pop((lane, key), None)
        if found is None:
            return None
        account, byte_size, worker = found
        account.answers -= byte_size
        account.client.answers -= byte_size
        if self.full:
            self.full -= {each for each in (account, account.client) if each.answers < each.limit}
        return account, worker

    @property
    def held(self) -> int:
        """Returns how many answers to all clients together still hold memory in the workers' arenas."""
        return len(self._outstanding)

    def _fills_client(self, account: Account, request: InFlight) -> bool:
        client = account.client
        if client.answers < client.limit:
            return False
        if account.last > client.sizes[0]:
            client.last = account.last
            account.note_bulky(kind_of(request))
        if client in self.full:
            return False
        self.full.add(client)
        return True

    def _fills_connection(self, account: Account) -> bool:
        if not account.is_full or account in self.full:
            return False
        self.full.add(account)
        return True

    def _is_too_much(self, request: InFlight) -> bool:
        """Returns whether the client has too many unread bytes, and requests with this model and shapes had large answers."""
        account = request.account
        if account is None:
            return False
        return account.client.answers >= account.client.limit and kind_of(request) in account.client.bulky

    # ------------------------------------------------------------------------------------------------------------ who waits

    def holds(self, request: InFlight) -> bool:
        """Returns whether a request must not be sent yet, because its client has not read enough bytes of earlier answers."""
        account = request.account
        if account is None:
            return False
        kind = kind_of(request)
        if account in self.lines or not account.may_send(kind):
            return True
        # Others of its client wait already: it does not overtake them.
        return account.client in self._barred and kind in account.client.bulky

    def add(self, request: InFlight, now: float) -> None:
        """Queues a request behind the waiting requests of its connection. ``now``: the time of the event loop in seconds."""
        account = request.account
        assert account is not None
        self.lines.setdefault(account, _Line()).waiting.append((now + self._seconds, request))
        if not account.is_full:
            self._barred.setdefault(account.client, {})[account] = None

    def let_go(self, account: Account) -> list[InFlight]:
        """Removes and returns a client's waiting requests that the limits on unread answers allow to be sent now.

        Call it when a connection of the client has freed an answer's memory. ``account``: counts this connection's memory.
        """
        going = self._take(account)
        barred = self._barred.get(account.client)
        while barred:
            first = next(iter(barred))
            going += self._take(first)
            if first in barred:
                break  # it waits still, and so do those behind it
        return going

    def let_all_go(self) -> list[InFlight]:
        """Removes and returns all waiting requests that the limits on unread answers allow to be sent now.

        Even if its own limit or its client's limit is reached, a connection may send one request at a time, if answers that the
        connection already holds must be sent after the answer to this request.
        """
        going: list[InFlight] = []
        for account, line in list(self.lines.items()):
            going += self._take(account)
            first = None if line.sent else next((each for each in line.waiting if each[1].holds_up), None)
            if first is not None:
                line.waiting.remove(first)
                line.sent.add(first[1].record.request_id)
                going += [first[1], *self._take(account)]
        return going

    def _take(self, account: Account) -> list[InFlight]:
        """Removes and returns the waiting requests of ``account`` that may be sent now."""
        line, client = self.lines.get(account), account.client
        going: list[InFlight] = []
        if line is None:
            return going
        line.sent &= self._in_flight.keys()
        client.sent &= self._in_flight.keys()
        while line.waiting:
            _, request = line.waiting[0]
            if not self._ended(request):
                if not _has_own_room(account, line):
                    break
                if not _has_common_room(client, kind_of(request)):
                    self._barred.setdefault(client, {})[account] = None
                    return going
                line.sent.add(request.record.request_id)
                client.sent.add(request.record.request_id)
                going.append(request)
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

    def expired(self, now: float) -> Iterator[tuple[InFlight, Unavailable]]:
        """Removes requests whose time limit has passed at the event-loop time ``now``. Yields each with its client's error."""
        for account, line in list(self.lines.items()):
            while line.waiting and (line.waiting[0][0] <= now or self._ended(line.waiting[0][1])):
                _, request = line.waiting.popleft()
                if not self._ended(request):
                    yield request, Unavailable(f"{account.describe()}; that did not change within {self._seconds:g} s")
            if not line.waiting:
                del self.lines[account]
                self._unbar(account)

    def _ended(self, request: InFlight) -> bool:
        return request.record.request_id not in self._in_flight

    def __len__(self) -> int:
        return sum(len(line.waiting) for line in self.lines.values())

    def __repr__(self) -> str:
        return f"<Throttle of {len(self)} requests of {len(self.lines)} connections>"


def _has_own_room(account: Account, line: _Line) -> bool:
    expected = account.answers + (len(line.sent) + 1) * account.last
    return not account.is_full and (expected <= account.limit or not (line.sent or account.answers))


def _has_common_room(client: ClientAccount, kind: Hashable) -> bool:
    expected = client.answers + (len(client.sent) + 1) * client.last
    return kind not in client.bulky or expected <= client.limit or not (client.sent or client.answers)


def kind_of(request: InFlight) -> Hashable:
    """Returns a key that is equal for requests with the same model, version and input shapes."""
    prepared = request.prepared
    return prepared.model, prepared.version, tuple([tensor.shape for tensor in prepared.inputs])
