"""The base class of every record that one process sends to another, with its encoder and decoders.

Each record is a msgpack array whose first element is its tag. A reader that knows the union of all records of a direction decodes
and type-checks them in one pass; anything else is refused as malformed. Integers that are sizes or offsets are bytes; ``*_ns``
are nanoseconds; deadlines are absolute CLOCK_MONOTONIC, which all processes of one host share.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Record(msgspec.Struct, array_like=True, frozen=True, tag=True, forbid_unknown_fields=True, gc=False):
    """Base class of every record. Its fields are sent by position, without names."""


#: Encoders are cheap and stateless; one is enough for a process.
encoder = msgspec.msgpack.Encoder()


def decoder(union: Any) -> msgspec.msgpack.Decoder[Any]:
    """Makes a decoder for datagrams, which are lists of records of the types in ``union``."""
    return msgspec.msgpack.Decoder(list[union])
