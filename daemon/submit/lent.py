"""Leases of workers' response arenas that this front has: from the answer that brought one until its bytes have left."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from tensord.daemon.submit.accounts import Account, Client, Holdings
from tensord.daemon.submit.pending import Pending, Worker
from tensord.shm.arena import LeaseKey, taken_by
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import Slice


class Lent:
    """One per front. Whoever took an answer gives its lease back; the submitter does where that met a defect."""

    def __init__(self) -> None:
        #: Whose it is, how large, and the worker's whose it was.
        self._leases: dict[tuple[SubmitterLane, LeaseKey], tuple[Account, int, Worker]] = {}
        self._nobody = Account(Client("nobody", sys.maxsize, (0, 0, 0)), sys.maxsize)
        #: Connections, and clients, that hold their share.
        self.full: set[Holdings] = set()

    def note(self, worker: Worker, key: LeaseKey, pending: Pending | None, contents: Iterable[object]) -> bool:
        """An answer came in a lease. True: with it its connection, or its client, holds its share.

        Args:
          pending: the request; None: nobody waits for it.
          contents: what it consists of.
        """
        size = 0
        for content in contents:
            if type(content) is Slice:
                size += content.byte_size
        # What of the arena it takes, which is more than it is.
        size = taken_by(key[0], size)
        account = (None if pending is None else pending.account) or self._nobody
        self._leases[worker.lane, key] = account, size, worker
        client, account.last = account.client, size
        account.answers += size
        client.answers += size
        return account.answers >= account.limit or client.answers >= client.limit

    def take_back(self, lane: SubmitterLane, key: LeaseKey) -> tuple[Account, Worker] | None:
        """Gives it to its worker with what next leaves on the lane. Returns whose it was, and the worker; None: it is done."""
        found = self._leases.pop((lane, key), None)
        if found is None:
            return None
        lane.release(key)
        account, byte_size, worker = found
        client = account.client
        account.answers -= byte_size
        client.answers -= byte_size
        if self.full:
            self.full -= {each for each in (account, client) if each.answers < each.limit}
        return account, worker

    def __len__(self) -> int:
        return len(self._leases)

    def __repr__(self) -> str:
        return f"<Lent {len(self._leases)} leases>"
