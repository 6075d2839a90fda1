"""Cuts an encoded ModelInferRequest into its id, its raw tensors and its head, which is all other fields. Sans-I/O.

    | model_name, id, inputs, outputs, ... (fields 1 to 6) | raw_input_contents (field 7) | raw_input_contents | ...

Clients write the fields in this order; any other order means the same and is accepted. The tensors' bytes are not touched.
Source: grpc_service.proto; protobuf's encoding specification.
"""

from __future__ import annotations

from tensord.daemon.front.entries import MAX_ENTRIES
from tensord.daemon.grpc.walk import walk_beginning
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.messages import Buffer
from tensord.shm.tracer import Trace

#: More raw tensors than any model takes; each costs two bytes on the wire and far more here.
MAX_RAWS = MAX_ENTRIES
#: The most fields: seven are known, and others may come.
MAX_FIELDS = 8 * MAX_ENTRIES
#: Tag bytes of the fields 1 to 7, all length-delimited.
ID, RAW = 0x1A, 0x3A
_TAGS = frozenset((0x0A, 0x12, ID, 0x22, 0x2A, 0x32, RAW))
#: The most bytes before a field's content. A tag and a number, or a tag and a length: two varints.
_MAX_START = 20


class RefusedRequest(Exception):
    """Raised when a request message is refused.

    ``error``: the reason. ``client_id``: the request's id, or "" if it is unknown. ``model``: the name of the requested model,
    or "" if it is unknown. ``trace``: the request's trace, or None if it has none.
    """

    def __init__(self, error: ServingError, client_id: str = "", trace: Trace | None = None, model: str = "") -> None:
        super().__init__(error.message)
        self.error = error
        self.client_id = client_id
        self.trace = trace
        self.model = model


class MessageCutter:
    """Cuts an encoded ModelInferRequest, which may come in pieces, into its id, its ``raw_input_contents`` and its head.

    The head has all other fields. The constructor's argument ``byte_size`` is the length of the message.
    """

    #: The raw tensors that have begun, and the size of the last one.
    raw_count = raw_size = 0
    #: The first bytes of a field whose size is not known yet; how much of a field is to come, and whether that is the id.
    _start = b""
    _field_left = 0
    _in_id = False
    #: Fields that have begun.
    _count = 0

    def __init__(self, byte_size: int) -> None:
        #: The bytes that have arrived of the id, and of all other fields except the raw tensors.
        self.client_id, self.head = bytearray(), bytearray()
        #: Bytes of the message that were not parsed and belong to no raw tensor that has begun.
        self.unread = byte_size

    def begin(self, piece: memoryview) -> tuple[int, bool]:
        """Parses the first piece of the message up to the first tensor of ``raw_input_contents``. Returns what ``cut`` does."""
        begun = walk_beginning(piece, 0, len(piece))
        if begun is None:
            return self.cut(piece, 0)
        head, client_id, at, self.raw_size = begun
        self.head, self.client_id, self.raw_count = bytearray(head), bytearray(client_id), 1
        self.unread -= at + self.raw_size
        if self.unread < 0:
            raise cut_short()
        return at, True

    def cut(self, piece: memoryview, at: int) -> tuple[int, bool]:
        """Parses ``piece[at:]`` up to the next tensor of ``raw_input_contents``.

        Returns the offset at which the parsing stopped, and whether a tensor begins at that offset.
        Raises RefusedRequest if the message is malformed, or has too many fields.
        """
        end = len(piece)
        while at < end:
            if size := min(self._field_left, end - at):
                field = self.client_id if self._in_id else self.head
                field += piece[at : at + size]
                self._field_left -= size
                self.unread -= size
                at += size
                continue
            known = len(self._start)
            start = self._start + piece[at : min(end, at + _MAX_START - known)]
            try:
                tag, content, size = _field_start(start)
            except IndexError:
                if len(start) == _MAX_START or len(start) >= self.unread + known:
                    raise cut_short() from None
                self._start = start
                self.unread -= end - at
                return end, False
            self._start = b""
            at += content - known
            self.unread -= content - known
            if size > self.unread:
                raise cut_short()
            self._count += 1
            if self._count > MAX_FIELDS:
                raise _refused(
                    f"more than {MAX_FIELDS} fields are given in a request message, at most {MAX_FIELDS} are taken"
                )
            if tag == RAW:
                if self.raw_count == MAX_RAWS:
                    raise _refused(f"more than {MAX_RAWS} raw_input_contents are given")
                self.raw_count += 1
                self.raw_size = size
                self.unread -= size
                return at, True
            self._in_id = tag == ID
            if self._in_id:
                self.client_id = bytearray()
            else:
                self.head += start[:content]
            self._field_left = size
        return at, False


def split(message: Buffer) -> tuple[bytes, bytes, list[tuple[int, int]]]:
    """Cuts a complete ModelInferRequest into its head, its id, and the (begin, end) of each of its ``raw_input_contents``.

    The head is the message without id and raw contents.
    Raises RefusedRequest if the message is malformed, or has too many fields.
    """
    cutter, view = MessageCutter(len(message)), memoryview(message)
    at = 0
    raws: list[tuple[int, int]] = []
    while at < len(view):
        at, begins = cutter.cut(view, at)
        if begins:
            raws.append((at, at + cutter.raw_size))
            at += cutter.raw_size
    return bytes(cutter.head), bytes(cutter.client_id), raws


def client_id_of(message: Buffer) -> str:
    """Returns the request id that the client set in ``message``, or "". Raises RefusedRequest if ``message`` is malformed."""
    return split(message)[1].decode("utf-8", "replace")


def cut_short() -> RefusedRequest:
    """Returns the error for a request message that cannot be parsed, such as one that ends within a field."""
    return _refused("failed to parse the request message: it is cut short")


def _refused(text: str) -> RefusedRequest:
    return RefusedRequest(InvalidArgument(text))


def _field_start(start: bytes) -> tuple[int, int, int]:
    """Parses the start of a protobuf field. Returns the field's tag, and the offset and the size of its content.

    The tag is 0 if ModelInferRequest has no such field. Raises IndexError if ``start`` is too short.
    """
    tag = start[0]
    if tag in _TAGS:
        size, at = varint(start, 1)
        return tag, at, size
    tag, at = varint(start, 0)
    if tag in _TAGS:
        # Clients do not write that, and parsers differ.
        raise _refused("failed to parse the request message: a tag is longer than it must be")
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
    raise cut_short()


def varint(message: Buffer | bytearray, at: int) -> tuple[int, int]:
    """Decodes the varint at the offset ``at`` of ``message``. Returns its value and the offset behind it.

    Raises IndexError if the varint is cut short or too long.
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
