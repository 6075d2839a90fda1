"""A message while it arrives: the same however it is cut, as much memory as it is long, a large one's tensors in their places;
messages behind gzip and deflate.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import itertools
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.config.options import Arenas, Options
from tensord.daemon.front.status import INTERNAL, RESOURCE_EXHAUSTED, UNIMPLEMENTED
from tensord.daemon.grpc.arriving_message import ArrivingMessage, CallRefused, inflated
from tensord.daemon.grpc.request_fields import MAX_RAWS, RefusedRequest, split
from tensord.daemon.submit.model_states import ModelStates
from tensord.daemon.submit.submitter import Submitter
from tensord.shm.errors import InvalidArgument, Unavailable
from tensord.shm.messages import Slice
from tests import fakes
from tests.daemon.grpc.requests import REQUESTS, Infer, fields

MIB = 1 << 20
INLINE = 16
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
SQUEEZE = {"gzip": gzip.compress, "deflate": zlib.compress}


def collected(byte_size: int) -> ArrivingMessage:
    """Returns a message that is collected in ordinary memory and not placed in the arena."""
    return ArrivingMessage(0, byte_size)


@given(st.binary(min_size=1, max_size=300), st.lists(st.integers(0, 300), max_size=10))
def test_any_cut(content: bytes, cuts: list[int]) -> None:
    message = collected(len(content))
    bounds = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    for begin, end in itertools.pairwise(bounds):
        assert message.left == len(content) - begin
        message.feed(memoryview(content)[begin:end])
        assert message.kept_byte_size == end
    assert (message.left, message.is_placed, message.waits_for_room) == (0, False, False)
    assert message.take_content() == content


def test_tiny_pieces_take_no_more_than_they_bring() -> None:
    content = memoryview(bytes(range(256)) * 200)
    tracemalloc.start()
    try:
        message = collected(len(content))
        for at in range(len(content)):
            message.feed(content[at : at + 1])
        assert tracemalloc.get_traced_memory()[1] < 2 * len(content)
    finally:
        tracemalloc.stop()
    assert message.take_content() == content


def test_what_has_not_come_takes_nothing() -> None:
    """A length that is only announced: no bytes of it are counted, and none may be written yet."""
    message = collected(1 << 30)
    assert (message.kept_byte_size, len(message.rest)) == (0, 0)
    message.feed(memoryview(b"abc"))
    assert (message.kept_byte_size, message.left) == (3, (1 << 30) - 3)
    message.drop()
    assert message.kept_byte_size == 0


@given(st.sampled_from(sorted(SQUEEZE)), st.binary(max_size=500), st.booleans())
def test_there_and_back(encoding: str, content: bytes, view: bool) -> None:
    squeezed = SQUEEZE[encoding](content)
    assert inflated(memoryview(squeezed) if view else squeezed, encoding, 500) == content


@given(st.sampled_from(sorted(SQUEEZE)), st.binary(max_size=100))
def test_anything_is_inflated_or_refused(encoding: str, content: bytes) -> None:
    try:
        assert isinstance(inflated(content, encoding, 500), bytes)
    except CallRefused as refused:
        assert refused.code in (INTERNAL, RESOURCE_EXHAUSTED)


@pytest.mark.parametrize(
    ("encoding", "content", "code", "text"),
    [
        (
            "identity",
            b"abc",
            UNIMPLEMENTED,
            "message encoding 'identity' is not supported; identity, deflate and gzip are",
        ),
        ("b" * 99, b"abc", UNIMPLEMENTED, f"message encoding '{'b' * 32}' is not supported"),
        ("gzip", b"abc", INTERNAL, "a message is not valid gzip data"),
        ("gzip", gzip.compress(b"abc", mtime=0)[:-1], INTERNAL, "a message is not valid gzip data"),
        ("gzip", gzip.compress(b"abc", mtime=0) + b"x", INTERNAL, "a message is not valid gzip data"),
        ("deflate", gzip.compress(b"abc", mtime=0), INTERNAL, "a message is not valid deflate data"),
        (
            "gzip",
            gzip.compress(bytes(501), mtime=0),
            RESOURCE_EXHAUSTED,
            "larger than max (501 vs. 500) after decompression",
        ),
        ("gzip", gzip.compress(bytes(10**7), mtime=0), RESOURCE_EXHAUSTED, "larger than max (501 vs. 500) after"),
    ],
)
def test_refused(encoding: str, content: bytes, code: int, text: str) -> None:
    with pytest.raises(CallRefused) as caught:
        inflated(content, encoding, 500)
    assert (caught.value.code, text in caught.value.message) == (code, True)


# ---------------------------------------------------------------------------------------------------- large requests


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def submitter(loop: asyncio.AbstractEventLoop) -> Iterator[Submitter]:
    async def make() -> Submitter:
        arenas = Arenas(byte_size=MIB, max_byte_size=2 * MIB, wait=0.2, inline_byte_size=INLINE, arriving_share=1)
        return fakes.submitter(Options(arenas=arenas), ModelStates())

    submitter = loop.run_until_complete(make())
    yield submitter
    submitter.close()
    gc.collect()


def on_loan(submitter: Submitter) -> int:
    return submitter.statistics()["leases"]


def message(raws: list[bytes], **given_: Any) -> bytes:
    content: bytes = Infer(model_name="m", raw_input_contents=raws, **given_).SerializeToString()
    return content


class Arrival:
    """A message that is arriving."""

    def __init__(self, submitter: Submitter, byte_size: int) -> None:
        self._submitter = submitter
        self.rooms = 0
        self.message = ArrivingMessage(0, byte_size, submitter, None, self._room)

    def _room(self) -> None:
        self.rooms += 1

    def feed(self, content: bytes, cuts: list[int], direct: bool = False) -> None:
        """Feeds all of ``content`` in pieces. ``direct``: pieces are written in place where the message offers memory."""
        bounds = [0, *sorted(cut % (len(content) + 1) for cut in cuts), len(content)]
        for begin, end in itertools.pairwise(bounds):
            piece = memoryview(content)[begin:end]
            while direct and len(piece) and len(rest := self.message.rest):
                size = min(len(rest), len(piece))
                rest[:size] = piece[:size]
                self.message.rest = rest[size:]
                self.message.left -= size
                piece = piece[size:]
            self.message.feed(piece)

    def fields(self) -> tuple[bytes, bytes, list[bytes]]:
        """Returns the head, the id and the raw tensors, wherever they were put."""
        assert self.message.left == 0
        if not self.message.is_placed:
            content = bytes(self.message.take_content())
            head, client_id, places = split(content)
            return head, client_id, [content[begin:end] for begin, end in places]
        head, client_id, raws, lease = self.message.take()
        found, taken, left = [], 0, INLINE
        for raw in raws:
            if isinstance(raw, Slice):
                begin = raw.offset - lease.place.offset
                assert raw.segment == lease.place.segment
                assert raw.byte_size > left
                assert taken <= begin <= begin + raw.byte_size <= lease.place.byte_size
                taken = begin + raw.byte_size
                raw = bytes(lease.view[begin:taken])
            else:
                assert len(raw) <= left
                left -= len(raw)
            found.append(raw)
        self._submitter.give_back(lease)
        return head, client_id, found


def whole(content: bytes) -> tuple[bytes, bytes, list[bytes]]:
    head, client_id, places = split(content)
    return head, client_id, [content[begin:end] for begin, end in places]


@given(REQUESTS, st.data(), st.lists(st.integers(0, 2000), max_size=12), st.booleans())
def test_it_says_what_the_whole_message_says(
    submitter: Submitter, request_: Any, data: st.DataObject, cuts: list[int], direct: bool
) -> None:
    content = b"".join(data.draw(st.permutations(fields(request_) + data.draw(st.lists(UNKNOWN, max_size=2)))))
    is_read_alike(submitter, content, cuts, direct)


@given(
    st.one_of(
        st.binary(min_size=1, max_size=60), st.tuples(REQUESTS, st.integers(0, 300), st.binary(min_size=1, max_size=4))
    ),
    st.lists(st.integers(0, 2000), max_size=6),
    st.booleans(),
)
def test_what_is_no_request_is_refused_alike(submitter: Submitter, given_: Any, cuts: list[int], direct: bool) -> None:
    if isinstance(given_, bytes):
        content = given_
    else:
        request_, at, piece = given_
        content = request_.SerializeToString()
        content = content[:at] + piece + content[at + len(piece) :]
    is_read_alike(submitter, content, cuts, direct)


def test_more_raw_tensors_than_any_model_takes(submitter: Submitter) -> None:
    content = b"\x3a\x01x" * MAX_RAWS
    is_read_alike(submitter, content, [7], False)
    is_read_alike(submitter, content + b"\x3a\x01x", [7], False)


def is_read_alike(submitter: Submitter, content: bytes, cuts: list[int], direct: bool) -> None:
    """Asserts that a message in pieces says what it says as a whole, or is refused with the same words."""
    arrival = Arrival(submitter, len(content))
    arrival.feed(content, cuts, direct)
    try:
        expected = whole(content)
    except RefusedRequest as refused:
        with pytest.raises(RefusedRequest) as caught:
            arrival.fields()
        assert caught.value.error.message == refused.error.message
    else:
        assert arrival.fields() == expected
    arrival.message.drop()
    assert on_loan(submitter) == 0


def test_tensors_are_aligned(submitter: Submitter) -> None:
    """All of them, where they are large; the lease of a single one is as long as it."""
    sizes = [70_001, 66_003, 100_000]
    content = message([bytes([n]) * size for n, size in enumerate(sizes)], id="a")
    arrival = Arrival(submitter, len(content))
    arrival.feed(content, [5, 80_000])
    raws, lease = arrival.message.take()[2:]
    assert [raw.offset % 64 for raw in raws if isinstance(raw, Slice)] == [0, 0, 0]
    submitter.give_back(lease)
    content = message([bytes(70_001)])
    arrival = Arrival(submitter, len(content))
    arrival.feed(content, [])
    lease = arrival.message.take()[3]
    assert lease.place.byte_size == 70_001
    submitter.give_back(lease)


def test_most_of_it_takes_no_ordinary_memory(submitter: Submitter) -> None:
    content = message([bytes(200_000)], id="x" * 100)
    arrival = Arrival(submitter, len(content))
    arrival.message.feed(memoryview(content)[:50])
    assert arrival.message.kept_byte_size >= 50
    arrival.message.feed(memoryview(content)[50:150_000])
    assert arrival.message.is_placed
    # The id, and the model's name.
    assert arrival.message.kept_byte_size == 103
    arrival.message.drop()


def test_a_head_that_holds_data_is_collected(submitter: Submitter) -> None:
    contents = [{"name": "x", "datatype": "BYTES", "contents": {"bytes_contents": [bytes(100_000)]}}]
    content = Infer(model_name="m", inputs=contents, raw_input_contents=[bytes(70_000)]).SerializeToString()
    arrival = Arrival(submitter, len(content))
    arrival.feed(content, list(range(0, len(content), 10_000)))
    assert arrival.message.is_declined
    assert (bytes(arrival.message.take_content()), on_loan(submitter)) == (content, 0)


# ---------------------------------------------------------------------------------------------------------------- room


@pytest.mark.parametrize("came", [60_000, 100_000])
def test_no_room_for_now(submitter: Submitter, came: int) -> None:
    """Bytes that come meanwhile are kept, and move to the message's place once there is one."""
    full = submitter.loan(MIB)
    assert full is not None
    content = message([bytes(range(256)) * 4096], id="late")
    arrival = Arrival(submitter, len(content))
    arrival.feed(content[:came], [50, 3000])
    assert (arrival.message.waits_for_room, arrival.rooms) == (True, 0)
    assert arrival.message.kept_byte_size > came
    submitter.give_back(full)
    assert (arrival.message.waits_for_room, arrival.rooms, arrival.message.is_placed) == (False, 1, True)
    arrival.feed(content[came:], [])
    assert arrival.fields() == whole(content)


