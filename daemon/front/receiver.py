"""Receives a large body into the request arena while it arrives, over any protocol.

    room? ─▶ place ─▶ everything came ─▶ take_lease        any time: drop, and what it has is given back
     ╰ none now: it waits ─▶ place, or refused

The protocol decides where in the lease the bytes go, and which are kept outside of it (``tensord.daemon.http.reception``,
``tensord.daemon.grpc.arriving_message``).
"""

from __future__ import annotations

import logging

from tensord.daemon.submit.accounts import Account
from tensord.daemon.submit.submitter import Submitter
from tensord.shm.arena import Lease
from tensord.shm.errors import DEFECT, Internal, ServingError

_log = logging.getLogger(__name__)


class Receiver:
    """Receives a large body into the request arena; base class for both protocols.

    Owns its lease until that is taken, or dropped.
    Args:
      model: the model that is asked for; "": it is not known yet.
      account: the account of the body's memory.
    """

    __slots__ = ("_account", "_dropped", "_lease", "_model", "_submitter", "waits_for_room")

    def __init__(self, submitter: Submitter, model: str, account: Account | None) -> None:
        self._submitter = submitter
        self._model = model
        self._account = account
        self._lease: Lease | None = None
        #: True while the body is to be placed, and there is no room for it yet.
        self.waits_for_room = False
        self._dropped = False

    def _ask_for_room(self, byte_size: int, waits: bool = True) -> bool:
        """Asks for arena memory. Calls ``_place`` and returns True if there is some now; otherwise returns False.

        If there is none and ``waits``, calls ``_place`` or ``_refuse`` when the wait has ended, and then ``_progressed``.
        Raises InvalidArgument: the arena could never lend so much; Unavailable: the host has no memory.
        """
        lease = self._submitter.loan(byte_size, self._account, True)
        if lease is not None:
            self._lease = lease
            self._place(lease)
        elif waits:
            self.waits_for_room = True
            self._submitter.wait_for_room(byte_size, self._granted, self._model, self._account, True)
        return lease is not None

    def _granted(self, lease: Lease | ServingError) -> None:
        self.waits_for_room = False
        if self._dropped:
            if isinstance(lease, Lease):
                self._submitter.give_back(lease)
            return
        if isinstance(lease, ServingError):
            self._refuse(lease)
        else:
            self._lease = lease
            try:
                self._place(lease)
            except Exception:
                _log.exception("a body could not be placed")
                self._refuse(Internal(DEFECT))
        self._progressed()

    def take_lease(self) -> Lease | None:
        """Returns the lease that the body lies in, and gives it up: the caller owns it then. None: there is none."""
        lease, self._lease = self._lease, None
        return lease

    def drop(self) -> None:
        """Drops the body and releases its memory. Idempotent."""
        self._dropped = True
        self._give_back()

    def _give_back(self) -> None:
        lease = self.take_lease()
        if lease is not None:
            self._submitter.give_back(lease)

    def _place(self, lease: Lease) -> None:
        """Directs the body into the lease, including the bytes that have arrived already."""
        raise NotImplementedError

    def _refuse(self, error: ServingError) -> None:
        """Refuses the body with an error, because it got no memory."""
        raise NotImplementedError

    def _progressed(self) -> None:
        """Continues after the wait for arena memory has ended with a lease or a refusal."""
        raise NotImplementedError
