"""Decides where a worker finds the tensors of a request: in the lease of the body, in another lease, or within the record.

lease    | tensor | pad | tensor | pad | ...      pad = up to the next 64 bytes, what an executable needs to use it in place;
                                                   arrays that are still JSON have their room there, and are filled in later
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from tensord.daemon.http.body import Body, CollectedBody, PlacedBody
from tensord.daemon.http.decoded_request import BinaryPart, Source
from tensord.daemon.http.json_array import JsonArray
from tensord.daemon.http.json_base64 import JsonBase64
from tensord.daemon.http.json_strings import JsonStrings
from tensord.shm.arena import ALIGNMENT, Lease
from tensord.shm.messages import Content, RegionSlice, Slice


def room(sources: Sequence[Source], body: Body, inline_byte_size: int) -> int:
    """Returns how many bytes a request needs in the arena besides the lease of its body: 0 if it needs none.

    They are for tensors that came as JSON or in a body in ordinary memory, and are too large for the request's record, which is
    sent to the worker.

    Args:
      sources: where the data of each input is: in the body, in a region, or in the JSON.
      inline_byte_size: the most bytes of a tensor that is sent within the record.
    """
    size, collected = 0, type(body) is CollectedBody
    for source in sources:
        if type(source) is BinaryPart:
            if collected and source.byte_size > inline_byte_size:
                size += _aligned(source.byte_size)
        elif type(source) is bytes:
            if len(source) > inline_byte_size:
                size += _aligned(len(source))
        elif type(source) is not RegionSlice:
            size += _aligned(source.byte_size)  # type: ignore[union-attr]
    return size


def place(
    sources: Sequence[Source], body: Body, json_size: int, lease: Lease | None, inline_byte_size: int
) -> list[Content]:
    """Returns the tensors for the request's record: small ones as bytes, others as slices of the arena; no regions.

    Tensors that came in ordinary memory are copied into ``lease``; those that are still JSON only get their place there.

    Args:
      sources: where the data of each input is: in the body, in a region, or in the JSON.
      json_size: the bytes of JSON in the body before its binary parts.
      lease: has as many bytes as ``room`` returned; None if that was 0.
      inline_byte_size: the most bytes of a tensor that is sent within the record.
    """
    whole = body.whole() if type(body) is CollectedBody else b""
    used = 0
    contents: list[Content] = []
    for source in sources:
        if type(source) is RegionSlice:
            continue
        if type(source) is BinaryPart and type(body) is PlacedBody:
            contents.append(body.place(json_size, source, inline_byte_size))
        elif isinstance(source, BinaryPart | bytes):
            start, size = (
                (0, len(source)) if isinstance(source, bytes) else (json_size + source.offset, source.byte_size)
            )
            content = source if isinstance(source, bytes) else whole
            if size <= inline_byte_size:
                contents.append(bytes(content[start : start + size]))
            else:
                assert lease is not None
                lease.view[used : used + size] = memoryview(content)[start : start + size]
                contents.append(Slice(lease.place.segment, lease.place.offset + used, size))
                used += _aligned(size)
        else:
            assert lease is not None
            assert not isinstance(source, RegionSlice)
            contents.append(Slice(lease.place.segment, lease.place.offset + used, source.byte_size))
            used += _aligned(source.byte_size)
    return contents


def is_filled(sources: Sequence[Source]) -> bool:
    """Returns whether all tensors have their bytes once ``place`` has returned.

    False: ``fill`` must still convert large JSON data into its place.
    """
    return not any(isinstance(source, JsonArray | JsonStrings | JsonBase64) for source in sources)


def fill(sources: Sequence[Source], contents: list[Content], lease: Lease) -> Generator[None, None, list[Content]]:
    """Converts large JSON data into the places that ``place`` gave it, and yields after each piece.

    Returns: ``contents`` with the final sizes of these tensors.

    Raises InvalidArgument: the data is wrong or does not fit the shape.
    """
    filled: list[Content] = []
    own = [source for source in sources if not isinstance(source, RegionSlice)]
    for content, source in zip(contents, own, strict=True):
        if isinstance(source, JsonArray | JsonStrings | JsonBase64) and isinstance(content, Slice):
            start = content.offset - lease.place.offset
            size = yield from source.fill(lease.view[start : start + content.byte_size])
            content = Slice(content.segment, content.offset, size)
        filled.append(content)
    return filled


def _aligned(byte_size: int) -> int:
    return -(-byte_size // ALIGNMENT) * ALIGNMENT
