"""Splits an encoded ModelInferRequest into its id, its scheduling parameters, its raw tensors and its other fields. Sans-I/O.

Many requests differ only in the id, the raw tensors and the scheduling parameters, such as the priority.
``walk`` returns None for a message that it cannot split, and for every message if the C extension ``_walk`` was not compiled.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensord.shm.common.scheduling import PARAMETERS
from tensord.shm.extensions import check
from tensord.shm.messages import Buffer, Slice

#: Rest, id, scheduling parameters, raw tensors, and the bytes of arena memory that those need which are too long for a record.
Walked = tuple[bytes, bytes, bytes, "tuple[Buffer | Slice, ...]", int]
#: The fields before the first raw tensor without the id, the id, where the tensor's bytes begin, and its size.
Begun = tuple[bytes, bytes, int, int]
_TAGS = frozenset((0x0A, 0x12, 0x1A, 0x22, 0x2A, 0x32, 0x3A))
#: A field is shorter than a message, which is below 2^32.
_MAX_SHIFT = 28

# ``walk(content, start, end, inline)`` cuts the complete message ``content[start:end]``. Raw tensors of together up to
# ``inline`` bytes are bytes, others views of ``content``. None: a field is unknown or cut short, or they are very many or long.
# ``walk_beginning(content, start, end)`` reads the beginning of a message; offsets count from ``start``. None: no raw tensor
# begins there, or a field before it is unknown, cut short or too long.
try:
    from tensord.daemon.grpc import _walk

    check(_walk)
except ImportError:  # not built, or not from these sources

    def walk(content: Buffer, start: int, end: int, inline: int) -> Walked | None:
        return None

    def walk_beginning(content: Buffer, start: int, end: int) -> Begun | None:
        return None

else:
    walk, walk_beginning = _walk.walk, _walk.walk_beginning  # type: ignore[assignment]
    # Entries of parameters that schedule begin so, as clients write them.
    _walk.know(tuple(b"\x0a" + bytes((len(key),)) + key.encode() for key in PARAMETERS))


def fields(content: Buffer | bytearray, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Iterates over the leading fields of the encoded Protobuf message ``content[:end]``.

    Yields the field's tag byte, the offset of this byte, the offset of the field's content, and the content's size in bytes.
    Stops without an error at the first field that is incomplete, whose number is above 7, or whose wire type is not LEN.
    """
    at = 0
    while at < end and content[at] in _TAGS:
        start, at, size, shift = at, at + 1, 0, 0
        while True:
            if at == end or shift > _MAX_SHIFT:
                return
            byte = content[at]
            at += 1
            size |= (byte & 127) << shift
            if byte < 128:
                break
            shift += 7
        if size > end - at:
            return
        yield content[start], start, at, size
        at += size
