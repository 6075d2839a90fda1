"""What every record that crosses a process border is, and how records are read.

Each is a msgpack array whose first element is its tag, so a reader that knows the union of a direction decodes and type-checks in
one pass; anything else is refused as malformed. Integers that are sizes or offsets are bytes; ``*_ns`` are nanoseconds; deadlines
are absolute CLOCK_MONOTONIC, which all processes of one host share.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Record(msgspec.Struct, array_like=True, frozen=True, tag=True, forbid_unknown_fields=True, gc=False):
    """Base of everything that travels. Positional on the wire: both ends come from one source tree."""


#: Encoders are cheap and stateless; one is enough for a process.
encoder = msgspec.msgpack.Encoder()


def decoder(union: Any) -> msgspec.msgpack.Decoder[Any]:
    """A typed decoder for a datagram: a list of the records of one direction."""
    return msgspec.msgpack.Decoder(list[union])
