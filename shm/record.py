"""The base of every record that crosses a process border, with its encoder and decoders.

Each is a msgpack array whose first element is its tag, so a reader that knows the union of a direction decodes and type-checks in
one pass; anything else is refused as malformed. Integers that are sizes or offsets are bytes; ``*_ns`` are nanoseconds; deadlines
are absolute CLOCK_MONOTONIC, which all processes of one host share.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Record(msgspec.Struct, array_like=True, frozen=True, tag=True, forbid_unknown_fields=True, gc=False):
    """Base class of every record. Positional on the wire: both ends come from one source tree."""


#: Encoders are cheap and stateless; one is enough for a process.
encoder = msgspec.msgpack.Encoder()


def decoder(union: Any) -> msgspec.msgpack.Decoder[Any]:
    """Makes a typed decoder for datagrams, each a list of the records of one direction."""
    return msgspec.msgpack.Decoder(list[union])
