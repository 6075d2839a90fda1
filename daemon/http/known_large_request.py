"""A large inference request that repeats itself: the same head and JSON with other tensors behind them. Sans-I/O.

    chunk    | head, as last time | perhaps the beginning of the body |
    lease    | pad | JSON, as last time | part | part | ...            the rest is read there (body_reader)

Its head makes it probable, and its body gets its place at once; whether it is the known one is seen when that is whole. Where the
JSON is another one the body lies like any other, and goes the ordinary way from there on.
"""

from __future__ import annotations

from daemon.http.body import PlacedBody
from daemon.http.decoded_request import DecodedRequest
from daemon.http.known_head import KnownHead
from daemon.http.known_text import MAX_TEXT, KnownText, parts_of, without_bytes
from shm.arena import Lease
from shm.messages import Content, FormSubmit, Slice, Tensor


class KnownLargeRequest(KnownText):
    """One connection's. Its tensors lie in its body's lease or in regions; tiny ones travel in the record."""

    __slots__ = ("_begin", "_body_size", "_end", "_places", "_text", "lease_size", "request_size", "start")

    def __init__(
        self, known: KnownHead, text: bytes, decoded: DecodedRequest, tensors: tuple[Tensor, ...], inline_byte_size: int
    ) -> None:
        super().__init__(known.meaning, decoded, tensors)
        #: The chunk's bytes before the body, and those of the whole request.
        self.start = known.head
        self.request_size = known.request_size
        self._body_size = known.request_size - len(known.head)
        self.lease_size = PlacedBody.lease_size(self._body_size)
        self._text = text
        self._begin = PlacedBody.start(len(text))
        self._end = self._begin + len(text)
        #: Where in the lease each part begins, how long it is, and whether it travels in the record.
        self._places = [
            (self._end + part.offset, part.byte_size, part.byte_size <= inline_byte_size) for part in parts_of(decoded)
        ]

    def body(self, lease: Lease) -> PlacedBody:
        """One of which nothing has come."""
        return PlacedBody(lease, self._body_size, len(self._text))

    def record(self, request_id: int, lease: Lease, received_ns: int) -> FormSubmit | None:
        """The request whose body lies in that lease, whole; None: its JSON is another one."""
        view, place = lease.view, lease.place
        # Two pieces of bytes are compared at once, a view byte by byte.
        if bytes(view[self._begin : self._end]) != self._text:
            return None
        contents: list[Content] = [
            bytes(view[at : at + size]) if inline else Slice(place.segment, place.offset + at, size)
            for at, size, inline in self._places
        ]
        assert self.form is not None
        return FormSubmit(request_id, self.form.number, tuple(contents), self.decoded.id, 0, received_ns)


def recognise_large(
    known: KnownHead, body: PlacedBody, decoded: DecodedRequest, inline_byte_size: int
) -> KnownLargeRequest | None:
    """What to remember of a request with that head and that body, which said that.

    Returns: None: it has tensors that come in the JSON, or an id of its own.
    """
    text_size = known.meaning.json_size
    if not known.is_plain or text_size is None or text_size > MAX_TEXT:
        return None
    tensors = without_bytes(decoded)
    if tensors is None:
        return None
    return KnownLargeRequest(known, bytes(body.head(text_size)), decoded, tensors, inline_byte_size)
