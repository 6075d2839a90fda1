"""Encodes and decodes the records that go over a lane, in version ``WIRE_VERSION`` of the wire.

``include/tensord_lane.h`` describes the records for every language. A datagram is one byte and MessagePack behind it:

    0x01  an array of records
    0x02  a part, but not the last, of an array with a single record that is larger than a datagram
    0x03  the last part of such an array

A record is an array that begins with its tag. The record that gives a number its meaning is sent before the number is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Union

from tensord_client import msgpack, native
from tensord_client.msgpack import Malformed, pack

WIRE_VERSION = 3
MAX_DATAGRAM = 64 << 10
#: The most bytes of encoded records in one datagram.
ROOM = MAX_DATAGRAM - 8
#: Each record of a client must have fewer bytes.
MAX_RECORD = 1 << 20
#: The most prepared requests that have a number at the same time.
MAX_NUMBERS = 1024
#: The most leases in one release record, so that it fits into a datagram however large its integers are.
MAX_RELEASES = 1024
#: Asks for ``AnswerRecord.timing``.
TIMING = 4
#: Bytes that a response counts beyond its tensors, in the bound on unacknowledged responses.
_RESPONSE_BYTE_SIZE = 256

#: (segment, offset, byte size) in this connection's own memory; for a segment's number a region's name stands as well.
Place = tuple[Union[int, str], int, int]


def datagram(records: Sequence[bytes]) -> bytes:
    """Puts encoded records (messages) into one datagram. The caller makes sure that they fit (``ROOM`` bytes together)."""
    return b"\x01" + msgpack.array_head(len(records)) + b"".join(records)


def datagrams(record: bytes) -> list[bytes]:
    """Splits one encoded record (message) into as many datagrams as it needs."""
    whole = datagram((record,))
    if len(record) <= ROOM:
        return [whole]
    parts = [whole[at : at + ROOM] for at in range(1, len(whole), ROOM)]
    return [b"\x02" + part for part in parts[:-1]] + [b"\x03" + parts[-1]]


def region(place: Place) -> tuple[str, str, int, int]:
    """Converts a place in shared memory to its form in records: "r", region's name or "@" + segment number, offset, byte size."""
    return ("r", place[0] if isinstance(place[0], str) else f"@{place[0]}", place[1], place[2])


def wire_version() -> bytes:
    """Encodes the first record on a lane, which says the version of the message format."""
    return pack(("V", WIRE_VERSION))


def segment_opened(segment: int, byte_size: int) -> bytes:
    """Encodes the message that announces a segment of this process to the worker; its descriptor is sent along."""
    return pack(("S+", segment, byte_size))


def segment_closed(segment: int) -> bytes:
    """Encodes the message by which this process says that it has closed a segment and will not name it again."""
    return pack(("S-", segment))


def segment_refused(segment: int) -> bytes:
    """Encodes the message by which this process says that it could not map a segment of the worker's."""
    return pack(("S!", segment))


def prepared_request(
    model: str,
    version: int,
    inputs: Iterable[tuple[str, str, Sequence[int], Place | None]],
    outputs: Iterable[tuple[str, Place | None]],
    parameters: Mapping[str, Any],
) -> bytes:
    """Encodes a prepared request: the constant part of many requests, which is sent once and then named by a number.

    Args:
      version: the model's version; 0: the newest.
      inputs: (name, datatype, shape, place) of each input; place None: its bytes come with each request.
      outputs: (name, place) of each output that is to be returned, place None: it comes with the answer; empty: all outputs.

    Raises: ValueError, TypeError: a value has no encoding.
    """
    tensors = [
        ("t", name, datatype, tuple(shape), None if place is None else region(place))
        for name, datatype, shape, place in inputs
    ]
    wanted = [("o", name, None if place is None else region(place), 0) for name, place in outputs]
    return pack(("P", model, version, tensors, wanted, dict(parameters)))


def prepare(number: int, prepared: bytes) -> bytes:
    """Encodes the message that makes ``number`` stand for ``prepared``, the encoded constant part of requests, from now on."""
    return b"\x93\xa2Q+" + msgpack.integer(number) + prepared


