"""What is remembered of an answer gives what encoding it again would give, whatever answers come."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.http.decoded_request import DecodedRequest
from daemon.http.known_answer import KnownAnswer
from daemon.http.response_codec import encode, response_head
from shm.forms import Forms, answer_template, own_contents
from shm.messages import Completion, FormCompletion, Inline, RegionSlice, Slice, Tensor

#: What a worker's arena holds.
ARENA = memoryview(bytes(range(256)) * 4)
SHAPES = st.sampled_from([(4,), (2, 2), (1,), (0,)])
NAMES, DATATYPES = st.sampled_from(["y", "z", "other"]), st.sampled_from(["UINT8", "INT8"])


def places(byte_size: int) -> st.SearchStrategy[Inline | Slice]:
    return st.binary(min_size=byte_size, max_size=byte_size).map(Inline) | st.builds(
        Slice, st.just(0), st.integers(0, len(ARENA) - byte_size), st.just(byte_size)
    )


TENSORS = st.builds(Tensor, NAMES, DATATYPES, SHAPES, st.just(RegionSlice("region", 0, 4))) | SHAPES.flatmap(
    lambda shape: st.builds(Tensor, NAMES, DATATYPES, st.just(shape), places(math.prod(shape)))
)
COMPLETIONS = st.builds(
    Completion,
    st.just(1),
    version=st.sampled_from([1, 2]),
    outputs=st.lists(TENSORS, max_size=2).map(tuple),
    parameters=st.sampled_from([{}, {}, {}, {"key": "value"}]),
)


def view(place: Slice) -> memoryview:
    return ARENA[place.offset : place.offset + place.byte_size]


def known(client_id: str = "") -> tuple[KnownAnswer, DecodedRequest]:
    """Of a request that wants two outputs as bytes, and any other in the JSON."""
    decoded = DecodedRequest(client_id, [], (), {"y": True, "z": True}, False, {})
    return KnownAnswer("echo", decoded), decoded


@given(st.lists(st.tuples(COMPLETIONS, st.integers(1, 3)), max_size=8), st.sampled_from(["", "id-7"]))
def test_every_answer_is_what_encoding_it_gives(completions: list[tuple[Completion, int]], client_id: str) -> None:
    """Whatever answers follow each other, some of them several times, and others of their form."""
    (answer, decoded), forms = known(client_id), Forms[Completion]()
    for completion, times in completions:
        form = forms.form(answer_template(completion))
        contents = own_contents(completion.outputs)
        leased = any(type(content) is Slice for content in contents)
        own = FormCompletion(1, form.number, contents, (0, 0, 1) if leased else None)
        for _ in range(times):
            if leased:
                pieces = answer.pieces(form.template, own, view)
                whole = None if pieces is None else b"".join(pieces)
            else:
                whole = answer.whole(form.template, own)
            if not all(
                tensor.name in decoded.binary or type(tensor.place) is RegionSlice for tensor in completion.outputs
            ):
                assert whole is None
                continue
            said, parts = encode(completion, "echo", client_id, decoded.binary, decoded.all_binary, view)
            assert whole == b"".join((response_head(len(said), parts), said, *parts))


def test_tensors_in_the_arena_are_not_copied() -> None:
    answer, _ = known()
    template = answer_template(Completion(1, version=1, outputs=(Tensor("y", "UINT8", (4,), Inline(b"")),)))
    for offset in (0, 64, 8):
        pieces = answer.pieces(template, FormCompletion(1, 0, (Slice(0, offset, 4),), (0, 0, 1)), view)
        assert pieces is not None
        assert isinstance(pieces[1], memoryview)
        assert pieces[1] == ARENA[offset : offset + 4]


@pytest.mark.parametrize("sizes", [(3, 2), (5, 1), (2, 4), (), (6,)])
def test_an_answer_of_other_sizes_is_not_taken_for_the_last_one(sizes: tuple[int, ...]) -> None:
    """Strings have any: whatever it is, it is written anew, or refused there. Its head says the size of each part."""
    answer, _ = known()
    outputs = tuple(Tensor(name, "BYTES", (1,), Inline(b"")) for name in ("y", "z"))
    template = answer_template(Completion(1, version=1, outputs=outputs))
    inline, leased = tuple(map(bytes, sizes)), tuple(Slice(0, 0, size) for size in sizes)
    assert answer.whole(template, FormCompletion(1, 0, (b"1234", b"56"))) is not None
    assert answer.whole(template, FormCompletion(1, 0, inline)) is None
    assert answer.pieces(template, FormCompletion(1, 0, leased, (0, 0, 1)), view) is None
    assert answer.whole(template, FormCompletion(1, 0, (b"6543", b"21"))) is not None
    assert answer.pieces(template, FormCompletion(1, 0, (Slice(0, 7, 4), b"21"), (0, 0, 1)), view) is not None


def test_a_long_head_is_not_remembered() -> None:
    answer, _ = known("i" * 2048)
    template = answer_template(Completion(1, version=1, outputs=(Tensor("y", "UINT8", (1,), Inline(b"")),)))
    assert answer.whole(template, FormCompletion(1, 0, (b"1",))) is None
    assert answer.pieces(template, FormCompletion(1, 0, (Slice(0, 0, 1),), (0, 0, 1)), view) is None
