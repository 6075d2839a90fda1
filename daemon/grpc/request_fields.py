"""Cuts an encoded ModelInferRequest into its id, its raw tensors and its head, which is all other fields. Sans-I/O.

    | model_name, id, inputs, outputs, ... (fields 1 to 6) | raw_input_contents (field 7) | raw_input_contents | ...

Clients write the fields in this order; any other order means the same and is accepted. ``split`` cuts a complete message,
``ArrivingFields`` a message that arrives in pieces, with the same result. The tensors' bytes are not touched here.
Source: grpc_service.proto; protobuf's encoding specification.
"""

from __future__ import annotations

from tensord.daemon.front.entries import MAX_ENTRIES
from tensord.daemon.grpc.walk import Begun
from tensord.daemon.tracing.tracer import Trace
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.messages import Buffer

#: More raw tensors than any model takes; each costs two bytes on the wire and far more here.
MAX_RAWS = MAX_ENTRIES
#: There are seven fields that are known, and unknown ones.
MAX_FIELDS = 8 * MAX_ENTRIES
#: Tag bytes of the fields 1 to 7, all length-delimited.
_ID, _RAW = 0x1A, 0x3A
_TAGS = frozenset((0x0A, 0x12, _ID, 0x22, 0x2A, 0x32, _RAW))
#: A tag and a number, or a tag and a length: two varints.
_MAX_START = 20
_NOTHING: Begun = (b"", b"", 0, 0)
_CUT_SHORT = "failed to parse the request message: it is cut short"


class RefusedRequest(Exception):
    """Raised when a request message is refused; carries the error, the request's id if known, and its trace if it has one."""

    def __init__(self, error: ServingError, client_id: str = "", trace: Trace | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.client_id = client_id
        self.trace = trace


def split(message: Buffer) -> tuple[bytes, bytes, list[tuple[int, int]]]:
    """Cuts a complete ModelInferRequest into head, id and raw tensors.

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
                _, content, size = _field_start(message[start : start + _MAX_START])
                at = start + content + size
                continue
            if size > 127:
                size, at = _varint(message, at - 1)
            if at + size > end:
                raise IndexError
            if tag == _RAW:
                if len(raws) == MAX_RAWS:
                    raise _too_many_raws()
                raws.append((at, at + size))
            elif tag == _ID:
                client_id = bytes(message[at : at + size])
            if tag in (_RAW, _ID):
                if kept < start:
                    pieces.append(bytes(message[kept:start]))
                kept = at + size
            at += size
        else:
            if at < end:
                raise _too_many_fields()
    except IndexError:
        raise _cut_short() from None
    if at > end:
        raise _cut_short()
    if kept < end:
        pieces.append(bytes(message[kept:]))
    return (pieces[0] if len(pieces) == 1 else b"".join(pieces)), client_id, raws


def client_id_of(message: Buffer) -> str:
    """Returns the request id in an encoded message, as text. Raises RefusedRequest: the message is malformed."""
    return split(message)[1].decode("utf-8", "replace")


class ArrivingFields:
    """Parses the fields of a ModelInferRequest that arrives in pieces; its owner reads the raw tensors' bytes.

    A raw tensor counts as read here as soon as it begins: the message is complete once ``unread`` is 0 and the owner has it all.
    """

    __slots__ = ("_count", "_field", "_left", "_start", "client_id", "head", "raw_count", "raw_size", "unread")

    def __init__(self, byte_size: int, begun: Begun | None = None) -> None:
        """Starts to parse a message of ``byte_size`` bytes.

        ``begun``: what ``walk_beginning`` found before the first raw tensor; None: parse the message from its beginning.
        Raises RefusedRequest: the raw tensor is longer than the message.
        """
        head, client_id, at, size = begun or _NOTHING
        if size > byte_size - at:
            raise _cut_short()
        #: Bytes of the message that were not taken here and belong to no raw tensor that has begun.
        self.unread = byte_size - at - size
        self.head = bytearray(head)
        self.client_id = bytearray(client_id)
        #: The size of the raw tensor that began last.
        self.raw_size = size
        self.raw_count = 0 if begun is None else 1
        #: The first bytes of a field whose size is not known yet.
        self._start = bytearray()
        #: Where the rest of the field under way goes, and how much it is.
        self._field = self.head
        self._left = 0
        #: Fields that have begun.
        self._count = 0

    def take(self, piece: memoryview, at: int) -> tuple[int, bool]:
        """Parses ``piece[at:]`` up to the next raw tensor. Returns where it stopped, and whether a raw tensor begins there.

        Raises RefusedRequest: the message is malformed, or has too many fields.
        """
        end = len(piece)
        while at < end:
            if self._left:
                size = min(self._left, end - at)
                self._field += piece[at : at + size]
                self._left -= size
                self.unread -= size
                at += size
                continue
            known = len(self._start)
            self._start += piece[at : min(end, at + _MAX_START - known)]
            try:
                tag, content, size = _field_start(self._start)
            except IndexError:
                if len(self._start) == _MAX_START or len(self._start) >= self.unread + known:
                    raise _cut_short() from None
                self.unread -= end - at
                return end, False
            at += content - known
            self.unread -= content - known
            if size > self.unread:
                raise _cut_short()
            self._count += 1
            if self._count > MAX_FIELDS:
                raise _too_many_fields()
            start, self._start = self._start[:content], bytearray()
            if tag == _RAW:
                if self.raw_count == MAX_RAWS:
                    raise _too_many_raws()
                self.raw_count += 1
                self.raw_size = size
                self.unread -= size
                return at, True
            if tag == _ID:
                self._field = self.client_id = bytearray()
            else:
                self.head += start
                self._field = self.head
            self._left = size
        return at, False


def _too_many_raws() -> RefusedRequest:
    return RefusedRequest(InvalidArgument(f"more than {MAX_RAWS} raw_input_contents are given"))


def _too_many_fields() -> RefusedRequest:
    return RefusedRequest(
        InvalidArgument(f"more than {MAX_FIELDS} fields are given in a request message, at most {MAX_FIELDS} are taken")
    )


def _cut_short() -> RefusedRequest:
    return RefusedRequest(InvalidArgument(_CUT_SHORT))


def _field_start(start: Buffer | bytearray) -> tuple[int, int, int]:
    """Parses the start of a field.

    Returns its tag (0: an unknown field), the bytes before its content, and the size of the content.
    Raises: IndexError: more bytes are needed, or the field is malformed.  RefusedRequest: no more bytes can make it valid.
    """
    tag = start[0]
    if tag in _TAGS:
        size, at = _varint(start, 1)
        return tag, at, size
    tag, at = _varint(start, 0)
    _check_tag(tag)
    match tag & 7:
        case 0:
            return 0, _varint(start, at)[1], 0
        case 1:
            return 0, at, 8
        case 2:
            size, at = _varint(start, at)
            return 0, at, size
        case 5:
            return 0, at, 4
    raise RefusedRequest(InvalidArgument(_CUT_SHORT))


def _check_tag(tag: int) -> None:
    """Raises RefusedRequest if a known tag takes more bytes than it needs: clients do not write that, and parsers differ."""
    if tag in _TAGS:
        raise RefusedRequest(InvalidArgument("failed to parse the request message: a tag is longer than it must be"))


def _varint(message: Buffer | bytearray, at: int) -> tuple[int, int]:
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