def test_no_room_in_time(submitter: Submitter, loop: asyncio.AbstractEventLoop) -> None:
    full = submitter.loan(MIB)
    assert full is not None
    content = message([bytes(MIB)], id="late")
    arrival = Arrival(submitter, len(content))
    arrival.feed(content[:1000], [])

    async def refused() -> None:
        while not arrival.rooms:
            await asyncio.sleep(0.01)

    loop.run_until_complete(refused())
    assert arrival.message.kept_byte_size < 100
    arrival.feed(content[1000:], [])
    with pytest.raises(RefusedRequest, match="no room for 1048576 bytes in the request arena") as caught:
        arrival.message.take()
    assert (type(caught.value.error), caught.value.client_id) == (Unavailable, "late")
    submitter.give_back(full)
    assert on_loan(submitter) == 0


def test_it_could_never_fit(submitter: Submitter) -> None:
    content = message([bytes(3 * MIB)])
    arrival = Arrival(submitter, len(content))
    arrival.feed(content, [100])
    with pytest.raises(RefusedRequest, match="3145728 bytes cannot fit") as caught:
        arrival.message.take()
    assert isinstance(caught.value.error, InvalidArgument)


@pytest.mark.parametrize("waiting", [False, True])
def test_nobody_wants_it_any_more(submitter: Submitter, waiting: bool) -> None:
    full = submitter.loan(MIB) if waiting else None
    content = message([bytes(MIB)])
    arrival = Arrival(submitter, len(content))
    arrival.feed(content[:1000], [])
    assert arrival.message.waits_for_room is waiting
    arrival.message.drop()
    arrival.message.drop()
    if full is not None:
        submitter.give_back(full)
    assert (on_loan(submitter), arrival.rooms) == (0, 0)
