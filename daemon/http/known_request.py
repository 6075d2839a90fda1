"""A small inference request that repeats itself: the same JSON with other tensors behind it. Sans-I/O.

chunk    | head | JSON, as last time | part | part | ...       parts of the same sizes, so they lie at the same places
"""

from __future__ import annotations

from struct import Struct

from daemon.http.decoded_request import DecodedRequest
from daemon.http.known_text import MAX_TEXT, KnownText, parts_of, without_bytes
from daemon.http.message_head import InferHead
from shm.messages import FormSubmit, Tensor


class KnownRequest(KnownText):
    """One connection's. Its tensors travel in the record or lie in regions."""

    __slots__ = ("_contents", "request_size", "start")

    def __init__(
        self,
        start: bytes,
        head: InferHead,
        decoded: DecodedRequest,
        tensors: tuple[Tensor, ...],
        sizes: list[int],
    ) -> None:
        super().__init__(head, decoded, tensors)
        #: The chunk's bytes before its first part, and how many it has in all.
        self.start = start
        self.request_size = len(start) + sum(sizes)
        #: Takes the bytes of the tensors out of the chunk.
        self._contents = Struct(f"{len(start)}x" + "".join([f"{size}s" for size in sizes])).unpack

    def record(self, request_id: int, chunk: bytes, received_ns: int) -> FormSubmit:
        """The request that is that chunk."""
        assert self.form is not None
        return FormSubmit(request_id, self.form.number, self._contents(chunk), self.decoded.id, 0, received_ns)


def recognise(
    start: bytes, text_size: int, head: InferHead, decoded: DecodedRequest, inline_byte_size: int
) -> KnownRequest | None:
    """What to remember of a request with that head.

    Args:
      start: its bytes before the first part: the head's, and ``text_size`` bytes of JSON.
    Returns: None: it has tensors that come in the JSON or are too large to travel in the record, or an id of its own.
    """
    sizes = [part.byte_size for part in parts_of(decoded)]
    if text_size > MAX_TEXT or any(size > inline_byte_size for size in sizes):
        return None
    tensors = without_bytes(decoded)
    return None if tensors is None else KnownRequest(start, head, decoded, tensors, sizes)
