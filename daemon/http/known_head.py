"""The head a connection repeats. A client that asks again and again sends the same request line and headers, byte for byte.

    chunk   | head, as last time | body of the length it announces |     one whole request, nothing before or behind it

The same bytes mean the same, so such a chunk needs no parsing: what they meant last time holds. Anything else, even by one byte,
goes the ordinary way.
"""

from __future__ import annotations

from dataclasses import dataclass

from daemon.http.decoded_request import DecodedRequest
from daemon.http.known_request import KnownRequest, recognise
from daemon.http.message_head import InferHead
from daemon.http.reception import COLLECT_BYTE_SIZE

#: Longer heads are not worth remembering with every connection.
_MAX_HEAD = 2048
_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class KnownHead:
    """The bytes of a head, what they mean, and how long the whole request is."""

    head: bytes
    meaning: InferHead
    request_size: int
    #: What followed it; mostly the same JSON comes again.
    request: KnownRequest | None

    def is_head_of(self, chunk: bytes) -> bool:
        """Whether the chunk is exactly one more request with this head."""
        return len(chunk) == self.request_size and chunk.startswith(self.head)

    @property
    def is_plain(self) -> bool:
        """Whether what its requests say is all in their JSON, and their answers are written as they are.

        Raw requests have no JSON: what they mean is the model's affair, and changes with it.
        """
        meaning = self.meaning
        return not (meaning.coding or meaning.accepts or meaning.keep_alive_line) and meaning.json_size != 0

    def begins(self, chunk: bytes) -> bool:
        """Whether the chunk is this head and less than all of a small body: many clients send them one after the other."""
        return self.request is not None and len(chunk) < self.request_size and chunk.startswith(self.head)


def learn(chunk: bytes, meaning: InferHead, decoded: DecodedRequest | None, inline_byte_size: int) -> KnownHead | None:
    """From a chunk that was exactly one request, parsed as ``meaning``; None: not to be remembered.

    ``decoded``: what its JSON said, where it came so far.
    """
    length = meaning.content_length
    if length is None:
        return None
    known = learn_head(chunk[: len(chunk) - length], meaning)
    if known is None or decoded is None or length > COLLECT_BYTE_SIZE or not known.is_plain:
        return known
    start_size = len(known.head) + (length if meaning.json_size is None else meaning.json_size)
    request = recognise(chunk[:start_size], start_size - len(known.head), meaning, decoded, inline_byte_size)
    return KnownHead(known.head, meaning, len(chunk), request)


def learn_head(head: bytes, meaning: InferHead) -> KnownHead | None:
    """From the bytes before a body; None: not to be remembered."""
    length = meaning.content_length
    if length is None or meaning.error is not None or not meaning.keep_alive:
        return None
    if len(head) > _MAX_HEAD or head.find(_END) != len(head) - len(_END):
        return None
    return KnownHead(head, meaning, len(head) + length, None)
