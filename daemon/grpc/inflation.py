"""A compressed message: what it was before. Sans-I/O. Source: gRPC's PROTOCOL-HTTP2.md, "Compression"."""

from __future__ import annotations

import zlib

from tensord.daemon.grpc.codes import INTERNAL, RESOURCE_EXHAUSTED, UNIMPLEMENTED
from tensord.shm.messages import Buffer


class Refused(Exception):
    """A message that is not taken: the status that ends its call."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def inflated(content: Buffer, encoding: str, limit: int) -> bytes:
    """The message behind gzip or deflate, of at most ``limit`` bytes. Raises Refused."""
    if encoding not in ("gzip", "deflate"):
        raise Refused(
            UNIMPLEMENTED, f"message encoding '{encoding[:32]}' is not supported; identity, deflate and gzip are"
        )
    inflate = zlib.decompressobj(31 if encoding == "gzip" else 15)
    try:
        whole = inflate.decompress(content, limit + 1)
    except zlib.error:
        whole = b""
    if len(whole) > limit:
        raise Refused(
            RESOURCE_EXHAUSTED, f"Received message larger than max ({len(whole)} vs. {limit}) after decompression"
        )
    if not inflate.eof or inflate.unused_data:
        raise Refused(INTERNAL, f"a message is not valid {encoding} data")
    return whole
