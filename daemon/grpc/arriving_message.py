"""Receives a gRPC message in pieces, and decompresses compressed messages.

    | compressed: 1 byte | length: 4 bytes, big-endian | message: length bytes |

The raw tensors (``raw_input_contents``) of a large ModelInferRequest are written to leased arena memory while they arrive:

    leased memory  | tensor | pad | tensor | pad | ...    pad: aligns the next tensor to 64 bytes

If the arena has no room, the message waits for room or is refused. A message is buffered in ordinary memory if it has no raw
tensor, or if much data precedes its first raw tensor.

There are two ways to write the bytes of a tensor to the leased memory. Either ``ArrivingMessage.feed`` copies the bytes, or the
client's connection reads the bytes from its socket into ``ArrivingMessage.rest`` and then has ``Stream.advance`` count them.

Source: gRPC's PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import numpy as np

from tensord.daemon.front.large_body import Receiver
from tensord.daemon.front.status import INTERNAL, RESOURCE_EXHAUSTED, UNIMPLEMENTED
from tensord.daemon.grpc.request_fields import MessageCutter, RefusedRequest
from tensord.daemon.submit.accounts import Account
from tensord.daemon.submit.submitter import Submitter
from tensord.shm.arena import ALIGNMENT, Lease
from tensord.shm.errors import ServingError
from tensord.shm.messages import Buffer, Slice

#: The five bytes before each message, either way: whether it is compressed, and its length.
PREFIX = struct.Struct(">BI")
read_prefix = PREFIX.unpack_from
PREFIX_SIZE = PREFIX.size
#: The lease has room for one pad for every so many bytes of a message with several tensors; smaller tensors may go without.
_PADDED_BYTE_SIZE = 64 << 10
#: Longer heads hold data.
_MAX_HEAD = 64 << 10
#: Memory for no bytes.
NOWHERE = memoryview(b"")


class ArrivingMessage(Receiver):
    """Receives one gRPC message in pieces, into the arena if it has large tensors, else into a buffer.

    The message holds its arena memory until ``take`` or ``drop`` is called, or until the message is refused.
    Args:
      flag: the first byte of the message. If it is 0, the message is not compressed.
      byte_size: the length of the message.
      submitter: reserves memory in the arena for the tensors of a large request. If it is None, the message is buffered.
      account: counts the arena memory for the connection.
      on_room: called once the message has got the arena memory that it waited for, or has been refused.
      on_placed: called with the message once all of it has arrived in the arena, or has been discarded after a refusal.
    """

    #: The client was told that all of it may come.
    is_granted = False
    #: True if bytes that arrive from now on need no ordinary memory, because they go into the lease or are dropped.
    is_placed = False
    #: Bytes of it that are buffered in ordinary memory, outside the arena.
    kept_byte_size = 0
    #: The arena memory of the current raw tensor's bytes that have not arrived; empty: the next bytes must go through ``feed``.
    rest = NOWHERE
    _content: memoryview | None = None
    #: Bytes of the message before the first raw tensor's.
    _taken = 0
    #: How many bytes of the lease may still be pads.
    _padding = 0
    _error: RefusedRequest | None = None

    def __init__(
        self,
        flag: int,
        byte_size: int,
        submitter: Submitter | None = None,
        account: Account | None = None,
        on_room: Callable[[], None] | None = None,
        on_placed: Callable[[ArrivingMessage], None] | None = None,
    ) -> None:
        self.flag = flag
        self.byte_size = byte_size
        #: How many bytes are still to come.
        self.left = byte_size
        #: Nothing of it will be placed.
        self.is_declined = submitter is None
        if submitter is not None:
            self._submitter, self._account = submitter, account
        self._on_room, self.on_placed = on_room, on_placed
        self.cutter = MessageCutter(byte_size)
        #: Begin and size of each raw tensor in the lease.
        self._raws: list[tuple[int, int]] = []

    # -------------------------------------------------------------------------------------------------------- receive

    def feed(self, piece: memoryview) -> None:
        """Receives ``piece``, the next bytes of the message. ``piece`` must not reach beyond the end of the message."""
        if self.is_placed:
            self._fill(piece, 0)
        else:
            if not (self.is_declined or self.waits_for_room):
                self._read_head(piece)
            if not self.is_placed:
                if self._content is None:
                    self._content = np.empty(self.byte_size, np.uint8).data
                came = self.byte_size - self.left
                self._content[came : came + len(piece)] = piece
        self.left -= len(piece)
        kept = 0 if self._content is None else self.byte_size - self.left
        self.kept_byte_size = kept if self.is_declined else kept + len(self.cutter.head) + len(self.cutter.client_id)

    def _read_head(self, piece: memoryview) -> None:
        """Parses ``piece`` up to its first raw tensor. If there is one, reserves arena memory for the message's raw tensors.

        If the arena has room, also receives the rest of ``piece``. If not, the message waits for room or is refused.
        """
        cutter = self.cutter
        try:
            at, begins = cutter.cut(piece, 0) if self._taken else cutter.begin(piece)
        except RefusedRequest:
            # Nothing is gained from refusing it early, and whoever reads it whole says why.
            self.is_declined = True
            return
        self._taken += at
        if not begins:
            self.is_declined = len(cutter.head) > _MAX_HEAD or not cutter.unread
            return
        size = cutter.raw_size
        if cutter.unread:
            size += cutter.unread
            self._padding = ALIGNMENT * (1 + size // _PADDED_BYTE_SIZE)
            size += self._padding
        try:
            lease = self._submitter.loan(size, self._account, True)
            if lease is None:
                self._wait_for_room(size)
            else:
                self._place(lease)
        except ServingError as error:
            self.refuse(error)
        if self.is_placed:
            self._content = None
            self._fill(piece, at)

    def _place(self, lease: Lease) -> None:
        self._lease = lease
        self.is_placed = True
        self._raws.append((0, self.cutter.raw_size))
        self.rest = lease.view[: self.cutter.raw_size]

    def _fill(self, piece: memoryview, at: int) -> None:
        """Parses ``piece[at:]``, the next bytes of the message, and copies the bytes of raw tensors among them to the arena."""
        lease, end = self._lease, len(piece)
        while at < end and lease is not None:
            if size := min(len(self.rest), end - at):
                self.rest[:size] = piece[at : at + size]
                self.rest = self.rest[size:]
                at += size
                continue
            try:
                at, begins = self.cutter.cut(piece, at)
            except RefusedRequest as refused:
                self._end(refused)
                return
            if begins:
                free = sum(self._raws[-1])
                pad = min(-free % ALIGNMENT, self._padding)
                self._padding -= pad
                begin = free + pad
                self._raws.append((begin, self.cutter.raw_size))
                self.rest = lease.view[begin : begin + self.cutter.raw_size]

    def _progressed(self) -> None:
        content, self._content = self._content, None
        if content is not None:
            self._fill(content[: self.byte_size - self.left], self._taken)
        self.feed(NOWHERE)  # which counts what is still kept
        if self._on_room is not None:
            self._on_room()

    def refuse(self, error: ServingError) -> None:
        """Refuses the message, so that ``take`` will raise ``error``. Bytes that still arrive are discarded."""
        self._end(RefusedRequest(error, self.client_id))

    def _end(self, refused: RefusedRequest) -> None:
        """Stores ``refused`` as the message's error, frees the message's arena memory, and discards bytes that still arrive."""
        self.is_placed = True
        self.rest = NOWHERE
        # What it was raised through refers to this message, and would keep its bytes until garbage is collected.
        refused.error.__traceback__ = refused.__traceback__ = None
        refused.__context__ = refused.__cause__ = None
        self._error = refused
        self._give_back()

    @property
    def client_id(self) -> str:
        """Returns what has arrived of the request's ``id``: "", the beginning of the id, or the whole id."""
        return self.cutter.client_id.decode("utf-8", "replace")

    # ----------------------------------------------------------------------------------------------------------- leave

    def take_content(self) -> Buffer:
        """Returns the bytes of a buffered message, and gives up the buffer.

        Must not be called if the message is in the arena.
        """
        content, self._content, self.kept_byte_size = self._content, None, 0
        return b"" if content is None else content

    def take(self) -> tuple[bytes, bytes, tuple[bytes | Slice, ...], Lease]:
        """Returns (head, id, tensors, lease) of a ModelInferRequest that has arrived completely.

        The head has all encoded fields except the id and the tensors. A small tensor is returned as bytes, and a large tensor
        as a slice of the arena. The lease holds the memory of all slices. The caller then owns the lease.
        Raises RefusedRequest if the message is no valid request, or if the arena had no memory for it.
        """
        if self._error is not None:
            self.drop()
            # One of its own: whatever is raised here refers to this message, which must not refer to it.
            raise RefusedRequest(self._error.error, self._error.client_id)
        lease = self._lease
        assert lease is not None
        segment, offset, left = lease.place.segment, lease.place.offset, self._submitter.inline_byte_size
        raws: list[bytes | Slice] = []
        for begin, size in self._raws:
            if size <= left:
                left -= size
                raws.append(bytes(lease.view[begin : begin + size]))
            else:
                raws.append(Slice(segment, offset + begin, size))
        self._submitter.arrived(lease)
        self._lease, self.rest = None, NOWHERE
        return bytes(self.cutter.head), bytes(self.cutter.client_id), tuple(raws), lease

    def drop(self) -> None:
        self._content = self._on_room = self.on_placed = None
        self.rest, self.kept_byte_size = NOWHERE, 0
        super().drop()

    def __repr__(self) -> str:
        return f"<ArrivingMessage of {self.byte_size} bytes, {self.left} to come, {len(self._raws)} raw tensors>"


class CallRefused(Exception):
    """Raised when a client's call must end with an error: the gRPC status code ``code`` with the text ``message``."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def inflated(content: Buffer, encoding: str, limit: int) -> bytes:
    """Decompresses ``content``, a message.

    ``encoding``: "gzip" or "deflate". ``limit``: the most bytes of the decompressed message.
    Raises CallRefused if the encoding is unknown, the compressed bytes are invalid, or the message exceeds the limit.
    """
    if encoding not in ("gzip", "deflate"):
        raise CallRefused(
            UNIMPLEMENTED, f"message encoding '{encoding[:32]}' is not supported; identity, deflate and gzip are"
        )
    inflate = zlib.decompressobj(31 if encoding == "gzip" else 15)
    try:
        whole = inflate.decompress(content, limit + 1)
    except zlib.error:
        whole = b""
    if len(whole) > limit:
        raise CallRefused(
            RESOURCE_EXHAUSTED, f"Received message larger than max ({len(whole)} vs. {limit}) after decompression"
        )
    if not inflate.eof or inflate.unused_data:
        raise CallRefused(INTERNAL, f"a message is not valid {encoding} data")
    return whole
