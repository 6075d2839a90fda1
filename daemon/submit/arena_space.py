"""Lends memory of a front's request arena to requests. A request for which there is no memory now waits in a queue.

Small, medium and large requests wait in three separate queues. In each queue, the client that holds the fewest bytes of the
arena is served first. A client that holds as many bytes as it may hold (``tensord.daemon.submit.accounts``) is skipped.

Medium and large requests whose bodies are still arriving may together take only a part of the arena. If no other body is
arriving, one request may take more.
"""

from __future__ import annotations

import heapq
import logging
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from tensord.daemon.submit.accounts import Account, ClientAccount
from tensord.shm.arena import Arena, Lease, taken_by
from tensord.shm.errors import ServingError, Unavailable

_log = logging.getLogger(__name__)

OnLease = Callable[[Lease | ServingError], None]


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits for arena memory. The request fails when the event loop's clock reaches ``give_up``, in seconds."""

    give_up: float
    byte_size: int
    on_lease: OnLease
    account: Account | None
    arriving: bool
    #: Counts the requests that have waited, in the order in which they came.
    number: int


class _Waiting(deque[_Waiter]):
    """The requests of one client that wait for memory, in order. ``owed``: bytes that must come free before any may have some."""

    owed = 0


_Line = dict[ClientAccount | None, _Waiting]


