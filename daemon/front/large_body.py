"""Receives large bodies of both protocols: into the request arena while they arrive, from the socket straight to their place.

    room? ─▶ place ─▶ everything came ─▶ take_lease        any time: drop, and what it has is given back
     ╰ none now: it waits ─▶ place, or refused

    read     | heads, first bytes of the body | rest of the body ...                      |
    into     | pages of our own ─▶ connection | the lease, in as few reads as there can be |

``Receiver`` asks for the memory. The protocol decides where in the lease the bytes go, and which are kept outside of it
(``tensord.daemon.http.reception``, ``tensord.daemon.grpc.arriving_message``).

``BodyReader`` reads the body of an HTTP/1 request, or the part of a tensor in an HTTP/2 frame: while its bytes arrive there is
nothing to parse, and reading them into their final memory saves two copies of each byte. It stays until the client has sent no
large body for a while: a client that sends one will most often send another. So only the first pages of each body are read in the
ordinary way, and the transport's protocol is not exchanged twice for each body.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from tensord.daemon.submit.accounts import Account
from tensord.daemon.submit.submitter import Submitter
from tensord.shm.arena import Lease
from tensord.shm.errors import DEFECT, Internal, ServingError

_log = logging.getLogger(__name__)
#: Bytes that are read before it is known what comes.
_FIRST_BYTE_SIZE = 16 << 10
#: A body with more bytes to come than this is read straight to its place.
DIRECT_BYTE_SIZE = 64 << 10


class Receiver:
    """Receives a large body into the request arena; base class for both protocols.

    Owns the lease that the body lies in until ``take_lease`` or ``drop`` is called.
    Args:
      model: the model that is asked for; "": it is not known yet.
      account: the account of the body's memory; None: it counts for nobody.
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

    def _wait_for_room(self, byte_size: int) -> None:
        """Queues the body for arena memory; returns at once.

        Later ``_place`` is called with a lease, or ``refuse`` with an error, and then ``_progressed``.
        """
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
        """Takes over a lease and writes the body into it from now on, beginning with the bytes that have arrived already."""
        raise NotImplementedError

    def refuse(self, error: ServingError) -> None:
        """Refuses the body with an error, because it got no memory."""
        raise NotImplementedError

    def _progressed(self) -> None:
        """Lets the connection go on with the body; called after ``_place`` or ``refuse``, when the wait for memory has ended."""
        raise NotImplementedError


class BodyConnection(Protocol):
    """Describes the interface that ``BodyReader`` needs of its connection."""

    def data_received(self, data: bytes) -> None: ...
    def direct_body_complete(self) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def eof_received(self) -> bool | None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class BodyReader(asyncio.BufferedProtocol):
    """Reads large bodies straight into their memory, in place of a connection's protocol, which gets all other bytes."""

    def __init__(self, connection: BodyConnection, transport: asyncio.Transport) -> None:
        self._connection = connection
        self._transport = transport
        self._first = memoryview(bytearray(_FIRST_BYTE_SIZE))
        #: Memory for the next bytes.
        self._room = self._first
        #: True while that is a body's; else the connection gets what arrives.
        self.reads_body = False
        #: Bytes of the body that were read since ``receive``; the connection counts them once it is complete, or stopped.
        self.byte_size = 0
        self._started = False

    def receive(self, room: memoryview) -> None:
        """Reads the next bytes that arrive into ``room``; once it is full, calls ``direct_body_complete``. Resumes reading."""
        self._room, self.reads_body, self.byte_size = room, True, 0
        if self._started:
            self._transport.resume_reading()
        else:
            self._started = True
            self._exchange(self)

    def stop(self) -> None:
        """Stops reading a body into its memory, as it is complete or no longer wanted; later bytes go to the connection."""
        self._room, self.reads_body = self._first, False

    def leave(self) -> None:
        """Gives the transport back to the connection's protocol, which gets all further bytes."""
        self._exchange(self._connection)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        if not self.reads_body:
            self._connection.data_received(bytes(self._first[:nbytes]))
            return
        self.byte_size += nbytes
        self._room = self._room[nbytes:]
        if not self._room:
            self._room, self.reads_body = self._first, False
            self._connection.direct_body_complete()

    def _exchange(self, protocol: object) -> None:
        # The transport looks at its protocol's kind when reading starts.
        self._transport.pause_reading()
        self._transport.set_protocol(protocol)  # type: ignore[arg-type]
        self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop()
        self._connection.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
