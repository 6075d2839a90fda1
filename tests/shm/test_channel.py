"""Channels: order, batching, descriptors, large records, garbage, a peer that stops reading or dies."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.shm.channel import MAX_DATAGRAM, Channel, ChannelClosed, DescriptorsLost, pair
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import Cancel, Release, SegmentOpened, Slice, ToSubmitter, ToWorker
from tensord.shm.record import decoder
from tests.open_files import no_descriptors_left
from tests.records import Tensor, WholeAnswer, WholeRequest

Ends = tuple[Channel, Channel]


def channels() -> Ends:
    ours, theirs = pair()
    return Channel(ours, decoder(ToSubmitter)), Channel(theirs, decoder(ToWorker))


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Yields both ends of a channel."""
    submitter, worker = channels()
    yield submitter, worker
    submitter.close()
    worker.close()


def drain(channel: Channel) -> list[Any]:
    found: list[Any] = []
    while (received := channel.receive()) is not None:
        records, fds = received
        assert not fds
        found += records
    return found


numbers = st.integers(0, 2**63 - 1)
tensors = st.builds(
    Tensor,
    st.text(max_size=8),
    st.sampled_from(["FP32", "BYTES"]),
    st.lists(numbers, max_size=4).map(tuple),
    st.one_of(st.builds(Slice, numbers, numbers, numbers), st.binary(max_size=200)),
)
wholes = st.builds(WholeRequest, numbers, st.text(max_size=20), numbers, st.lists(tensors, max_size=3).map(tuple))
requests = wholes.map(lambda whole: whole.record)
records = st.one_of(requests, st.builds(Cancel, numbers), st.just(Release(((0, 4096, 7),))))


@settings(deadline=None)
@given(st.lists(records, max_size=30))
def test_records_arrive_in_order_and_equal(sent: list[Any]) -> None:
    submitter, worker = channels()
    for record in sent:
        submitter.put(record)
    assert submitter.flush()
    assert drain(worker) == sent
    submitter.close()
    worker.close()


def test_what_is_queued_together_travels_together(ends: Ends) -> None:
    submitter, worker = ends
    for i in range(500):
        submitter.put(Cancel(i))
    submitter.flush()
    received = worker.receive()
    assert received is not None
    assert len(received[0]) == 500
    assert worker.receive() is None


@pytest.mark.parametrize("count", [2, 20_000])
def test_what_is_put_apart_shares_no_datagram(ends: Ends, count: int) -> None:
    """However many it is; what is larger than a datagram comes all the same, and nothing changes its place."""
    submitter, worker = ends
    apart = [Cancel(1 << 40)] * count
    submitter.put(Cancel(1))
    submitter.put_apart(*apart)
    submitter.put(Cancel(2))
    submitter.put(Cancel(3))
    assert submitter.flush()
    received: list[list[Any]] = []
    while (datagram := worker.receive()) is not None:
        received.append(datagram[0])
    assert list(itertools.chain(*received)) == [Cancel(1), *apart, Cancel(2), Cancel(3)]
    if count == 2:
        assert list(map(len, received)) == [1, 2, 2]


@pytest.mark.parametrize("size", [MAX_DATAGRAM - 200, MAX_DATAGRAM, 3 * MAX_DATAGRAM, 5 << 20])
def test_records_of_any_size(ends: Ends, size: int) -> None:
    submitter, worker = ends
    before = len(os.listdir("/proc/self/fd"))
    large = WholeRequest(1, "m", 0, (Tensor("x", "UINT8", (size,), bytes(size)),)).record
    for record in (Cancel(1), large, Cancel(2)):
        submitter.put(record)
    found: list[Any] = []
    while not submitter.flush():
        found += drain(worker)
    assert found + drain(worker) == [Cancel(1), large, Cancel(2)]
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_peer_that_does_not_read_costs_nobody_a_record(ends: Ends) -> None:
    submitter, worker = ends
    sent = [WholeRequest(i, "m", 0, (Tensor("x", "UINT8", (5000,), bytes(5000)),)).record for i in range(400)]
    found: list[Any] = []
    for record in sent:
        submitter.put(record)
    while not submitter.flush():
        assert submitter.waiting
        received = worker.receive()
        assert received is not None
        found += received[0]
    assert found + drain(worker) == sent


