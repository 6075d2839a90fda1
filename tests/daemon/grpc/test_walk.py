"""Walks over messages find what the exact reader finds."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.grpc import walk as walks
from tensord.daemon.grpc.request_fields import RefusedRequest, split
from tensord.shm.common.scheduling import PARAMETERS
from tests.daemon.grpc.requests import REQUESTS, Infer, fields

_walk = pytest.importorskip("tensord.daemon.grpc._walk", reason="no compiler was there")
#: The limits in ``_walk.c``.
MAX_REST, MAX_SCHEDULING, MAX_RAWS = 2048, 512, 256
#: Tags, lengths in more bytes than they take, fields that no request has.
ODD = st.sampled_from(
    [
        b"\x3a",
        b"\x1a\x80\x00",
        b"\x3a\x80\x80\x80\x80\x00",
        b"\x3a\x80\x80\x80\x80\x80\x00",
        b"\x48\x96\x01",
        b"\xba\x00\x01x",
        b"\x3a\xff\xff\xff\xff\x7f",
        b"\x9a\x00\x01x",
        b"\x1a\x02id",
        b"\x3b",
    ]
)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Draws messages with their fields in any order, some of them with changed bytes."""
    pieces = draw(st.permutations(fields(draw(REQUESTS)) + draw(st.lists(ODD, max_size=2))))
    message = b"".join(pieces)
    at = draw(st.integers(0, len(message)))
    return message[:at] + draw(st.binary(max_size=3)) + message[at + draw(st.integers(0, 3)) :]


def found_alike(message: bytes) -> None:
    """Asserts that the walk finds the same as the exact reader, and accepts no message that that reader refuses."""
    found = _walk.walk(message, 0, len(message), 100)
    try:
        head, client_id, places = split(message)
    except RefusedRequest:
        assert found is None
        return
    if found is None:
        return
    assert found[1] == client_id
    # Parameters are looked up by their names, wherever they stand among the others.
    assert sorted(found[0] + found[2]) == sorted(head)
    assert (found[0] + found[2] == head) == (not found[2] or head.endswith(found[2]))
    assert [bytes(raw) for raw in found[3]] == [message[begin:end] for begin, end in places]
    left, lent = 100, 0
    for begin, end in places:
        if end - begin <= left:
            left -= end - begin
        else:
            lent += -(-(end - begin) // 64) * 64
    assert found[4] == lent


@given(messages())
def test_what_is_found_is_what_the_exact_reader_finds(message: bytes) -> None:
    found_alike(message)


@given(REQUESTS)
def test_whatever_protobuf_writes_is_walked_over(request_: Any) -> None:
    """The walk accepts every message that protobuf writes, and reads it as it was written."""
    message = request_.SerializeToString()
    found = _walk.walk(message, 0, len(message), 4096)
    assert found is not None or len(message) > MAX_REST
    if found is None:
        return
    assert (found[1].decode(), list(found[3])) == (request_.id, list(request_.raw_input_contents))
    request_.ClearField("id")
    request_.ClearField("raw_input_contents")
    assert Infer.FromString(found[0] + found[2]) == request_ or request_ != request_  # a NaN equals nothing
    assert PARAMETERS.keys().isdisjoint(Infer.FromString(found[0]).parameters)
    assert PARAMETERS.keys() >= set(Infer.FromString(found[2]).parameters)


@given(REQUESTS, st.integers(0, 600))
def test_a_beginning(request_: Any, end: int) -> None:
    """The beginning of a message up to its first raw tensor is enough, wherever it is cut behind that."""
    message = request_.SerializeToString()
    begun = _walk.walk_beginning(message, 0, min(end, len(message)))
    raws = list(request_.raw_input_contents)
    before = len(message) - sum(len(each) for each in fields(Infer(raw_input_contents=raws)))
    if not raws or end < before + (2 if len(raws[0]) < 128 else 3):
        assert begun is None
        return
    assert begun is not None
    rest, client_id, at, size = begun
    assert (client_id.decode(), size, message[at : at + size]) == (request_.id, len(raws[0]), raws[0])
    assert at + size <= len(message)
    whole = _walk.walk(message, 0, len(message), 4096)
    assert whole is not None
    # What stands before the tensors is not parted there: the rest of it may still come.
    parted = _walk.walk(rest, 0, len(rest), 0)
    assert parted is not None
    assert (parted[0], parted[2]) == (whole[0], whole[2])


def test_limits() -> None:
    walk = _walk.walk
    for raws, found in ((MAX_RAWS, True), (MAX_RAWS + 1, False)):
        message = b"\x3a\x00" * raws
        assert (walk(message, 0, len(message), 4096) is not None) == found
    for rest, found in ((MAX_REST, True), (MAX_REST + 1, False)):
        message = b"\x0a" + bytes(((rest - 3) & 127 | 128, rest - 3 >> 7)) + bytes(rest - 3)
        assert (walk(message, 0, len(message), 4096) is not None) == found
    for size, found in ((MAX_SCHEDULING, True), (MAX_SCHEDULING + 1, False)):
        entry = b"\x0a\x08priority" + bytes(size - 13)
        message = b"\x22" + bytes((len(entry) & 127 | 128, len(entry) >> 7)) + entry
        assert (walk(message, 0, len(message), 4096) is not None) == found


def test_what_is_no_walk_at_all() -> None:
    for arguments in ((b"abc", -1, 2, 0), (b"abc", 2, 1, 0), (b"abc", 0, 4, 0)):
        with pytest.raises(ValueError, match="is not within 3 bytes"):
            _walk.walk(*arguments)
    for arguments in ((b"abc",), (b"abc", 0, 3), (1, 0, 0, 0), (b"abc", "0", 3, 0)):  # type: ignore[assignment]
        with pytest.raises(TypeError):
            _walk.walk(*arguments)


def test_nothing_is_left_behind() -> None:
    """No memory leaks from a message that is refused midway."""
    import gc
    import sys

    message = Infer(
        model_name="m", id="an id of some length", raw_input_contents=[bytes(500), bytes(9)]
    ).SerializeToString()
    chance = random.Random(7)
    before = 0
    for turn in range(2):
        for _ in range(5000):
            changed = bytearray(message)
            changed[chance.randrange(20)] = chance.randrange(256)
            _walk.walk(bytes(changed), 0, len(changed), 100)
            _walk.walk_beginning(changed, 0, 40)
        gc.collect()
        if turn:
            assert sys.getallocatedblocks() < before + 500
        before = sys.getallocatedblocks()


def test_the_fastest_one_is_used() -> None:
    assert walks.walk is _walk.walk
    assert walks.walk_beginning is _walk.walk_beginning
