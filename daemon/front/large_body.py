"""Receives large HTTP and gRPC request bodies into the request arena while they arrive.

If the arena has no room for a body, the body waits for room or is refused. Subclasses of ``Receiver``, one for each protocol,
decide where in the arena memory the bytes go.
"""

from __future__ import annotations

import logging

from tensord.daemon.submit.accounts import Account
from tensord.daemon.submit.submitter import Submitter
from tensord.shm.arena import Lease
from tensord.shm.errors import DEFECT, Internal, ServingError

_log = logging.getLogger(__name__)


class Receiver:
    """Receives a large request body into leased arena memory. Owns the lease until ``take_lease`` or ``drop`` is called."""

    #: Lends the memory.
    _submitter: Submitter
    #: The account of the body's memory; None: it counts for nobody.
    _account: Account | None = None
    #: The model that is asked for; "": it is not known yet.
    _model = ""
    _lease: Lease | None = None
    #: True while the body is to be placed, and there is no room for it yet.
    waits_for_room = False
    _dropped = False

    def _wait_for_room(self, byte_size: int) -> None:
        self.waits_for_room = True
        self._submitter.wait_for_room(byte_size, self._granted, self._model, self._account, True)

    def _granted(self, lease: Lease | ServingError) -> None:
        self.waits_for_room = False
        if self._dropped:
            if isinstance(lease, Lease):
                self._submitter.give_back(lease)
            return
        if isinstance(lease, ServingError):
            self.refuse(lease)
        else:
            try:
                self._place(lease)
            except Exception:
                _log.exception("a body could not be placed")
                self.refuse(Internal(DEFECT))
        self._progressed()

    def take_lease(self) -> Lease | None:
        """Returns the lease of the request body's arena memory, which the caller then owns. Returns None if none is owned."""
        lease, self._lease = self._lease, None
        return lease

    def drop(self) -> None:
        """Drops the body and releases its memory. May be called again."""
        self._dropped = True
        self._give_back()

    def _give_back(self) -> None:
        lease = self.take_lease()
        if lease is not None:
            self._submitter.give_back(lease)

    def _place(self, lease: Lease) -> None:
        """Stores ``lease``, and copies the bytes received so far into the leased memory."""
        raise NotImplementedError

    def refuse(self, error: ServingError) -> None:
        """Stores the error with which the request will be answered. Bytes of the body that still arrive are discarded."""
        raise NotImplementedError

    def _progressed(self) -> None:
        raise NotImplementedError
