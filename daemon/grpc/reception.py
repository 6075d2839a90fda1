"""One large ModelInferRequest while it arrives: its head is kept aside, its raw tensors go straight to where a worker reads them.

    pieces ─▶ HEAD ─ a raw tensor begins ─▶ room? ─▶ PLACED ─ everything came ─▶ fields, take_lease
               │                             ╰ none ─▶ WAITING ─ room came ──┘
               ╰ none, or too much before it ─▶ DECLINED                                any time: drop

lease    | tensor | pad | tensor | pad | ...      pad = up to the next 64 bytes, what an executable needs to use it in place

Until it is PLACED, whoever feeds it keeps the pieces as well, and may go on without it. Each tensor says how long it is just
before it comes, and the head may go on behind the tensors.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from tensord.daemon.front.receiver import Receiver
from tensord.daemon.grpc.request_fields import ArrivingFields, RefusedRequest
from tensord.daemon.grpc.walk import walk_beginning
from tensord.daemon.submit.accounts import Account
from tensord.daemon.submit.submitter import Submitter
from tensord.shm.arena import ALIGNMENT, Lease
from tensord.shm.errors import ServingError
from tensord.shm.messages import Slice

#: For every so many bytes of a message with several tensors the lease has room for one pad; smaller tensors may go without.
_PADDED_BYTE_SIZE = 64 << 10
#: Longer heads hold data.
_MAX_HEAD = 64 << 10


class Phase(enum.Enum):
    """Says where a reception is in its life."""

    #: No raw tensor has begun.
    HEAD = "head"
    #: One has, and there is no room for it yet.
    WAITING = "waiting"
    #: What comes goes into the lease.
    PLACED = "placed"
    #: It is no request, or there was no room in time: what comes is passed over.
    REFUSED = "refused"
    #: Nothing of it will be placed.
    DECLINED = "declined"


class Reception(Receiver):
    """Puts a large message where a worker reads it. Owns the lease until ``take_lease`` or ``drop``.

    Args:
      byte_size: the whole message's.
      account: whose memory it takes.
    """

    __slots__ = (
        "_at",
        "_error",
        "_fields",
        "_on_room",
        "_padding",
        "_raws",
        "_taken",
        "phase",
    )

    def __init__(self, submitter: Submitter, byte_size: int, account: Account | None = None) -> None:
        super().__init__(submitter, "", account)
        self._fields = ArrivingFields(byte_size)
        self.phase = Phase.HEAD
        self._on_room: Callable[[], None] | None = None
        #: Bytes of the message before the first raw tensor's.
        self._taken = 0
        #: Where in the lease the next byte goes, and how much of it may still be pads.
        self._at = self._padding = 0
        #: Begin and size of each raw tensor in the lease.
        self._raws: list[tuple[int, int]] = []
        self._error: RefusedRequest | None = None

    @property
    def kept_byte_size(self) -> int:
        """Returns how many bytes it has in ordinary memory."""
        return len(self._fields.head) + len(self._fields.client_id)

    @property
    def head(self) -> bytearray:
        """Returns what came of the message beside its id and its raw tensors."""
        return self._fields.head

    # -------------------------------------------------------------------------------------------------------- receive

    def feed(self, piece: memoryview, on_room: Callable[[], None]) -> None:
        """Takes the next piece of the message, nothing beyond it.

        Args:
          on_room: called once if it is WAITING after this, when it is PLACED or REFUSED: ``catch_up`` is due.
        """
        if self.phase is Phase.PLACED:
            self._fill(piece, 0)
        elif self.phase is Phase.HEAD:
            begun = None if self._taken else walk_beginning(piece, 0, len(piece))
            try:
                if begun is None:
                    at, begins = self._fields.take(piece, 0)
                else:
                    self._fields.begin(*begun)
                    at, begins = begun[2], True
            except RefusedRequest:
                # Nothing is gained from refusing it early, and whoever reads it whole says why.
                self.phase = Phase.DECLINED
                return
            self._taken += at
            if begins:
                try:
                    self._ask_for_room(self._room_size())
                except ServingError as error:
                    self._refuse(error)
                if self.waits_for_room:
                    self.phase, self._on_room = Phase.WAITING, on_room
                elif self._lease is not None:
                    self._fill(piece, at)
            elif len(self._fields.head) > _MAX_HEAD or not self._fields.unread:
                self.phase = Phase.DECLINED

    def catch_up(self, received: memoryview) -> None:
        """Takes what came while there was no room; ``received``: the message as far as it came."""
        if self.phase is Phase.PLACED:
            self._fill(received, self._taken)

    def rest(self) -> memoryview:
        """Returns where the next bytes of the raw tensor under way may be written. Empty: they have to be fed."""
        if self._lease is None:
            return memoryview(b"")
        return self._lease.view[self._at : self._at + self._fields.raw_left]

    def advance(self, byte_size: int) -> None:
        """Takes note that so many bytes were written into ``rest``."""
        self._at += byte_size
        self._fields.take_raw(byte_size)

    def _room_size(self) -> int:
        """Returns how large a lease the message needs, with its first tensor about to come."""
        fields = self._fields
        size = fields.unread
        if fields.raw_left < size:
            self._padding = ALIGNMENT * (1 + size // _PADDED_BYTE_SIZE)
            size += self._padding
        return size

    def _place(self, lease: Lease) -> None:
        self.phase = Phase.PLACED
        self._begin_tensor()

    def _begin_tensor(self) -> None:
        pad = min(-self._at % ALIGNMENT, self._padding)
        self._padding -= pad
        self._at += pad
        self._raws.append((self._at, self._fields.raw_left))

    def _fill(self, piece: memoryview, at: int) -> None:
        fields, lease, end = self._fields, self._lease, len(piece)
        assert lease is not None
        while at < end:
            if fields.raw_left:
                size = min(fields.raw_left, end - at)
                lease.view[self._at : self._at + size] = piece[at : at + size]
                self.advance(size)
                at += size
                continue
            try:
                at, begins = fields.take(piece, at)
            except RefusedRequest as refused:
                self._end(refused)
                return
            if begins:
                self._begin_tensor()

    def _progressed(self) -> None:
        on_room, self._on_room = self._on_room, None
        if on_room is not None:
            on_room()

    def _refuse(self, error: ServingError) -> None:
        self._end(RefusedRequest(error, self.client_id))

    def _end(self, refused: RefusedRequest) -> None:
        """The message is no request, or there is no room for it: what comes of it is passed over."""
        self.phase = Phase.REFUSED
        self._error = refused
        self._give_back()

    @property
    def client_id(self) -> str:
        """Returns the id as far as it came, for whoever refuses it."""
        return self._fields.client_id.decode("utf-8", "replace")

    # ----------------------------------------------------------------------------------------------------------- leave

    def fields(self) -> tuple[bytes, bytes, list[bytes | Slice]]:
        """Returns the head, the id and the raw tensors, once everything came; a tiny one as it travels in its record.

        Raises RefusedRequest: it is no request, or there was no room for it.
        """
        if self._error is not None:
            raise self._error
        lease = self._lease
        assert lease is not None
        raws: list[bytes | Slice] = []
        for begin, size in self._raws:
            if size <= self._submitter.inline_byte_size:
                raws.append(bytes(lease.view[begin : begin + size]))
            else:
                raws.append(Slice(lease.place.segment, lease.place.offset + begin, size))
        return bytes(self._fields.head), bytes(self._fields.client_id), raws

    def drop(self) -> None:
        self._on_room = None
        super().drop()

    def __repr__(self) -> str:
        return f"<Reception {self.phase.value} unread={self._fields.unread} raws={len(self._raws)}>"
