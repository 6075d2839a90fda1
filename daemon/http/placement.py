"""Where the tensors of a request lie when a worker reads them: in its body's lease, in a lease of their own, in the record.

lease    | tensor | pad | tensor | pad | ...      pad = up to the next 64 bytes, what an executable needs to use it in place
"""

from __future__ import annotations

from daemon.http.body import ALIGNMENT, CollectedBody, PlacedBody
from daemon.http.decoded_request import DecodedRequest, Part
from shm.arena import Lease
from shm.messages import Inline, Place, RegionSlice, Slice, Tensor


def room(decoded: DecodedRequest, body: CollectedBody | PlacedBody, inline_byte_size: int) -> int:
    """Bytes of the lease that the request needs besides its body's: for tensors that came as JSON, or in a collected body, and
    are too large to travel in the record."""
    size = 0
    for _, _, _, source in decoded.inputs:
        content_size = len(source) if type(source) is bytes else source.byte_size if type(source) is Part else 0
        if content_size > inline_byte_size and (type(source) is bytes or isinstance(body, CollectedBody)):
            size += -(-content_size // ALIGNMENT) * ALIGNMENT
    return size


def place(
    decoded: DecodedRequest,
    body: CollectedBody | PlacedBody,
    json_size: int,
    lease: Lease | None,
    inline_byte_size: int,
) -> tuple[Tensor, ...]:
    """The inputs with their places; writes into ``lease``, which has the ``room`` they need, or is None where that is 0."""
    tail = memoryview(body.whole())[json_size:] if isinstance(body, CollectedBody) else memoryview(b"")
    used = 0
    tensors: list[Tensor] = []
    for name, datatype, shape, source in decoded.inputs:
        at: Place
        if isinstance(source, RegionSlice):
            at = source
        elif isinstance(source, Part) and isinstance(body, PlacedBody):
            at = body.place(json_size, source, inline_byte_size)
        else:
            content = source if isinstance(source, bytes) else tail[source.offset : source.offset + source.byte_size]
            if len(content) <= inline_byte_size:
                at = Inline(bytes(content))
            else:
                assert lease is not None
                lease.view[used : used + len(content)] = content
                at = Slice(lease.place.segment, lease.place.offset + used, len(content))
                used += -(-len(content) // ALIGNMENT) * ALIGNMENT
        tensors.append(Tensor(name, datatype, shape, at))
    return tuple(tensors)