def test_descriptors_travel_with_their_record_and_nothing_leaks() -> None:
    before = set(os.listdir("/proc/self/fd"))
    submitter, worker = channels()
    read, write = os.pipe()
    submitter.put(Cancel(1))
    submitter.put(SegmentOpened(0, 4096), write)
    os.close(write)
    submitter.put(Cancel(2))
    submitter.flush()
    assert worker.receive() == ([Cancel(1)], [])
    received = worker.receive()
    assert received is not None
    assert received[0] == [SegmentOpened(0, 4096)]
    os.write(received[1][0], b"through")
    assert os.read(read, 7) == b"through"
    assert worker.receive() == ([Cancel(2)], [])
    for fd in (read, *received[1]):
        os.close(fd)
    submitter.close()
    worker.close()
    assert set(os.listdir("/proc/self/fd")) <= before


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_garbage_is_refused_not_believed(garbage: bytes) -> None:
    ours, theirs = pair()
    worker = Channel(theirs, decoder(ToWorker))
    ours.send(garbage or b"\x00")
    try:
        received = worker.receive()
    except InvalidArgument as error:
        assert "malformed" in error.message
    else:
        assert received is not None
        assert all(isinstance(record, ToWorker) for record in received[0])
    ours.close()
    worker.close()


def test_a_record_of_the_other_direction_is_refused(ends: Ends) -> None:
    submitter, worker = ends
    submitter.put(WholeAnswer(1).record)
    submitter.flush()
    with pytest.raises(InvalidArgument, match="malformed record"):
        worker.receive()


def test_descriptors_of_garbage_are_closed() -> None:
    ours, theirs = pair()
    worker = Channel(theirs, decoder(ToWorker))
    before = set(os.listdir("/proc/self/fd"))
    fds = [os.memfd_create("x") for _ in range(4)]
    socket.send_fds(ours, [b"\x01nonsense"], fds)
    socket.send_fds(ours, [b"\x02part"], fds[:1])
    for fd in fds:
        os.close(fd)
    for _ in range(2):
        with pytest.raises(InvalidArgument):
            worker.receive()
    assert set(os.listdir("/proc/self/fd")) <= before
    ours.close()
    worker.close()


def test_descriptors_that_cannot_be_taken_are_told_and_the_next_ones_come(ends: Ends) -> None:
    submitter, worker = ends
    submitter.put(Cancel(1))
    for segment in range(2):
        submitter.put(SegmentOpened(segment, 4096), 0)
    submitter.flush()
    with no_descriptors_left():
        assert worker.receive() == ([Cancel(1)], [])
        with pytest.raises(DescriptorsLost) as lost:
            worker.receive()
    assert lost.value.records == [SegmentOpened(0, 4096)]
    received = worker.receive()
    assert received is not None
    assert received[0] == [SegmentOpened(1, 4096)]
    os.close(received[1][0])


def test_without_a_descriptor_nothing_is_queued_and_large_records_travel(ends: Ends) -> None:
    submitter, worker = ends
    large = WholeRequest(1, "m", 0, (Tensor("x", "UINT8", (1 << 17,), bytes(1 << 17)),)).record
    with no_descriptors_left():
        with pytest.raises(OSError, match="Too many open files"):
            submitter.put(SegmentOpened(0, 4096), 0)
        submitter.put(large)
        found: list[Any] = []
        while not submitter.flush():
            found += drain(worker)
        assert found + drain(worker) == [large]


def test_records_without_end_are_refused() -> None:
    ours, theirs = pair()
    worker = Channel(theirs, decoder(ToWorker), 100_000)
    ours.send(b"\x02" + bytes(60_000))
    assert worker.receive() == ([], [])
    ours.send(b"\x02" + bytes(60_000))
    with pytest.raises(InvalidArgument, match="a record of over 120000 bytes, at most 100000 are allowed"):
        worker.receive()
    ours.close()
    worker.close()


def test_nothing_comes_between_the_parts_of_a_record() -> None:
    ours, theirs = pair()
    worker = Channel(theirs, decoder(ToWorker))
    ours.send(b"\x02\x91")
    assert worker.receive() == ([], [])
    ours.send(b"\x01\x90")
    with pytest.raises(InvalidArgument, match="1 bytes into a record"):
        worker.receive()
    ours.close()
    worker.close()


def test_a_dead_peer_swallows_what_is_sent_and_is_noticed() -> None:
    submitter, worker = channels()
    worker.close()
    submitter.put(Cancel(1))
    assert submitter.flush()
    with pytest.raises(ChannelClosed):
        submitter.receive()
    submitter.close()


def test_what_a_peer_sent_before_it_died_is_received_though_it_left_records_unread() -> None:
    submitter, worker = channels()
    submitter.put(Cancel(1))
    assert submitter.flush()
    for number in range(3):
        worker.put(WholeAnswer(number).record)
        assert worker.flush()
    worker.close()
    received = [submitter.receive() for _ in range(3)]
    assert [got[0] for got in received if got is not None] == [[WholeAnswer(number).record] for number in range(3)]
    with pytest.raises(ChannelClosed):
        submitter.receive()
    submitter.close()
