"""One large ModelInferRequest of a layout that is known: it looks like the last one, so nothing is read while it arrives.

    head as expected ─▶ lease ─▶ | tensor | start as expected | tensor | ... ─▶ contents, take_lease        any time: drop
                                             ╰ another one ─▶ a Reception goes on from there

It does what ``ArrivingMessage`` and ``Reception`` do for one that is not known yet, in as few steps as there can be: the tensors
have driven everything else out of the processor's caches, and each step is slow there.
"""

from __future__ import annotations

from daemon.grpc.layout import LargeLayout
from daemon.grpc.reception import Reception
from daemon.submit import Submitter
from shm.arena import Lease
from shm.messages import Content, Slice


class PlacedMessage:
    """Owns the lease until ``take_lease`` or ``drop``.

    Args:
      client_id: as it came, and as text.
      lease: as large as its layout says.
    """

    __slots__ = (
        "_lease",
        "_number",
        "_reception",
        "_rest",
        "_submitter",
        "client_id",
        "is_granted",
        "layout",
        "left",
        "text",
    )

    #: As in ``ArrivingMessage``.
    is_placed, waits = True, False

    def __init__(self, submitter: Submitter, layout: LargeLayout, client_id: bytes, text: str, lease: Lease) -> None:
        self._submitter = submitter
        self.layout = layout
        self.client_id = client_id
        self.text = text
        self._lease: Lease | None = lease
        #: Which tensor is under way, and where the rest of it goes.
        self._number = 0
        self._rest = lease.view if layout.is_one else lease.view[: layout.places[0][1]]
        #: Bytes still to come.
        self.left = layout.byte_size - layout.head_size
        #: Whether the client was told that all of it may come.
        self.is_granted = False
        #: Who goes on with what is not as expected.
        self._reception: Reception | None = None

    @property
    def kept_byte_size(self) -> int:
        """What it has in ordinary memory."""
        return len(self.client_id) if self._reception is None else self._reception.kept_byte_size

    @property
    def received(self) -> Reception | PlacedMessage:
        """What the call gets, once everything came."""
        return self._reception or self

    # -------------------------------------------------------------------------------------------------------- receive

    def feed(self, piece: memoryview) -> None:
        """The next piece behind the head, nothing beyond the message."""
        size, rest = len(piece), self._rest
        self.left -= size
        if size <= len(rest):
            rest[:size] = piece
            self._rest = rest[size:]
        elif self._reception is None:
            self._cross(piece)
        else:
            self._go_on(self._reception, piece)

    def rest(self) -> memoryview:
        """Of the tensor under way: where the message's next bytes may be written. Empty: they have to be fed."""
        return self._rest if self._reception is None else self._reception.rest()

    def advance(self, byte_size: int) -> None:
        """That many bytes were written into ``rest``."""
        self.left -= byte_size
        if self._reception is None:
            self._rest = self._rest[byte_size:]
        else:
            self._reception.advance(byte_size)

    def _cross(self, piece: memoryview) -> None:
        """Takes a piece with the end of a tensor in it."""
        lease, layout = self._lease, self.layout
        assert lease is not None
        at, end = 0, len(piece)
        while True:
            size = min(len(self._rest), end - at)
            self._rest[:size] = piece[at : at + size]
            self._rest = self._rest[size:]
            at += size
            if at == end:
                return
            start = layout.starts[self._number]
            if piece[at : at + len(start)] != start:
                self._reception = self._resumed()
                self._go_on(self._reception, piece[at:])
                return
            at += len(start)
            self._number += 1
            begin, size = layout.places[self._number]
            self._rest = lease.view[begin : begin + size]

    def _resumed(self) -> Reception:
        """One that has taken what came so far. (What is cut within a start comes here too: it happens rarely.)"""
        layout, lease = self.layout, self.take_lease()
        head, tail = layout.fixed
        starts = [head + self.client_id + tail, *layout.starts[: self._number]]
        return Reception.resumed(self._submitter, layout.byte_size, lease, starts)

    def _go_on(self, reception: Reception, piece: memoryview) -> None:
        # It has its room already.
        reception.feed(piece, _never)

    # ----------------------------------------------------------------------------------------------------------- leave

    def contents(self) -> tuple[Content, ...]:
        """The tensors, once everything came; a tiny one as it travels in its record."""
        lease, inline = self._lease, self._submitter.inline_byte_size
        assert lease is not None
        place = lease.place
        if self.layout.is_one and place.byte_size > inline:
            return (place,)
        return tuple(
            [
                Slice(place.segment, place.offset + begin, size)
                if size > inline
                else bytes(lease.view[begin : begin + size])
                for begin, size in self.layout.places
            ]
        )

    def take_lease(self) -> Lease:
        """Where the tensors lie; from now on its taker gives that back."""
        lease, self._lease = self._lease, None
        assert lease is not None
        return lease

    def drop(self) -> None:
        """Nobody wants it any more: whatever it takes is given back. Idempotent."""
        if self._reception is not None:
            self._reception.drop()
        elif self._lease is not None:
            self._submitter.give_back(self.take_lease())

    def __repr__(self) -> str:
        return f"<PlacedMessage left={self.left}{' as expected' if self._reception is None else ''}>"


def _never() -> None:
    raise AssertionError("nothing waits for room that has it")