class ArenaSpace:
    """Gives requests leases of memory in a front's request arena. Requests for which there is no memory wait in a queue.

    Args:
      wait_seconds: how long a request waits for memory at most.
      arriving_byte_size: the most bytes that incomplete bodies may take together. It limits neither small bodies nor a body
        that arrives alone.
      closed: called each time a segment of the arena was closed.
    """

    def __init__(
        self, arena: Arena, wait_seconds: float, arriving_byte_size: int, closed: Callable[[], None] = lambda: None
    ) -> None:
        self._arena = arena
        self._closed = closed
        self._closures = arena.closures
        self._wait_seconds = wait_seconds
        self._arriving_limit = arriving_byte_size
        #: Bytes of all leases of what is not whole.
        self._arriving_byte_size = 0
        self._lines: tuple[_Line, ...] = ({}, {}, {})
        self._numbers = count()
        #: The number of requests in all lines.
        self._count = 0
        self._serving = self._again = False

    def loan(self, byte_size: int, account: Account | None = None, arriving: bool = False) -> Lease | None:
        """Lends ``byte_size`` bytes of the arena for the inputs of a request. The caller must end the lease with ``give_back``.

        Returns None if no memory is free now, if the limits of ``account`` or the limit for arriving content forbid it, or if a
        waiting request comes first.
        Args:
          account: the account of the client's connection, which counts the memory. If it is None, the memory is not counted.
          arriving: whether the content is still arriving from a client. Call ``arrived`` when it is complete.
        Raises InvalidArgument if the arena could never lend so many bytes. Raises Unavailable if the host has no memory
        or the process no file descriptor left.
        """
        if self._count and self._others_first(byte_size, account):
            return None
        arena = self._arena
        taken = taken_by(0 if byte_size <= arena.shared_byte_size else 1, byte_size)
        if account is not None and account.owed(taken):
            return None
        if arriving and self._too_much_arrives(taken):
            return None
        lease = arena.loan(byte_size)
        if lease is not None:
            taken = lease.block_size
            if account is not None:
                lease.holder = account
                account.requests += taken
                account.client.requests += taken
            if arriving:
                lease.arriving = True
                self._arriving_byte_size += taken
        return lease

    def _others_first(self, byte_size: int, account: Account | None) -> bool:
        held, line = _holds(_client_of(account)), self._line(byte_size)
        return any(_holds(client) <= held and self._first_admitted(line[client]) for client in line)

    def wait(
        self, byte_size: int, on_lease: OnLease, now: float, account: Account | None = None, arriving: bool = False
    ) -> None:
        """Queues a request for memory. Call it after ``loan`` has returned None for the request.

        Args:
          byte_size: the number of bytes that the request needs.
          on_lease: called once, later. Its argument is a lease, Unavailable if the request has waited too long, or an error
            of ``loan``.
          now: the time of the event loop in seconds.
          account: the account of the client's connection, which counts the memory. If it is None, the memory is not counted.
          arriving: whether the content of the request is still arriving from a client.
        """
        waiting = self._line(byte_size).setdefault(_client_of(account), _Waiting())
        waiting.append(_Waiter(now + self._wait_seconds, byte_size, on_lease, account, arriving, next(self._numbers)))
        waiting.owed = min(waiting.owed, self._owed(waiting[-1]))
        self._count += 1

    def arrived(self, lease: Lease) -> None:
        """Records that a lease has received its whole content. Requests that wait for memory may then get memory."""
        if self._ends_arriving(lease) and self._count:
            self._serve()

    def give_back(self, lease: Lease) -> None:
        """Ends a lease, and lends the memory to requests that wait. May be called again for the same lease."""
        account = lease.holder
        if account is not None:
            lease.holder = None
            account.requests -= lease.block_size
            account.client.requests -= lease.block_size
            for line in self._lines:
                if account.client in line:
                    line[account.client].owed -= lease.block_size
        self._ends_arriving(lease)
        self._arena.take_back(lease)
        if self._count:
            self._serve()
        if self._closures != self._arena.closures:
            self._closures = self._arena.closures
            self._closed()

    def _ends_arriving(self, lease: Lease) -> bool:
        arrived, lease.arriving = lease.arriving, False
        if arrived:
            self._arriving_byte_size -= lease.block_size
            for line in self._lines:
                for waiting in line.values():
                    waiting.owed -= lease.block_size
        return arrived

    def expire(self, now: float) -> bool:
        """Refuses requests that have waited too long for room in the arena. Returns whether other requests still wait for room.

        Gives the room that there is to those behind them.
        ``now``: the current time of the event loop in seconds.
        """
        for line in self._lines:
            for client in list(line):
                while (waiting := line.get(client)) and (waiter := waiting[0]).give_up <= now:
                    self._leave(line, client, waiter)
                    _tell(waiter.on_lease, Unavailable(f"{self._describe(waiter)} within {self._wait_seconds:g} s"))
        if self._count:
            self._serve()  # there may be room for who waited behind them
        return bool(self._count)

    def _describe(self, waiter: _Waiter) -> str:
        size, account = self._taken_by(waiter.byte_size), waiter.account
        if account is not None and account.owed(size):
            return f"{account.describe_requests(size)}, and nothing was given back"
        if waiter.arriving and self._too_much_arrives(size):
            arriving, limit = self._arriving_byte_size, self._arriving_limit
            return f"bodies that are not whole take {arriving} bytes, {size} more make over {limit}, and none ended"
        return f"{self._arena.describe_full(waiter.byte_size)}, and none came free"

    def _taken_by(self, byte_size: int) -> int:
        return taken_by(0 if byte_size <= self._arena.shared_byte_size else 1, byte_size)

    def _leave(self, line: _Line, client: ClientAccount | None, waiter: _Waiter) -> None:
        line[client].remove(waiter)
        self._count -= 1
        if not line[client]:
            del line[client]

    def _line(self, byte_size: int) -> _Line:
        arena = self._arena
        return self._lines[(byte_size > arena.small_byte_size) + (byte_size > arena.shared_byte_size)]

    def _owed(self, waiter: _Waiter) -> int:
        taken = self._taken_by(waiter.byte_size)
        own = 0 if waiter.account is None else waiter.account.owed(taken)
        return max(own, self._too_much_arrives(taken)) if waiter.arriving else own

    def _too_much_arrives(self, byte_size: int) -> int:
        """Returns how many arriving bytes must be complete before ``byte_size`` more may arrive, or 0."""
        others = self._arriving_byte_size
        too_much = others + byte_size - self._arriving_limit
        return min(others, too_much) if too_much > 0 and byte_size > self._arena.small_byte_size else 0

    def _serve(self) -> None:
        """Lends memory to waiting requests, first to the client that holds the fewest bytes."""
        if self._serving:
            self._again = True  # whoever got some gave it back at once, from within
            return
        self._serving = self._again = True
        while self._again:
            self._again = False
            self._serve_lines()
        self._serving = False

    def _serve_lines(self) -> None:
        for line in self._lines:
            # Each client's in their order, and the client first that holds least.
            heap = [(_holds(client), waiting[0].number, client) for client, waiting in line.items()]
            heapq.heapify(heap)
            while heap:
                client = heapq.heappop(heap)[-1]
                first = self._first_admitted(line[client])
                if first is None:
                    continue
                granted = self._grant(first)
                if granted is None:
                    break
                self._leave(line, client, first)
                if not _tell(first.on_lease, granted) and isinstance(granted, Lease):
                    self.give_back(granted)
                if client in line:
                    heapq.heappush(heap, (_holds(client), line[client][0].number, client))

    def _first_admitted(self, waiting: _Waiting) -> _Waiter | None:
        if waiting.owed > 0:
            return None
        owed = sys.maxsize
        for waiter in waiting:
            needed = self._owed(waiter)
            if not needed:
                return waiter
            owed = min(owed, needed)
        waiting.owed = owed
        return None

    def _grant(self, waiter: _Waiter) -> Lease | ServingError | None:
        waiting, self._count = self._count, 0  # it is its turn: nobody is before it
        try:
            return self.loan(waiter.byte_size, waiter.account, waiter.arriving)
        except ServingError as error:
            return error
        finally:
            self._count = waiting

    def __repr__(self) -> str:
        return f"<ArenaSpace {self._arena!r}, {self._count} wait>"


def _holds(client: ClientAccount | None) -> int:
    return 0 if client is None else client.requests


def _client_of(account: Account | None) -> ClientAccount | None:
    return None if account is None else account.client


def _tell(on_lease: OnLease, given: Lease | ServingError) -> bool:
    """Calls ``on_lease``. Returns False if that raised an exception, which is logged."""
    try:
        on_lease(given)
    except Exception:
        _log.exception("a request could not go on with what its wait for room came to")
        return False
    return True
