"""Messages of one size that differ in their id and in their raw tensors' bytes alone. Sans-I/O.

    | fixed | id | fixed | tensor | fixed | tensor | fixed |       any of them may be empty

Cutting one up and comparing what is fixed are two calls, however many fields it has.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from daemon.grpc.known_answer import KnownAnswer
from daemon.grpc.request_codec import DecodedHead
from daemon.grpc.request_fields import Buffer
from shm.forms import Form
from shm.messages import Submit

Place = tuple[int, int]


class Layout:
    """Owned by ``Recognised``."""

    __slots__ = ("awaits_form", "cut", "decoded", "decoupled", "edition", "fixed", "form", "streamed", "unary")

    def __init__(self, message: bytes, places: Sequence[Place], decoded: DecodedHead) -> None:
        """``places``: where the id is, and behind it the raw tensors: (begin, end) each."""
        sizes, at = [], 0
        for begin, end in places:
            sizes += [begin - at, end - begin]
            at = end
        sizes.append(len(message) - at)
        #: Of a message that begins there: fixed, id, fixed, tensor, fixed, tensor, ..., fixed.
        self.cut = struct.Struct("".join([f"{size}s" for size in sizes])).unpack_from
        self.fixed: tuple[bytes, ...] = self.cut(message)[::2]
        self.decoded = decoded
        #: What requests of this layout have in common; asked for when the second one comes. None: they have large tensors.
        self.form: Form[Submit] | None = None
        self.awaits_form = True
        #: Whether its model is decoupled, in that edition of the table.
        self.decoupled = False
        self.edition = -1
        #: How the last good answer of a form was written, for a stream and for a unary call.
        self.streamed: KnownAnswer | None = None
        self.unary: KnownAnswer | None = None

    def own(self, message: Buffer) -> tuple[bytes, ...] | None:
        """Of a message of this size, the id and the raw tensors; None: it is of another layout."""
        pieces: tuple[bytes, ...] = self.cut(message)
        return pieces[1::2] if pieces[::2] == self.fixed else None
