"""The base class of all records that processes send to each other, with their encoder and decoders.

A record is a msgpack array, and its first element is the record's tag. A decoder accepts a fixed set of record types, checks
the types of all fields, and raises an error for anything else. Sizes and offsets in records are in bytes. Fields ``*_ns`` are
in ns. Deadlines are times of CLOCK_MONOTONIC, which all processes of a host share.
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
