"""Leases of workers' response arenas that this front has: from the answer that brought one until its bytes have left."""

from __future__ import annotations

from shm.arena import LeaseKey
from shm.lane import SubmitterLane


class Lent:
    """One per front. Whoever took an answer gives its lease back; the submitter does where that met a defect."""

    def __init__(self) -> None:
        self._leases: set[tuple[SubmitterLane, LeaseKey]] = set()
        #: A lease came with an answer: its lane and its key.
        self.note = self._leases.add

    def take_back(self, lane: SubmitterLane, key: LeaseKey) -> bool:
        """Gives it to its worker with what next leaves on the lane. False: that was done before."""
        one = (lane, key)
        if one not in self._leases:
            return False
        self._leases.remove(one)
        lane.release(key)
        return True

    def __len__(self) -> int:
        return len(self._leases)

    def __repr__(self) -> str:
        return f"<Lent {len(self._leases)} leases>"
