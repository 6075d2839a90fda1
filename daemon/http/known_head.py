"""The head a connection repeats. A client that asks again and again sends the same request line and headers, byte for byte.

    chunk   | head, as last time | body of the length it announces |     one whole request, nothing before or behind it

The same bytes mean the same, so such a chunk needs no parsing: what they meant last time holds. Anything else, even by one byte,
goes the ordinary way.
"""

from __future__ import annotations

from dataclasses import dataclass

from daemon.http.message_head import InferHead

#: Longer heads are not worth remembering with every connection.
_MAX_HEAD = 2048
_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class KnownHead:
    """The bytes of a head, what they mean, and how long the whole request is."""

    head: bytes
    meaning: InferHead
    request_size: int

    def is_head_of(self, chunk: bytes) -> bool:
        """Whether the chunk is exactly one more request with this head."""
        return len(chunk) == self.request_size and chunk.startswith(self.head)


def learn(chunk: bytes, meaning: InferHead) -> KnownHead | None:
    """From a chunk that was exactly one request, parsed as ``meaning``; None: not to be remembered."""
    if meaning.content_length is None or meaning.error is not None or not meaning.keep_alive:
        return None
    head = chunk[: len(chunk) - meaning.content_length]
    if len(head) > _MAX_HEAD or head.find(_END) != len(head) - len(_END):
        return None
    return KnownHead(head, meaning, len(chunk))
