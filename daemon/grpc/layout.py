"""Messages of one size that differ in their id and in their raw tensors' bytes alone. Sans-I/O.

    small    | fixed | id | fixed | tensor | fixed | tensor | fixed |       any of them may be empty
    large    | fixed | id | fixed | tensor | start | tensor | start | tensor |

Cutting one up, or a large one's bytes before its first tensor, and comparing what is fixed are two calls, however many fields
it has. A start is a raw tensor's tag and its length.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from daemon.grpc.request_codec import DecodedHead
from daemon.grpc.request_fields import Buffer, raw_start, split
from shm.arena import Lease
from shm.forms import Form
from shm.messages import Submit

if TYPE_CHECKING:
    from daemon.grpc.known_answer import KnownAnswer

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
        #: What requests of this layout have in common; asked for when the second one comes. None: each is placed when it is sent.
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


class LargeLayout(Layout):
    """Of messages that were placed while they arrived."""

    __slots__ = ("byte_size", "head_size", "is_one", "lease_byte_size", "places", "starts")

    def __init__(
        self,
        head: bytes,
        id_at: Place,
        places: Sequence[Place],
        byte_size: int,
        lease_byte_size: int,
        decoded: DecodedHead,
    ) -> None:
        """
        Args:
          head: all that comes before the first tensor.
          places: begin and size of each tensor in the lease.
          byte_size: the whole message's.
        """
        super().__init__(head, (id_at,), decoded)
        self.head_size = len(head)
        self.byte_size = byte_size
        self.lease_byte_size = lease_byte_size
        self.places = places
        #: What comes before each tensor but the first.
        self.starts = [raw_start(size) for _, size in places[1:]]
        #: Its only tensor is all that the lease holds.
        self.is_one = list(places) == [(0, lease_byte_size)]


def large_layout(
    head: bytes, places: Sequence[Place], byte_size: int, lease: Lease, decoded: DecodedHead
) -> LargeLayout | None:
    """The layout of one that has come; arguments as there. None: not all that may differ stands where it does in others."""
    starts = [raw_start(size) for _, size in places]
    tensors = sum([size for _, size in places])
    # As long as this, nothing but starts can be between the tensors or behind them, and each as short as it can be.
    if not head.endswith(starts[0]) or len(head) + tensors + sum(map(len, starts[1:])) != byte_size:
        return None
    _, _, id_at, _ = split(head[: -len(starts[0])])
    return LargeLayout(head, id_at, places, byte_size, lease.place.byte_size, decoded)
