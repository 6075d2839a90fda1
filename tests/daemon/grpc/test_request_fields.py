"""Fields found in whole messages and in pieces of them: as protobuf reads them, and the same however they are cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.grpc.request_fields import MAX_RAWS, ArrivingFields, RefusedRequest, split
from tests.daemon.grpc.requests import REQUESTS, Infer, fields

CUTS = st.lists(st.integers(0, 1000), max_size=20)
#: A field of each wire type that no request has.
UNKNOWN = st.sampled_from(
    [
        b"\x48\x96\x01",
        b"\x49" + bytes(8),
        b"\x4a\x03abc",
        b"\x4d" + bytes(4),
        b"\xba\x06\x02hi",
        b"\xba\x00\x01x",
        b"\x4b",
    ]
)


def arrived(message: bytes, cuts: list[int]) -> tuple[bytes, bytes, list[bytes]]:
    """Feeds a message in pieces, and returns its head, id and raw tensors as their owner would get them."""
    arriving = ArrivingFields(len(message))
    raws: list[bytes] = []
    raw_left = 0
    bounds = [0, *sorted(cut % (len(message) + 1) for cut in cuts), len(message)]
    for begin, end in itertools.pairwise(bounds):
        piece, at = memoryview(message)[begin:end], 0
        while at < len(piece):
            if raw_left:
                size = min(raw_left, len(piece) - at)
                raws[-1] += bytes(piece[at : at + size])
                raw_left -= size
                at += size
                continue
            at, begins = arriving.take(piece, at)
            if begins:
                raws.append(b"")
                raw_left = arriving.raw_size
    assert (arriving.unread, arriving.raw_count) == (0, len(raws))
    return bytes(arriving.head), bytes(arriving.client_id), raws


def whole(message: bytes) -> tuple[bytes, bytes, list[bytes]]:
    head, client_id, raws = split(message)
    return head, client_id, [message[begin:end] for begin, end in raws]


@given(REQUESTS)
def test_a_message_is_split_as_protobuf_reads_it(request_: Any) -> None:
    head, client_id, raws = whole(request_.SerializeToString())
    assert client_id.decode() == request_.id
    assert raws == list(request_.raw_input_contents)
    request_.ClearField("id")
    request_.ClearField("raw_input_contents")
    assert Infer.FromString(head) == request_ or request_ != request_  # a NaN equals nothing


@given(REQUESTS, st.data(), CUTS)
def test_any_cut_and_any_order_of_fields(request_: Any, data: st.DataObject, cuts: list[int]) -> None:
    pieces = data.draw(st.permutations(fields(request_) + data.draw(st.lists(UNKNOWN, max_size=2))))
    message = b"".join(pieces)
    try:
        expected = whole(message)
    except RefusedRequest as refused:
        with pytest.raises(RefusedRequest) as caught:
            arrived(message, cuts)
        assert caught.value.error.message == refused.error.message
    else:
        assert arrived(message, cuts) == expected


@given(st.one_of(st.binary(max_size=60), st.tuples(REQUESTS, st.integers(0, 300), st.binary(max_size=4))), CUTS)
def test_any_bytes_are_read_alike(given_: Any, cuts: list[int]) -> None:
    if isinstance(given_, bytes):
        message = given_
    else:
        request_, at, piece = given_
        content = request_.SerializeToString()
        message = content[:at] + piece + content[at + len(piece) :]
    try:
        expected = whole(message)
    except RefusedRequest as refused:
        with pytest.raises(RefusedRequest) as caught:
            arrived(message, cuts)
        assert caught.value.error.message == refused.error.message
    else:
        assert arrived(message, cuts) == expected


def test_more_raw_tensors_than_any_model_takes() -> None:
    message = b"\x3a\x00" * MAX_RAWS
    assert len(whole(message)[2]) == len(arrived(message, [7])[2]) == MAX_RAWS
    for read in (whole, lambda message: arrived(message, [7])):
        with pytest.raises(RefusedRequest, match="more than 1024 raw_input_contents are given"):
            read(message + b"\x3a\x00")
