"""Walks once over an encoded ModelInferRequest: separates what differs from request to request from the rest. Sans-I/O.

    | model_name | id | parameters: priority | inputs | outputs | ... | raw_input_contents | raw_input_contents |
          rest    own            own            rest     rest                 own                  own

Messages of one kind differ only in their id, their scheduling parameters and their tensors' bytes. The walk accepts what clients
usually write: fields with a tag of one byte. Any other message, malformed or merely unusual, is decoded in full
(``PreparedMessages.read``). The walk is done in C (``daemon/grpc/_walk.c``) where that could be built, because in Python it is
the dearest step of a small request; both give the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tensord.shm.arena import ALIGNMENT
from tensord.shm.common.scheduling import PARAMETERS
from tensord.shm.extensions import check
from tensord.shm.messages import Buffer, Slice

#: Rest, id, parameters that schedule, raw tensors, and the room that those need which do not travel in a record.
Walked = tuple[bytes, bytes, bytes, "tuple[Buffer | Slice, ...]", int]
#: Rest and id before the first raw tensor, where that begins, and its size.
Begun = tuple[bytes, bytes, int, int]
#: Longer rests hold data, or are rare; more raw tensors than that have few models.
MAX_REST = 2048
MAX_SCHEDULING = 512
MAX_RAWS = 256
_ID, _PARAMETER, _RAW = 0x1A, 0x22, 0x3A
_TAGS = frozenset((0x0A, 0x12, _ID, _PARAMETER, 0x2A, 0x32, _RAW))
#: How their entries begin, as clients write them.
_SCHEDULING = tuple(b"\x0a" + bytes((len(key),)) + key.encode() for key in PARAMETERS)
#: A field is shorter than a message, which is below 2^32.
_MAX_SHIFT = 28


def walk_in_python(content: Buffer, start: int, end: int, inline: int) -> Walked | None:
    """Cuts the complete message ``content[start:end]`` into rest, id, scheduling parameters and raw tensors.

    Returns these and the arena memory, in bytes, that tensors above ``inline`` need. None: a field is unknown (no
    field of ModelInferRequest) or cut short, or there are very many or long ones: the message must be decoded in full.

    Args:
      inline: raw tensors of up to this many bytes are returned as bytes, larger ones as views of ``content``.
    """
    own = _Own(parts=True)
    at = start
    view = memoryview(content)
    raws: list[Buffer | Slice] = []
    room = 0
    while at < end:
        field = _field(content, at, end)
        if field is None:
            return None
        tag, begin, size = field
        if size > end - begin:
            return None
        if tag != _RAW:
            if not own.take(tag, view, at, begin, size):
                return None
        elif len(raws) == MAX_RAWS:
            return None
        elif size <= inline:
            raws.append(bytes(view[begin : begin + size]))
        else:
            raws.append(view[begin : begin + size])
            room += -(-size // ALIGNMENT) * ALIGNMENT
        at = begin + size
    return own.rest, own.client_id, own.scheduling, tuple(raws), room


def walk_beginning_in_python(content: Buffer, start: int, end: int) -> Begun | None:
    """Reads the fields before the first raw tensor from ``content[start:end]``, the beginning of a message.

    Returns these without the id, the id, where the tensor's bytes begin (counted from ``start``), and the tensor's size. None: no
    raw tensor begins there, or a field is unknown, cut short or too long.
    """
    own = _Own(parts=False)
    at = start
    view = memoryview(content)
    while at < end:
        field = _field(content, at, end)
        if field is None:
            return None
        tag, begin, size = field
        if tag == _RAW:
            return own.rest, own.client_id, begin - start, size
        if size > end - begin or not own.take(tag, view, at, begin, size):
            return None
        at = begin + size
    return None


def fields(content: Buffer | bytearray, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields tag, offset, content offset and content size of each field of an encoded message before ``end``.

    Stops at the first field that is cut short, or that a ModelInferRequest does not have.
    """
    at = 0
    while at < end and (field := _field(content, at, end)) is not None:
        tag, begin, size = field
        if size > end - begin:
            return
        yield tag, at, begin, size
        at = begin + size


class _Own:
    """Collects the fields of a message other than raw tensors: the id, the scheduling parameters and the rest."""

    def __init__(self, parts: bool) -> None:
        """Starts empty. ``parts``: whether scheduling parameters are kept apart from the rest."""
        self._parts = parts
        self.rest = self.client_id = self.scheduling = b""

    def take(self, tag: int, view: memoryview, at: int, begin: int, size: int) -> bool:
        """Stores the field ``view[at : begin + size]``, whose content begins at ``begin``, as id, scheduling or rest.

        Returns False if the scheduling parameters or the rest have become too long, else True.
        """
        end = begin + size
        if tag == _ID:
            self.client_id = bytes(view[begin:end])
        elif tag == _PARAMETER and self._parts and bytes(view[begin:end]).startswith(_SCHEDULING):
            self.scheduling += view[at:end]
        else:
            self.rest += view[at:end]
        return len(self.rest) <= MAX_REST and len(self.scheduling) <= MAX_SCHEDULING


def _field(content: Buffer | bytearray, at: int, end: int) -> tuple[int, int, int] | None:
    """Returns tag byte, content offset and content size of the protobuf field at ``at``. The content may reach beyond ``end``.

    None: ModelInferRequest has no field with that tag byte, or the size is cut short or too long.
    """
    tag = content[at]
    at += 1
    if tag not in _TAGS:
        return None
    size = shift = 0
    while at < end and shift <= _MAX_SHIFT:
        byte = content[at]
        at += 1
        size |= (byte & 127) << shift
        if byte < 128:
            return tag, at, size
        shift += 7
    return None


walk: Callable[[Buffer, int, int, int], Walked | None]
walk_beginning: Callable[[Buffer, int, int], Begun | None]
try:
    from tensord.daemon.grpc import _walk

    check(_walk)
except ImportError:  # not built, or not from these sources
    walk, walk_beginning = walk_in_python, walk_beginning_in_python
else:
    walk, walk_beginning = _walk.walk, _walk.walk_beginning
    _walk.know(_SCHEDULING)