#: The first bytes of a request's record, up to its id.
REQUEST_HEAD = b"\xdc\x00\x10\xa1q\xcf"


def request(
    request_id: int,
    prepared: bytes,
    contents: list[bytes],
    own: bytes,
) -> bytes:
    """Encodes the record (message) of one request.

    Args:
      request_id: an id that is unused on this connection, of 64 bits.
      prepared: the encoded number of a prepared request, or the encoded prepared request itself.
      contents: the bytes of each input without a place, in order.
      own: the request's other fields, such as its deadline and priority, encoded by ``own_fields``.
    """
    if native.request is not None:
        return native.request(request_id, prepared, contents, own)
    pieces = [REQUEST_HEAD, request_id.to_bytes(8, "big"), prepared, msgpack.array_head(len(contents))]
    for content in contents:
        pieces.append(msgpack.binary_head(len(content)))
        pieces.append(content)
    pieces.append(own)
    return b"".join(pieces)


#: The encoded fields of a request whose fields all have their default values.
_BARE = b"\xa0\xcf" + bytes(8) + b"\0\0\0\0\xc2\xc2" + bytes((TIMING, 0)) + b"\xa0\xa0"


def own_fields(
    client_id: str = "",
    deadline_ns: int = 0,
    priority: int = 0,
    timeout_us: int = 0,
    sequence_id: int | str = 0,
    sequence_start: bool = False,
    sequence_end: bool = False,
    replace_key: str = "",
    parameter_set: str = "",
) -> bytes:
    """Encodes the fields of a request that follow its contents. The deadline, behind the client's id, always takes nine bytes.

    Args:
      client_id: the id that the caller gave the request; "": none.
      deadline_ns: nanoseconds of the monotonic clock; 0: none.
      priority: 1 is the first to run; 0: the model's default.
      timeout_us: microseconds that the request may wait in the model's queue; 0: as the model's queue policy says.
      sequence_id: the sequence that the request belongs to; 0 or "": none.
      replace_key: a later request with the same key replaces this one in the queue; "": none does.
      parameter_set: the set that the answer is computed with; "": ``main``.
    """
    scheduled = priority or timeout_us or sequence_id or sequence_start or sequence_end or replace_key
    if not (client_id or scheduled):
        named = msgpack.text(parameter_set) if parameter_set else b"\xa0"
        return b"".join((_BARE[:2], deadline_ns.to_bytes(8, "big"), _BARE[10:-1], named))
    return b"".join(
        (
            msgpack.text(client_id),
            b"\xcf",
            deadline_ns.to_bytes(8, "big"),
            b"\x00",
            pack(priority),
            pack(timeout_us),
            pack(sequence_id),
            pack(sequence_start),
            pack(sequence_end),
            pack(TIMING),
            b"\x00",
            msgpack.text(replace_key),
            msgpack.text(parameter_set),
        )
    )


def trace_context(request_id: int, traceparent: str) -> bytes:
    """Encodes the record that says, right before a request's, which trace the request belongs to, by its ``traceparent``."""
    _, trace_id, span_id, _ = traceparent.split("-")
    return pack(("tc", request_id, trace_id, span_id))


def release(leases: Sequence[tuple[int, int, int]]) -> bytes:
    """Encodes the message that gives memory of answers back to the worker: (segment, offset, generation) of each lease."""
    return pack(("L", tuple(leases)))


def taken(request_id: int, byte_size: int) -> bytes:
    """Encodes the message that acknowledges ``byte_size`` more bytes of a request's responses, so the worker may send more."""
    return pack(("T", request_id, byte_size))


def cancel(request_id: int) -> bytes:
    """Encodes the message that tells the worker that nobody waits for a request's answer any more."""
    return pack(("X", request_id))


def end_sequence(model: str, sequence_id: int | str) -> bytes:
    """Encodes the message that ends a sequence without a request, once its waiting requests have run."""
    return pack(("E", model, sequence_id))


class OutputTensor:
    """Describes one output of an answer. ``placed``: whether the worker wrote it to the place that the request named."""

    __slots__ = ("datatype", "name", "placed", "shape")

    def __init__(self, name: str, datatype: str, shape: tuple[int, ...], placed: bool) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self.placed = placed


