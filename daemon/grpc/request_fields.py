"""Cuts an encoded ModelInferRequest into its id, its raw tensors and its head, which is all other fields. Sans-I/O.

    | model_name, id, inputs, outputs, ... (fields 1 to 6) | raw_input_contents (field 7) | raw_input_contents | ...

Clients write the fields in this order; any other order means the same and is accepted. ``split`` cuts a complete message;
one that arrives in pieces cuts itself, with the same result (``arriving_message``). The tensors' bytes are not touched here.
Source: grpc_service.proto; protobuf's encoding specification.
"""

from __future__ import annotations

from tensord.daemon.front.entries import MAX_ENTRIES
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.messages import Buffer
from tensord.shm.tracer import Trace

#: More raw tensors than any model takes; each costs two bytes on the wire and far more here.
MAX_RAWS = MAX_ENTRIES
#: There are seven fields that are known, and unknown ones.
MAX_FIELDS = 8 * MAX_ENTRIES
#: Tag bytes of the fields 1 to 7, all length-delimited.
ID, RAW = 0x1A, 0x3A
_TAGS = frozenset((0x0A, 0x12, ID, 0x22, 0x2A, 0x32, RAW))
#: The most bytes before a field's content. A tag and a number, or a tag and a length: two varints.
MAX_START = 20
_CUT_SHORT = "failed to parse the request message: it is cut short"


class RefusedRequest(Exception):
    """Raised when a request message is refused; carries the error, and the request's id, trace and model if they are known."""

    def __init__(self, error: ServingError, client_id: str = "", trace: Trace | None = None, model: str = "") -> None:
        super().__init__(error.message)
        self.error = error
        self.client_id = client_id
        self.trace = trace
        self.model = model


def split(message: Buffer) -> tuple[bytes, bytes, list[tuple[int, int]]]:
    """Cuts a complete ModelInferRequest into head, id and raw tensors (raw_input_contents).

    Returns the head (all other fields), the id, and (begin, end) of each raw tensor in ``message``.
    Raises RefusedRequest: the message is malformed, or has too many fields.
    """
    at, end = 0, len(message)
    raws: list[tuple[int, int]] = []
    pieces: list[bytes] = []
    kept = 0
    client_id = b""
    try:
        for _ in range(MAX_FIELDS):
            if at >= end:
                break
            start = at
            tag = message[at]
            size = message[at + 1]
            at += 2
            if tag not in _TAGS:
                # protobuf ignores fields it does not know.
                _, content, size = field_start(message[start : start + MAX_START])
                at = start + content + size
                continue
            if size > 127:
                size, at = varint(message, at - 1)
            if at + size > end:
                raise IndexError
            if tag == RAW:
                if len(raws) == MAX_RAWS:
                    raise too_many_raws()
                raws.append((at, at + size))
            elif tag == ID:
                client_id = bytes(message[at : at + size])
            if tag in (RAW, ID):
                if kept < start:
                    pieces.append(bytes(message[kept:start]))
                kept = at + size
            at += size
        else:
            if at < end:
                raise too_many_fields()
    except IndexError:
        raise cut_short() from None
    if at > end:
        raise cut_short()
    if kept < end:
        pieces.append(bytes(message[kept:]))
    return (pieces[0] if len(pieces) == 1 else b"".join(pieces)), client_id, raws


def client_id_of(message: Buffer) -> str:
    """Returns the request id in an encoded message, as text. Raises RefusedRequest: the message is malformed."""
    return split(message)[1].decode("utf-8", "replace")


def too_many_raws() -> RefusedRequest:
    """Returns the refusal of a message with more raw tensors than any model takes."""
    return RefusedRequest(InvalidArgument(f"more than {MAX_RAWS} raw_input_contents are given"))


def too_many_fields() -> RefusedRequest:
    """Returns the refusal of a message with more fields than any request needs."""
    return RefusedRequest(
        InvalidArgument(f"more than {MAX_FIELDS} fields are given in a request message, at most {MAX_FIELDS} are taken")
    )


def cut_short() -> RefusedRequest:
    """Returns the refusal of a message that ends within a field, or is malformed."""
    return RefusedRequest(InvalidArgument(_CUT_SHORT))


def field_start(start: Buffer | bytearray) -> tuple[int, int, int]:
    """Parses the start of a field.

    Returns its tag (0: an unknown field), the bytes before its content, and the size of the content.
    Raises: IndexError: more bytes are needed, or the field is malformed.  RefusedRequest: no more bytes can make it valid.
    """
    tag = start[0]
    if tag in _TAGS:
        size, at = varint(start, 1)
        return tag, at, size
    tag, at = varint(start, 0)
    _check_tag(tag)
    match tag & 7:
        case 0:
            return 0, varint(start, at)[1], 0
        case 1:
            return 0, at, 8
        case 2:
            size, at = varint(start, at)
            return 0, at, size
        case 5:
            return 0, at, 4
    raise RefusedRequest(InvalidArgument(_CUT_SHORT))


def _check_tag(tag: int) -> None:
    """Raises RefusedRequest if a known tag takes more bytes than it needs: clients do not write that, and parsers differ."""
    if tag in _TAGS:
        raise RefusedRequest(InvalidArgument("failed to parse the request message: a tag is longer than it must be"))


def varint(message: Buffer | bytearray, at: int) -> tuple[int, int]:
    """Returns the number of protobuf's variable length that begins at ``at``, and where it ends.

    Raises IndexError: it is cut short, or longer than any.
    """
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError
