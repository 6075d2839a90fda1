"""The client's own MessagePack against the server's, over every record of a lane."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensord_client import msgpack, native, pending, placement, wire
from tensord_client.common.results import Answer

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
    Timeline,
    ToSubmitter,
    ToWorker,
    WireVersion,
)
from tensord.shm.record import decoder, encoder

_NUMBERS = st.integers(0, (1 << 63) - 1) | st.integers(0, 300)
_NAMES = st.text(max_size=40)
_PARAMETERS = st.dictionaries(
    _NAMES,
    st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False) | _NAMES,
    max_size=20,
)
_SHAPES = st.lists(_NUMBERS, max_size=5).map(tuple)
_SLICES = st.builds(Slice, _NUMBERS, _NUMBERS, _NUMBERS)
_REGIONS = st.builds(RegionSlice, _NAMES, _NUMBERS, _NUMBERS)
_TENSORS = st.builds(PreparedTensor, _NAMES, _NAMES, _SHAPES, st.none() | _REGIONS)
_CONTENTS = st.lists(st.binary(max_size=400) | _SLICES, max_size=18).map(tuple)
_LEASES = st.tuples(_NUMBERS, _NUMBERS, _NUMBERS)
_PREPARED = st.builds(
    PreparedRequest,
    _NAMES,
    _NUMBERS,
    st.lists(_TENSORS, max_size=3).map(tuple),
    st.lists(st.builds(RequestedOutput, _NAMES, st.none() | _REGIONS, _NUMBERS), max_size=3).map(tuple),
    _PARAMETERS,
)
_ANSWERS = st.builds(PreparedAnswer, _NUMBERS, st.lists(_TENSORS, max_size=3).map(tuple), _PARAMETERS, st.booleans())
_TIMELINES = st.builds(Timeline, st.lists(st.tuples(_NAMES, _NUMBERS), max_size=3).map(tuple))
_RECORDS = st.one_of(
    st.builds(WireVersion, _NUMBERS),
    st.builds(SegmentOpened, _NUMBERS, _NUMBERS),
    st.builds(SegmentClosed, _NUMBERS),
    st.builds(SegmentRefused, _NUMBERS),
    st.builds(Prepare, _NUMBERS, _PREPARED),
    st.builds(PrepareAnswer, _NUMBERS, _ANSWERS),
    st.builds(Release, st.lists(_LEASES, max_size=20).map(tuple)),
    st.builds(Taken, _NUMBERS, _NUMBERS),
    st.builds(Cancel, _NUMBERS),
    st.builds(
        RequestRecord,
        _NUMBERS,
        _NUMBERS | _PREPARED,
        _CONTENTS,
        _NAMES,
        *([_NUMBERS] * 4),
        _NUMBERS | st.text(max_size=30),
        st.booleans(),
        st.booleans(),
        _NUMBERS,
        _NUMBERS,
    ),
    st.builds(
        AnswerRecord,
        _NUMBERS,
        _NUMBERS | _ANSWERS,
        _CONTENTS,
        st.none() | _LEASES,
        _NAMES,
        st.text(max_size=70000),
        st.none() | _TIMELINES,
    ),
)


def _plain(record: Any) -> Any:
    """Returns a record as the lists that it is on the wire."""
    return msgspec.to_builtins(record, builtin_types=(bytes,))


@given(_RECORDS)
def test_every_record_is_written_as_the_server_writes_it(record: Any) -> None:
    assert msgpack.pack(_plain(record)) == encoder.encode(record)


@given(_RECORDS)
def test_every_record_of_the_server_is_read(record: Any) -> None:
    assert msgpack.unpack(encoder.encode(record)) == _plain_lists(_plain(record))


def _plain_lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain_lists(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain_lists(each) for name, each in value.items()}
    return value


@given(_RECORDS, st.data())
def test_a_record_that_is_cut_anywhere_is_malformed(record: Any, data: st.DataObject) -> None:
    encoded = encoder.encode(record)
    at = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(msgpack.Malformed):
        msgpack.unpack(encoded[:at])


@given(st.binary(max_size=200))
def test_anything_else_is_read_as_the_server_reads_it_or_is_malformed(content: bytes) -> None:
    try:
        expected = msgspec.msgpack.decode(content)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        expected = None
    try:
        found = msgpack.unpack(content)
    except (msgpack.Malformed, RecursionError):
        return
    # What both read is equal; extensions and maps with odd keys are no part of a record.
    if expected is not None:
        assert repr(found) == repr(expected) or found == expected or found != found


def _outcome(content: bytes | bytearray, at: int, end: int) -> str:
    """Decodes and returns the value with its types and where it ends, or the error, as text."""
    try:
        return repr(msgpack.unpack_from(content, at, end))
    except (msgpack.Malformed, RecursionError) as error:
        return repr(error)


@given(_RECORDS.map(encoder.encode) | st.binary(max_size=200), st.data())
def test_the_decoder_in_c_and_that_in_python_are_one(content: bytes, data: st.DataObject) -> None:
    """Both decoders agree on records and on bytes that are none, also with one byte changed or more appended."""
    assert native.unpack_from is not None
    changed = bytearray(content + data.draw(st.binary(max_size=9)))
    if changed and data.draw(st.booleans()):
        changed[data.draw(st.integers(0, min(200, len(changed)) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.sampled_from([len(content), len(changed), len(content) // 2]))
    for memory in (changed, bytes(changed)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "unpack_from", None)
            expected = _outcome(memory, 0, end)
        assert _outcome(memory, 0, end) == expected


@given(_RECORDS)
def test_records_are_decoded_in_c(record: Any) -> None:
    assert native.unpack_from is not None
    encoded = encoder.encode(record)
    assert native.unpack_from(encoded, 0, len(encoded)) == (_plain_lists(_plain(record)), len(encoded))


@given(
    st.integers(1 << 32, (1 << 64) - 1),
    st.binary(max_size=300),
    st.lists(st.binary(max_size=300), max_size=20),
    st.binary(),
)
def test_a_request_is_encoded_in_c_as_in_python(
    request_id: int, prepared: bytes, contents: list[bytes], own: bytes
) -> None:
    assert native.request is not None
    for made in (contents, [*contents, b"x" * 5000, b"y" * 70_000]):
        found = native.request(request_id, prepared, made, own)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "request", None)
            assert wire.request(request_id, prepared, made, own) == found


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
        ({"a": np.zeros(1025, np.float32)}, False),
        ({str(number): np.zeros(1024, np.float32) for number in range(8)}, True),
        ({str(number): np.zeros(1024, np.float32) for number in range(9)}, False),
        ({"a": np.ma.array([1.0])}, False),
        ({"a": [1.0]}, False),
    ],
)
def test_small_inputs_are_seen_in_c_as_in_python(inputs: dict[str, Any], is_seen: bool) -> None:
    found = placement.small_inputs(inputs, 4096, 32 << 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "small_inputs", None)
        assert placement.small_inputs(inputs, 4096, 32 << 10) == found
    assert (found is not None) == is_seen
    if found is not None:
        assert found[1] == [array.tobytes() for array in inputs.values()]
        assert found[0] == tuple(part for name, array in inputs.items() for part in (name, array.dtype, array.shape))


@pytest.mark.parametrize("part", ["C", "Python"])
def test_an_answers_arrays(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the program's own; bytes that are not as many as the shape needs, or lie elsewhere, are left to others."""
    if part == "Python":
        monkeypatch.setattr(native, "arrays", None)
    outputs = (("a", (2, 3), np.dtype(np.int16), 12), ("b", (0,), np.dtype(np.float64), 0))
    answer = Answer()
    assert pending.arrays(answer, outputs, [bytes(range(12)), b""])
    assert (answer["a"].shape, answer["b"].shape) == ((2, 3), (0,))
    assert answer["a"].tobytes() == bytes(range(12))
    answer["a"][:] = 1
    for contents in ([bytes(11), b""], [bytes(13), b""], [bytes(12), ["a", 0, 0, 0]]):
        assert not pending.arrays(Answer(), outputs, contents)


