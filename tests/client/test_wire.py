"""The records of a lane as the client's part in C reads and writes them, held to msgspec's structs in both directions."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensord_client.answer_memory import PreparedAnswer as ReadAnswer
from tensord_client.common.results import Answer
from tensord_client.common.scheduling import UNSCHEDULED, Scheduling
from tensord_client.lane_socket import LaneSocket
from tensord_client.native import wire

from tensord.shm import messages
from tensord.shm.lane import response_byte_size
from tensord.shm.messages import (
    AnswerRecord,
    Cancel,
    EndSequence,
    Prepare,
    PrepareAnswer,
    PreparedAnswer,
    PreparedRequest,
    PreparedTensor,
    RegionSlice,
    Release,
    RequestedOutput,
    RequestRecord,
    SegmentClosed,
    SegmentOpened,
    SegmentRefused,
    Slice,
    Taken,
    ToSubmitter,
    ToWorker,
    TraceContext,
    WireVersion,
)
from tensord.shm.record import decoder, encoder

_NUMBERS = st.integers(0, (1 << 63) - 1) | st.integers(0, 300)
_INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.integers(-40, 300)
_NAMES = st.text(max_size=40)
_PARAMETERS = st.dictionaries(
    _NAMES, st.booleans() | _INTEGERS | st.floats(allow_nan=False) | st.text(max_size=300), max_size=20
)
_SHAPES = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=5).map(tuple)
_REGIONS = st.builds(RegionSlice, _NAMES, _NUMBERS, _NUMBERS)
_TENSORS = st.lists(st.builds(PreparedTensor, _NAMES, _NAMES, _SHAPES, st.none() | _REGIONS), max_size=20).map(tuple)
_LEASES = st.tuples(_NUMBERS, _NUMBERS, _NUMBERS)
_PREPARED = st.builds(PreparedAnswer, _NUMBERS, _TENSORS, _PARAMETERS, st.booleans())
_CONTENTS = st.lists(st.binary(max_size=400) | st.builds(Slice, _NUMBERS, _NUMBERS, _NUMBERS), max_size=3).map(tuple)


def _fitting(answer: AnswerRecord) -> AnswerRecord:
    """Returns the answer with as many contents as its outputs need."""
    if not isinstance(answer.prepared, PreparedAnswer):
        return answer
    own = len([output for output in answer.prepared.outputs if output.region is None])
    return msgspec.structs.replace(answer, contents=(answer.contents + (b"",) * own)[:own])


_ANSWERS = st.builds(
    AnswerRecord,
    st.integers(0, (1 << 64) - 1),
    st.integers(0, 3) | _PREPARED,
    _CONTENTS,
    st.none() | _LEASES,
    _NAMES,
    st.text(max_size=300),
    st.none(),
    st.none() | _LEASES,
).map(_fitting)
_FROM_WORKER = st.lists(
    st.builds(WireVersion, _NUMBERS)
    | st.builds(SegmentOpened, _NUMBERS, _NUMBERS)
    | st.builds(SegmentClosed, _NUMBERS)
    | st.builds(SegmentRefused, _NUMBERS)
    | st.builds(PrepareAnswer, st.integers(0, 1030), _PREPARED)
    | _ANSWERS,
    max_size=18,
)
_DECODER = decoder(ToSubmitter)
_REQUESTS = decoder(ToWorker)
#: What numbers stand for before: no output, one, one that lies in a region and two that do not.
_KNOWN = {
    0: PreparedAnswer(),
    1: PreparedAnswer(3, (PreparedTensor("y", "UINT8", (1,)),)),
    2: PreparedAnswer(
        1, tuple(PreparedTensor(name, "INT8", (2,), RegionSlice("r", 0, 2) if name == "b" else None) for name in "abc")
    ),
}


# ----------------------------------------------------------------------------------------------------------- reading


def _meant(content: bytes) -> list[str] | None:
    """Returns what msgspec reads, each record as text; None: it is malformed, or names a number that is unknown."""
    try:
        records = _DECODER.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    known, found = dict(_KNOWN), []
    for record in records:
        if isinstance(record, PrepareAnswer):
            if not 0 <= record.number < wire.MAX_NUMBERS:
                return None
            known[record.number] = record.prepared
            found.append(repr(("C+", record.number)) + repr(_shared(record.prepared)))
        elif isinstance(record, AnswerRecord):
            prepared = record.prepared if isinstance(record.prepared, PreparedAnswer) else known.get(record.prepared)
            if prepared is None or record.trace is not None:
                return None
            if len(record.contents) != len([output for output in prepared.outputs if output.region is None]):
                return None
            contents = tuple(msgspec.structs.astuple(each) if type(each) is Slice else each for each in record.contents)
            own = (record.request_id, contents, record.lease, record.code, record.message, record.timing)
            found.append(repr((*own, response_byte_size(record.contents))) + repr(_shared(prepared)))
        else:
            found.append(repr((record.__struct_config__.tag, *msgspec.structs.astuple(record))))
    return found


def _shared(prepared: PreparedAnswer | ReadAnswer) -> Any:
    outputs = [
        (
            each.name,
            each.datatype,
            each.shape,
            each.region is not None if isinstance(each, PreparedTensor) else each.placed,
        )
        for each in prepared.outputs
    ]
    return prepared.version, outputs, prepared.parameters, prepared.final


def _read(content: bytes | bytearray) -> list[str] | None:
    """Returns what the client reads, each record as text; None: it refuses the datagram."""
    known: list[ReadAnswer | None] = [None] * wire.MAX_NUMBERS
    first = encoder.encode([PrepareAnswer(number, prepared) for number, prepared in _KNOWN.items()])
    wire.records(first, 0, len(first), known, ReadAnswer)
    learned: list[ReadAnswer] = []

    def make(*fields: Any) -> ReadAnswer:
        learned.append(ReadAnswer(*fields))
        return learned[-1]

    try:
        records = wire.records(content, 0, len(content), known, make)
    except ValueError:
        return None
    found = []
    for record in records:
        if type(record) is tuple:
            found.append(repr(record) + (repr(_shared(learned.pop(0))) if record[0] == "C+" else ""))
            continue
        if record.prepared in learned[:1]:
            learned.pop(0)
        own = (record.request_id, record.contents, record.lease, record.code, record.message, record.timing)
        found.append(repr((*own, record.byte_size)) + repr(_shared(record.prepared)))
    return found


def read_alike(content: bytes) -> None:
    """Asserts that the client reads the bytes as msgspec does, or refuses them as it does."""
    meant, read = _meant(content), _read(content)
    # Sizes of a shape are of 64 bits with a sign, and no record has a negative number elsewhere but among parameters. What is not
    # so is refused, and msgspec takes it.
    if read is not None or meant is None or not _has_unfit(_DECODER.decode(content)):
        assert read == meant


@given(_FROM_WORKER)
def test_every_record_of_a_worker_is_read_as_msgspec_reads_it(records: list[Any]) -> None:
    content = encoder.encode(records)
    meant = _meant(content)
    assert _read(content) == meant
    assert _read(bytearray(content)) == meant


@given(_FROM_WORKER.map(encoder.encode) | st.binary(max_size=200), st.data())
def test_what_is_changed_is_refused_by_both_or_read_alike(content: bytes, data: st.DataObject) -> None:
    changed = bytearray(content + data.draw(st.binary(max_size=9)))
    for _ in range(data.draw(st.integers(0, 3))):
        if changed:
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    read_alike(bytes(changed[: data.draw(st.sampled_from([len(content), len(changed), len(content) // 2]))]))


def _has_unfit(value: Any) -> bool:
    if isinstance(value, PreparedTensor):
        return any(size >= 1 << 63 for size in value.shape)
    if isinstance(value, PreparedAnswer):
        return value.version < 0 or any(map(_has_unfit, value.outputs))
    if isinstance(value, msgspec.Struct):
        return any(map(_has_unfit, msgspec.structs.astuple(value)))
    if isinstance(value, list | tuple):
        return any(map(_has_unfit, value))
    return isinstance(value, int) and value < 0


@given(_FROM_WORKER.filter(len), st.data())
def test_a_datagram_that_is_cut_anywhere_is_malformed(records: list[Any], data: st.DataObject) -> None:
    content = encoder.encode(records)
    assert _read(content[: data.draw(st.integers(0, len(content) - 1))]) is None


@pytest.mark.parametrize(
    "content", [b"\x91\x92\xa2S", b"\x91\x92\xa2S\x00\x01", b"\x91\x92\xa2S=\x01", b"\x91\x90", b"\x91\xc0", b""]
)
def test_a_tag_that_is_none_is_malformed(content: bytes) -> None:
    assert _read(content) is None


def test_an_answer_without_its_last_fields_has_their_defaults() -> None:
    content = msgspec.msgpack.encode([("c", 1 << 32, ("A",))])
    (answer,) = wire.records(content, 0, len(content), [], ReadAnswer)
    assert (answer.contents, answer.lease, answer.code, answer.message, answer.timing) == ((), None, "", "", None)
    assert answer.prepared.is_mark


# ----------------------------------------------------------------------------------------------------------- writing


@given(
    _NAMES,
    _NUMBERS,
    st.lists(st.tuples(_NAMES, _NAMES, _SHAPES, st.none() | _LEASES), max_size=20),
    _PARAMETERS,
    _NUMBERS,
)
def test_a_prepared_request_is_written_as_msgspec_writes_it(
    model: str, version: int, inputs: list[Any], parameters: dict[str, Any], number: int
) -> None:
    outputs = [("scores", None), ("labels", (1, 64, 128)), ("device", ("region", 0, 8))]
    encoded = wire.prepared_request(model, version, inputs, outputs, parameters)
    expected = PreparedRequest(
        model,
        version,
        tuple(
            PreparedTensor(name, datatype, shape, place and RegionSlice(f"@{place[0]}", place[1], place[2]))
            for name, datatype, shape, place in inputs
        ),
        (
            RequestedOutput("scores"),
            RequestedOutput("labels", RegionSlice("@1", 64, 128)),
            RequestedOutput("device", RegionSlice("region", 0, 8)),
        ),
        parameters,
    )
    assert encoded == encoder.encode(expected)
    assert wire.prepare(number, encoded) == encoder.encode(Prepare(number, expected))


@given(
    st.integers(0, (1 << 64) - 1),
    st.lists(st.binary(max_size=5000), max_size=20),
    _NAMES,
    _NUMBERS,
    _NUMBERS | st.text(max_size=30),
    st.booleans(),
)
def test_a_request_is_what_msgspec_means(
    request_id: int, contents: list[bytes], client_id: str, deadline_ns: int, sequence_id: Any, start: bool
) -> None:
    scheduling = Scheduling(7, 9, sequence_id, start, not start, client_id, client_id[::-1])
    own = wire.own_fields(client_id, deadline_ns, scheduling)
    (decoded,) = _REQUESTS.decode(wire.datagram([wire.request(request_id, wire.integer(5), contents, own)])[1:])
    assert decoded == RequestRecord(
        request_id,
        5,
        tuple(contents),
        client_id,
        deadline_ns,
        priority=7,
        timeout_us=9,
        sequence_id=sequence_id,
        sequence_start=start,
        sequence_end=not start,
        trace=messages.TIMING,
        replace_key=client_id,
        parameter_set=client_id[::-1],
    )


@given(_NUMBERS, _NUMBERS, st.lists(_LEASES, max_size=20), _NUMBERS | _NAMES)
def test_the_other_records_are_written_as_msgspec_writes_them(
    one: int, other: int, leases: list[tuple[int, int, int]], sequence_id: int | str
) -> None:
    for encoded, expected in (
        (wire.record("V", messages.WIRE_VERSION), WireVersion(messages.WIRE_VERSION)),
        (wire.record("S+", one, other), SegmentOpened(one, other)),
        (wire.record("S-", one), SegmentClosed(one)),
        (wire.record("S!", one), SegmentRefused(one)),
        (wire.release(leases), Release(tuple(leases))),
        (wire.record("T", one, other), Taken(one, other)),
        (wire.record("X", one), Cancel(one)),
        (wire.record("E", "total", sequence_id), EndSequence("total", sequence_id)),
        (wire.record("tc", one, f"{one:032x}", f"{other:016x}"), TraceContext(one, f"{one:032x}", f"{other:016x}")),
    ):
        assert encoded == encoder.encode(expected)


@pytest.mark.parametrize(
    "given",
    [
        lambda: wire.own_fields("", 0, Scheduling(priority=-1)),
        lambda: wire.own_fields("", 1 << 64, UNSCHEDULED),
        lambda: wire.own_fields("\ud800", 0, UNSCHEDULED),
        lambda: wire.own_fields("", 0, Scheduling(sequence_id=-1)),
        lambda: wire.prepared_request("m", 0, [], [], {"p": None}),  # type: ignore[dict-item]
        lambda: wire.prepared_request("m", 0, [], [], {"p": 1 << 64}),
        lambda: wire.prepared_request("m", 0, [], [("y", (0, -1, 8))], {}),
        lambda: wire.prepared_request("m", 0, [("x", "FP32", (np.int64(3),), None)], [], {}),
        lambda: wire.record("S+", 0, -1),
        lambda: wire.record("E", "m", 1.5),  # type: ignore[arg-type]
    ],
)
def test_what_has_no_encoding_is_an_error(given: Any) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        given()


def test_a_large_record_is_cut_into_parts_that_the_server_joins() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    lane = LaneSocket(ours, 0)
    for size in (wire.ROOM - 100, wire.ROOM, wire.ROOM + 1, 4 * 60000):
        record = bytes(size)
        lane.send_record(record)
        parts = [theirs.recv(wire.MAX_DATAGRAM + 1)]
        while parts[-1][0] == 2:
            parts.append(theirs.recv(wire.MAX_DATAGRAM + 1))
        kinds = [part[0] for part in parts]
        assert kinds == ([1] if size <= wire.ROOM else [2] * (len(parts) - 1) + [3])
        assert max(map(len, parts)) <= wire.MAX_DATAGRAM
        assert b"".join([part[1:] for part in parts]) == b"\x91" + record
    lane.close()
    theirs.close()


def test_the_two_directions_have_the_records_that_the_client_knows() -> None:
    """Fails where a record is added that the client would not know."""
    tags = {kind.__struct_config__.tag for kind in (ToWorker | ToSubmitter).__args__}
    assert tags == {"V", "S+", "S-", "S!", "Q+", "q", "tc", "L", "T", "X", "E", "C+", "c"}


# ------------------------------------------------------------------------------------------------------------ arrays

_TABLE = np.arange(600, dtype=np.float32)


@pytest.mark.parametrize(
    ("inputs", "is_seen"),
    [
        ({}, True),
        ({"a": _TABLE[:5].copy(), "b": np.zeros((2, 0, 3), np.int8)}, True),
        ({"a": _TABLE[::-1]}, True),
        ({"a": _TABLE.reshape(20, 30).T, "b": _TABLE[3:9]}, True),
        ({"a": np.array(7.5), "b": np.array([b"ab"]), "c": _TABLE.astype(">f4")}, True),
        ({"a": np.frombuffer(b"abcd", np.uint8)}, False),
        ({"a": np.zeros(4097, np.float32)}, False),
        ({str(number): np.zeros(1024, np.float32) for number in range(4)}, True),
        ({str(number): np.zeros(1024, np.float32) for number in range(4)} | {"4": np.zeros(1, np.int8)}, False),
        ({"a": np.ma.array([1.0])}, False),
        ({"a": [1.0]}, False),
    ],
)
def test_small_inputs_are_seen(inputs: dict[str, Any], is_seen: bool) -> None:
    found = wire.small_inputs(inputs, 16 << 10)
    assert (found is not None) == is_seen
    if found is not None:
        assert found[1] == [array.tobytes() for array in inputs.values()]
        assert found[0] == tuple(part for name, array in inputs.items() for part in (name, array.dtype, array.shape))


def test_an_answers_arrays() -> None:
    """They are the program's own, or its places; what is not as the output says, or lies elsewhere, is left to others."""
    int8, int16 = np.dtype(np.int8), np.dtype(np.int16)
    outputs = (("a", (2, 3), int16, 12), ("b", (0,), np.dtype(np.float64), 0), ("c", (3,), int8, -1))
    answer, place = Answer(), np.zeros(3, int8)
    assert wire.arrays(answer, outputs, (bytes(range(12)), b""), {"c": place})
    assert (answer["a"].shape, answer["b"].shape) == ((2, 3), (0,))
    assert answer["c"] is place
    assert answer["a"].tobytes() == bytes(range(12))
    answer["a"][:] = 1
    for contents in ((bytes(11), b""), (bytes(13), b""), (bytes(12), (0, 0, 0)), (bytes(12),), (bytes(12), b"", b"")):
        assert not wire.arrays(Answer(), outputs, contents, {"c": place})
    wrong = {}, {"c": np.zeros(4, int8)}, {"c": place.view(np.uint8)}, {"a": np.zeros((2, 3), int16), "c": place}
    for places in wrong:
        assert not wire.arrays(Answer(), outputs, (bytes(range(12)), b""), places)
