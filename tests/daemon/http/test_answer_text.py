"""Tests that remembered texts of answers are what encoding each answer anew would give, for any answers and ids."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.http.decoded_request import DecodedRequest
from tensord.daemon.http.message_head import InferHead
from tensord.daemon.http.prepared import PreparedKind
from tensord.daemon.http.response_codec import encode, response_head
from tensord.shm.messages import AnswerRecord, PreparedAnswer, RegionSlice, Slice
from tensord.shm.prepared import Numbers
from tests.records import Tensor, WholeAnswer, own_contents

#: What a worker's arena holds.
ARENA = memoryview(bytes(range(256)) * 4)
SHAPES = st.sampled_from([(4,), (2, 2), (1,), (0,)])
NAMES, DATATYPES = st.sampled_from(["y", "z", "other"]), st.sampled_from(["UINT8", "INT8"])


def places(byte_size: int) -> st.SearchStrategy[bytes | Slice]:
    return st.binary(min_size=byte_size, max_size=byte_size) | st.builds(
        Slice, st.just(0), st.integers(0, len(ARENA) - byte_size), st.just(byte_size)
    )


TENSORS = st.builds(Tensor, NAMES, DATATYPES, SHAPES, st.just(RegionSlice("region", 0, 4))) | SHAPES.flatmap(
    lambda shape: st.builds(Tensor, NAMES, DATATYPES, st.just(shape), places(math.prod(shape)))
)
COMPLETIONS = st.builds(
    WholeAnswer,
    st.just(1),
    version=st.sampled_from([1, 2]),
    outputs=st.lists(TENSORS, max_size=2).map(tuple),
    parameters=st.sampled_from([{}, {}, {}, {"key": "value"}]),
)


def view(place: Slice) -> memoryview:
    return ARENA[place.offset : place.offset + place.byte_size]


def known() -> PreparedKind:
    """Returns the prepared part of a request that wants two outputs as bytes, and all others in the JSON."""
    decoded = DecodedRequest("", [], (), {"y": True, "z": True}, False, {})
    return PreparedKind(InferHead("echo", 0, 10, None, True), decoded)


IDS = st.sampled_from(["", "id-7", "7", '"quoted" \u00e4\n', "i" * 3000]) | st.text(max_size=5)


@given(st.lists(st.tuples(COMPLETIONS, IDS, IDS), max_size=8))
def test_every_answer_is_what_encoding_it_gives(completions: list[tuple[WholeAnswer, str, str]]) -> None:
    """Each answer is sent twice, among others of its kind and in any order, and always equals its plain encoding."""
    form, numbers = known(), Numbers[PreparedAnswer]()
    asked = form.asked
    for completion, *ids in completions:
        prepared = numbers.number(completion.prepared).prepared
        contents = own_contents(completion.outputs)
        leased = any(type(content) is Slice for content in contents)
        own = AnswerRecord(1, 0, contents, (0, 0, 1) if leased else None)
        for client_id in ids:
            answer = form.answer(prepared, own, view)
            if leased:
                pieces = answer.pieces(client_id, own, view)
                whole = None if pieces is None else b"".join(pieces)
            else:
                whole = answer.whole(client_id, own)
            if not all(
                tensor.name in asked.binary or type(tensor.place) is RegionSlice for tensor in completion.outputs
            ):
                assert whole is None
                continue
            said, parts = encode(completion.prepared, contents, "echo", client_id, asked, view)
            assert whole == b"".join((response_head(len(said), sum(map(len, parts))), said, *parts))


def test_tensors_in_the_arena_are_not_copied() -> None:
    form = known()
    prepared = WholeAnswer(1, version=1, outputs=(Tensor("y", "UINT8", (4,), b""),)).prepared
    for offset in (0, 64, 8):
        own = AnswerRecord(1, 0, (Slice(0, offset, 4),), (0, 0, 1))
        pieces = form.answer(prepared, own, view).pieces("", own, view)
        assert pieces is not None
        assert isinstance(pieces[1], memoryview)
        assert pieces[1] == ARENA[offset : offset + 4]


@pytest.mark.parametrize("sizes", [(3, 2), (5, 1), (2, 4), (), (6,)])
def test_an_answer_of_other_sizes_is_written_by_itself(sizes: tuple[int, ...]) -> None:
    """Strings have any: whatever it is, it is written anew, or refused there. Its head says the size of each part."""
    outputs = tuple(Tensor(name, "BYTES", (1,), b"") for name in ("y", "z"))
    prepared = WholeAnswer(1, version=1, outputs=outputs).prepared
    answer = known().answer(prepared, AnswerRecord(1, 0, (b"1234", b"56")), view)
    inline, leased = tuple(map(bytes, sizes)), tuple(Slice(0, 0, size) for size in sizes)
    assert answer.whole("", AnswerRecord(1, 0, (b"1234", b"56"))) is not None
    assert answer.whole("", AnswerRecord(1, 0, inline)) is None
    assert answer.pieces("", AnswerRecord(1, 0, leased, (0, 0, 1)), view) is None
    assert answer.whole("", AnswerRecord(1, 0, (b"6543", b"21"))) is not None
    assert answer.pieces("", AnswerRecord(1, 0, (Slice(0, 7, 4), b"21"), (0, 0, 1)), view) is not None


def test_answers_of_many_kinds_take_no_more_room() -> None:
    form, numbers = known(), Numbers[PreparedAnswer]()
    own = AnswerRecord(1, 0, (b"1",))
    for version in range(100):
        prepared = WholeAnswer(1, version=version, outputs=(Tensor("y", "UINT8", (1,), b""),)).prepared
        for _ in range(2):
            whole = form.answer(numbers.number(prepared).prepared, own, view).whole("", own)
            assert whole is not None
            assert b'"model_version":"%d"' % version in whole
    assert len(form._answers) <= 16


def test_a_long_text_is_not_remembered() -> None:
    prepared = WholeAnswer(1, version=1, outputs=(Tensor("y" * 2048, "UINT8", (1,), b""),)).prepared
    asked = DecodedRequest("", [], (), {}, True, {})
    own = AnswerRecord(1, 0, (b"1",))
    answer = PreparedKind(InferHead("echo", 0, 10, None, True), asked).answer(prepared, own, view)
    assert answer.whole("", own) is None
    assert answer.pieces("", own, view) is None