class PreparedAnswer:
    """The constant part of many answers, which name it by number: version, outputs, parameters, whether it is the last."""

    __slots__ = ("final", "is_mark", "outputs", "own_count", "parameters", "plan", "version")

    def __init__(self, fields: list[Any]) -> None:
        """Reads the fields of a decoded record, its tag first. Raises Malformed: they are no prepared answer."""
        try:
            tag, self.version, outputs, self.parameters, self.final = (fields + [0, [], {}, True][len(fields) - 1 :])[
                :5
            ]
            if tag != "A" or len(fields) > 5:
                raise Malformed(f"a prepared answer has the tag {tag!r} and {len(fields)} fields")
            self.outputs: list[OutputTensor] = []
            for each in outputs:
                kind, name, datatype, shape = each[:4]
                if kind != "t":
                    raise Malformed(f"an output has the tag {kind!r}")
                self.outputs.append(OutputTensor(name, datatype, tuple(shape), len(each) > 4 and each[4] is not None))
        except (TypeError, ValueError) as error:
            raise Malformed(f"a prepared answer is malformed: {error}") from error
        #: How many outputs have their contents in the answer's record or in leased memory.
        self.own_count = sum([not output.placed for output in self.outputs])
        #: True: a record without an error is no response, and only says that no further response comes.
        self.is_mark = bool(self.final and not (self.version or self.outputs))
        #: (name, shape, dtype, byte size) of each output, for ``pending``; empty: they are not all numbers in the record.
        self.plan: tuple[tuple[str, tuple[int, ...], Any, int], ...] | None = None


#: The fields of an answer's record where they are absent.
_ABSENT: list[Any] = ["c", 0, 0, [], None, "", "", None, None]


class AnswerRecord:
    """The record (message) of one answer: the outputs' contents, or an error (``code`` and ``message``)."""

    __slots__ = ("code", "contents", "lease", "message", "prepared", "request_id", "timing")

    request_id: int
    prepared: PreparedAnswer
    contents: list[Any]
    lease: list[int] | None
    code: str
    message: str
    timing: list[int] | None

    def __init__(self, fields: list[Any], known: dict[int, PreparedAnswer]) -> None:
        """Reads the fields of a decoded record. ``known``: number -> prepared answer that the worker has sent.

        Raises: Malformed: the fields are no answer, or name a number that is not known.
        """
        count = len(fields)
        if count < 9:
            if count < 3:
                raise Malformed(f"an answer has {count} fields")
            fields = fields + _ABSENT[count:]
        if count > 9:
            raise Malformed(f"an answer has {count} fields")
        #: ``contents``: of the outputs that lie in no place of the request's, bytes, or ["a", segment, offset, byte size].
        _, self.request_id, prepared, self.contents, self.lease, self.code, self.message, _, self.timing = fields
        if type(prepared) is int:
            found = known.get(prepared)
            if found is None:
                raise Malformed(f"number {prepared} was never prepared")
            self.prepared = found
        else:
            self.prepared = PreparedAnswer(prepared)
        if len(self.contents) != self.prepared.own_count:
            raise Malformed(f"{len(self.contents)} tensors came in an answer prepared for {self.prepared.own_count}")

    @property
    def byte_size(self) -> int:
        """Returns how many bytes this response counts in the worker's limit of responses that the client has not acknowledged."""
        size = _RESPONSE_BYTE_SIZE
        for content in self.contents:
            size += content[3] if type(content) is list else len(content)
        return size


def records(content: msgpack.Buffer, at: int, end: int) -> list[list[Any]]:
    """Decodes the array of records (messages) in ``content[at:end]``; each record becomes a list that begins with its tag.

    Raises: Malformed: the bytes are no such array.
    """
    decoded, at = msgpack.unpack_from(content, at, end)
    if at != end or type(decoded) is not list:
        raise Malformed("a datagram is no array of records")
    for record in decoded:
        if type(record) is not list or not record or type(record[0]) is not str:
            raise Malformed("a record is no array with a tag")
    return decoded