@given(
    _NAMES,
    _NUMBERS,
    st.lists(st.tuples(_NAMES, _NAMES, _SHAPES, st.none() | _LEASES), max_size=3),
    _PARAMETERS,
    _NUMBERS,
)
def test_a_prepared_request_is_what_the_server_means(
    model: str, version: int, inputs: list[Any], parameters: dict[str, Any], number: int
) -> None:
    outputs = [("scores", None), ("labels", (1, 64, 128))]
    encoded = wire.prepared_request(model, version, inputs, outputs, parameters)
    expected = PreparedRequest(
        model,
        version,
        tuple(
            PreparedTensor(name, datatype, shape, place and RegionSlice(f"@{place[0]}", place[1], place[2]))
            for name, datatype, shape, place in inputs
        ),
        (RequestedOutput("scores"), RequestedOutput("labels", RegionSlice("@1", 64, 128))),
        parameters,
    )
    assert encoded == encoder.encode(expected)
    assert wire.prepare(number, encoded) == encoder.encode(Prepare(number, expected))


@given(_NUMBERS, _NAMES)
def test_fields_are_the_same_whether_or_not_others_are_given(deadline_ns: int, parameter_set: str) -> None:
    """Requests that say nothing else are encoded in a shorter way."""
    given = {"deadline_ns": deadline_ns, "parameter_set": parameter_set}
    assert wire.own_fields(**given) == b"\xa0" + wire.own_fields("a", **given)[2:]


