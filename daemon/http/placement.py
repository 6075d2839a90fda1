"""Where the tensors of a request lie when a worker reads them: in its body's lease, in a lease of their own, in the record.

lease    | tensor | pad | tensor | pad | ...      pad = up to the next 64 bytes, what an executable needs to use it in place;
                                                   arrays that are still JSON have their room there, and are filled in later
"""

from __future__ import annotations

from collections.abc import Generator

from daemon.http.body import ALIGNMENT, Body, CollectedBody, PlacedBody
from daemon.http.decoded_request import DecodedRequest, Part
from daemon.http.json_array import JsonArray
from daemon.http.json_base64 import JsonBase64
from daemon.http.json_strings import JsonStrings
from shm.arena import Lease
from shm.messages import Inline, Place, RegionSlice, Slice, Tensor


def room(decoded: DecodedRequest, body: Body, inline_byte_size: int) -> int:
    """Bytes of the lease that the request needs besides its body's: for tensors that came as JSON, or in a collected body, and
    are too large to travel in the record."""
    size, collected = 0, type(body) is CollectedBody
    for _, _, _, source in decoded.inputs:
        if isinstance(source, Part):
            if collected and source.byte_size > inline_byte_size:
                size += _aligned(source.byte_size)
        elif isinstance(source, bytes):
            if len(source) > inline_byte_size:
                size += _aligned(len(source))
        elif not isinstance(source, RegionSlice):
            size += _aligned(source.byte_size)
    return size


def place(
    decoded: DecodedRequest,
    body: Body,
    json_size: int,
    lease: Lease | None,
    inline_byte_size: int,
) -> tuple[Tensor, ...]:
    """The inputs with their places; writes into ``lease``, which has the ``room`` they need, or is None where that is 0."""
    whole = body.whole() if type(body) is CollectedBody else b""
    used = 0
    tensors: list[Tensor] = []
    for name, datatype, shape, source in decoded.inputs:
        where: Place
        if isinstance(source, RegionSlice):
            where = source
        elif isinstance(source, Part) and isinstance(body, PlacedBody):
            where = body.place(json_size, source, inline_byte_size)
        elif isinstance(source, Part | bytes):
            start, size = (
                (0, len(source)) if isinstance(source, bytes) else (json_size + source.offset, source.byte_size)
            )
            content = source if isinstance(source, bytes) else whole
            if size <= inline_byte_size:
                where = Inline(content[start : start + size])
            else:
                assert lease is not None
                lease.view[used : used + size] = memoryview(content)[start : start + size]
                where = Slice(lease.place.segment, lease.place.offset + used, size)
                used += _aligned(size)
        else:
            assert lease is not None
            where = Slice(lease.place.segment, lease.place.offset + used, source.byte_size)
            used += _aligned(source.byte_size)
        tensors.append(Tensor(name, datatype, shape, where))
    return tuple(tensors)


def is_filled(decoded: DecodedRequest) -> bool:
    """Whether the tensors are there once they are placed."""
    return not any(isinstance(source, JsonArray | JsonStrings | JsonBase64) for _, _, _, source in decoded.inputs)


def fill(
    decoded: DecodedRequest, tensors: tuple[Tensor, ...], lease: Lease
) -> Generator[None, None, tuple[Tensor, ...]]:
    """Converts what is still JSON into its place, a piece a step; returns the tensors as they came out.

    Raises InvalidArgument: they cannot be converted.
    """
    filled: list[Tensor] = []
    for tensor, (name, datatype, shape, source) in zip(tensors, decoded.inputs, strict=True):
        at = tensor.place
        if isinstance(source, JsonArray | JsonStrings | JsonBase64) and isinstance(at, Slice):
            start = at.offset - lease.place.offset
            size = yield from source.fill(lease.view[start : start + at.byte_size])
            tensor = Tensor(name, datatype, shape, Slice(at.segment, at.offset, size))
        filled.append(tensor)
    return tuple(filled)


def _aligned(byte_size: int) -> int:
    return -(-byte_size // ALIGNMENT) * ALIGNMENT