@given(
    st.integers(0, (1 << 64) - 1),
    st.lists(st.binary(max_size=5000), max_size=20),
    _NAMES,
    _NUMBERS,
    _NUMBERS | st.text(max_size=30),
    st.booleans(),
)
def test_a_request_is_what_the_server_means(
    request_id: int, contents: list[bytes], client_id: str, deadline_ns: int, sequence_id: Any, start: bool
) -> None:
    own = wire.own_fields(client_id, deadline_ns, 7, 9, sequence_id, start, not start, client_id, client_id[::-1])
    encoded = wire.request(request_id, msgpack.integer(5), contents, own)
    (decoded,) = decoder(ToWorker).decode(msgpack.array_head(1) + encoded)
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
        trace=wire.TIMING,
        replace_key=client_id,
        parameter_set=client_id[::-1],
    )


def test_the_small_records_are_what_the_server_means() -> None:
    for encoded, expected in (
        (wire.wire_version(), WireVersion(wire.WIRE_VERSION)),
        (wire.segment_opened(3, 1 << 20), SegmentOpened(3, 1 << 20)),
        (wire.segment_closed(300), SegmentClosed(300)),
        (wire.segment_refused(1), SegmentRefused(1)),
        (wire.release([(0, 4096, 1 << 40)] * 20), Release(((0, 4096, 1 << 40),) * 20)),
        (wire.taken(1 << 32, 70000), Taken(1 << 32, 70000)),
        (wire.cancel(1 << 33), Cancel(1 << 33)),
        (wire.end_sequence("total", 1 << 62), EndSequence("total", 1 << 62)),
        (wire.end_sequence("total", "camera"), EndSequence("total", "camera")),
    ):
        assert encoded == encoder.encode(expected)


@given(_ANSWERS, st.lists(st.binary(max_size=30), max_size=3), st.none() | _LEASES, st.text(max_size=20))
def test_an_answer_is_read(prepared: PreparedAnswer, spare: list[bytes], lease: Any, message: str) -> None:
    own = len([output for output in prepared.outputs if output.region is None])
    contents = tuple((spare + [b""] * own)[:own])
    record = AnswerRecord(1 << 40, prepared, contents, lease, "NOT_FOUND", message)
    (fields,) = wire.records(encoder.encode([record]), 0, len(encoder.encode([record])))
    read = wire.AnswerRecord(fields, {})
    assert (read.request_id, read.code, read.message) == (1 << 40, "NOT_FOUND", message)
    assert read.contents == list(contents)
    assert read.lease == (None if lease is None else list(lease))
    assert read.byte_size == response_byte_size(contents)
    assert (read.prepared.version, read.prepared.parameters, read.prepared.final) == (
        prepared.version,
        prepared.parameters,
        prepared.final,
    )
    assert [(each.name, each.datatype, each.shape, each.placed) for each in read.prepared.outputs] == [
        (each.name, each.datatype, each.shape, each.region is not None) for each in prepared.outputs
    ]


def test_an_answer_without_its_last_fields_has_their_defaults() -> None:
    fields = msgpack.unpack(msgpack.pack(("c", 1 << 32, 4, [b"x"])))
    known = {
        4: wire.PreparedAnswer(msgpack.unpack(encoder.encode(PreparedAnswer(3, (PreparedTensor("o", "UINT8", (1,)),)))))
    }
    read = wire.AnswerRecord(fields, known)
    assert (read.contents, read.lease, read.code, read.timing) == ([b"x"], None, "", None)
    assert not read.prepared.is_mark


@pytest.mark.parametrize(
    "fields",
    [
        ["c", 1, 4],
        ["c", 1, ["A"], [b"x"]],
        ["c", 1],
        ["c", 1, ["B"], []],
        ["c", 1, ["A", 0, [["x", "o", "UINT8", [1], None]]], [b"x"]],
    ],
)
def test_answers_that_mean_nothing_are_malformed(fields: list[Any]) -> None:
    with pytest.raises(msgpack.Malformed):
        wire.AnswerRecord(fields, {})


def test_a_large_record_is_cut_into_parts_that_the_server_joins() -> None:
    record = wire.request(1, msgpack.integer(1), [bytes([n]) * 60000 for n in range(4)], wire.own_fields())
    parts = wire.datagrams(record)
    assert [part[0] for part in parts] == [2] * (len(parts) - 1) + [3]
    assert max(map(len, parts)) <= wire.MAX_DATAGRAM
    (decoded,) = decoder(ToWorker).decode(b"".join(part[1:] for part in parts))
    assert [content[:1] for content in decoded.contents] == [b"\0", b"\1", b"\2", b"\3"]


def test_the_two_directions_have_the_records_that_the_client_knows() -> None:
    """Fails where a record is added that the client would not know."""
    tags = {kind.__struct_config__.tag for kind in (ToWorker | ToSubmitter).__args__}
    # Only fronts send a trace's ids: "tc".
    assert tags - {"tc"} == {"V", "S+", "S-", "S!", "Q+", "q", "L", "T", "X", "E", "C+", "c"}
