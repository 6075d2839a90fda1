"""A transport over a real socket, whose other end is the test's."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import weakref
from collections.abc import AsyncIterator

import pytest

from tensord.daemon.front.socket_transport import SocketTransport, SocketWatch

#: More than the buffers of a connection take.
LARGE = bytes(range(256)) * (64 << 10)


class Kept(asyncio.Protocol):
    """Keeps what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.received = b""
        self.stays_open = False
        self.lost: list[Exception | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, SocketTransport)
        self.transport = transport
        self.told.append("made")

    def data_received(self, data: bytes) -> None:
        assert type(data) is bytes
        self.received += data

    def eof_received(self) -> bool:
        self.told.append("eof")
        return self.stays_open

    def pause_writing(self) -> None:
        self.told.append("pause")

    def resume_writing(self) -> None:
        self.told.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.told.append("lost")
        self.lost.append(exc)


class Buffers(asyncio.BufferedProtocol):
    """Gives a buffer of its own, as a reader of large bodies does."""

    def __init__(self, size: int) -> None:
        self.room = memoryview(bytearray(size))
        self.sizes: list[int] = []

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.room

    def buffer_updated(self, nbytes: int) -> None:
        self.sizes.append(nbytes)


class Pair:
    """A watched connection and its client."""

    def __init__(self, first: bytes = b"") -> None:
        self.watch = SocketWatch()
        ours, self.client = socket.socketpair()
        self.client.setblocking(False)
        self.client.send(first)
        self.kept = Kept()
        self.watch.open(ours, self.kept)

    @property
    def transport(self) -> SocketTransport:
        return self.kept.transport

    async def until(self, *told: str) -> None:
        """Waits until the protocol was told exactly these events."""
        while self.kept.told != ["made", *told]:
            await asyncio.sleep(0.001)

    async def receive(self, size: int) -> bytes:
        got = b""
        while len(got) < size:
            piece = await asyncio.get_running_loop().sock_recv(self.client, size - len(got))
            assert piece
            got += piece
        return got


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    made.client.close()
    made.transport.abort()
    await asyncio.sleep(0)
    made.watch.close()


async def test_what_came_already_is_read_at_once() -> None:
    made = Pair(b"asked")
    assert made.kept.received == b"asked"
    made.client.close()
    await made.until("eof", "lost")
    assert made.kept.lost == [None]
    made.watch.close()


async def test_a_client_that_has_gone_already() -> None:
    watch, kept = SocketWatch(), Kept()
    ours, client = socket.socketpair()
    client.close()
    watch.open(ours, kept)
    assert kept.told == ["made", "eof", "lost"]
    assert ours.fileno() == -1
    watch.close()


class Resting(Kept):
    """A protocol that stops reading after the first data."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.transport.pause_reading()


@pytest.mark.parametrize("unread", [b"", b"more"])
async def test_the_end_is_noticed_where_reading_was_paused_with_what_came_first(unread: bytes) -> None:
    """Nothing of the connection has to be read for that, nor does anything have to come."""
    watch, kept = SocketWatch(), Resting()
    ours, client = socket.socketpair()
    client.send(b"asked")
    watch.open(ours, kept)
    assert (kept.received, kept.told) == (b"asked", ["made"])
    client.send(unread)
    client.close()
    while kept.told[-1] != "lost":
        await asyncio.sleep(0.001)
    assert kept.received == b"asked"
    watch.close()


async def test_questions_and_answers(pair: Pair) -> None:
    for number in range(3):
        pair.client.send(b"%d" % number)
        while len(pair.kept.received) == number:
            await asyncio.sleep(0)
        pair.transport.write(b"yes")
        pair.transport.writelines([b"a", memoryview(b"nd"), b""])
        assert await pair.receive(6) == b"yesand"
    assert pair.kept.received == b"012"
    assert pair.kept.told == ["made"]


@pytest.mark.parametrize("pieces", [1, 3, 2000])
async def test_what_the_client_does_not_take_is_kept_in_order(pair: Pair, pieces: int) -> None:
    size = len(LARGE) // pieces
    parts = [memoryview(LARGE)[i * size : (i + 1) * size] for i in range(pieces)]
    pair.transport.writelines(parts)
    assert pair.kept.told == ["made", "pause"]
    left = pair.transport.get_write_buffer_size()
    assert 0 < left < size * pieces
    pair.transport.write(b"end")
    assert pair.transport.get_write_buffer_size() == left + 3
    got = await pair.receive(size * pieces + 3)
    assert got == LARGE[: size * pieces] + b"end"
    await pair.until("pause", "resume")
    assert pair.transport.get_write_buffer_size() == 0


async def test_close_sends_what_is_kept(pair: Pair) -> None:
    pair.transport.write(LARGE)
    pair.transport.close()
    pair.transport.write(b"too late")
    assert pair.transport.is_closing()
    pair.client.send(b"not read")
    assert await pair.receive(len(LARGE)) == LARGE
    await pair.until("pause", "resume", "lost")
    assert pair.kept.received == b""
    assert pair.kept.lost == [None]


async def test_abort_sends_no_more_and_holds_nothing(pair: Pair) -> None:
    content = bytearray(LARGE)
    pair.transport.write(content)
    pair.transport.abort()
    pair.transport.abort()
    content.clear()  # nobody has a view of it
    assert pair.transport.get_write_buffer_size() == 0
    await pair.until("pause", "lost")
    pair.transport.close()
    pair.transport.write(b"nobody hears it")
    assert pair.kept.lost == [None]


async def test_paused(pair: Pair) -> None:
    """Bytes that come meanwhile wait in the socket, and cost nothing."""
    pair.transport.pause_reading()
    pair.client.send(b"one")
    for _ in range(5):
        await asyncio.sleep(0.001)
    assert pair.kept.received == b""
    assert not pair.transport.is_reading()
    pair.transport.resume_reading()
    while pair.kept.received != b"one":
        await asyncio.sleep(0)
    pair.transport.pause_reading()
    pair.transport.resume_reading()
    pair.client.send(b"two")
    while pair.kept.received != b"onetwo":
        await asyncio.sleep(0)


@pytest.mark.parametrize("unread", [b"", b"never read"])
async def test_a_client_that_goes_while_paused_is_found_at_once(pair: Pair, unread: bytes) -> None:
    pair.transport.pause_reading()
    pair.client.send(unread)
    await asyncio.sleep(0.001)
    pair.client.close()
    await pair.until("lost")
    assert isinstance(pair.kept.lost[0], ConnectionResetError)
    assert pair.kept.received == b""


@pytest.mark.parametrize("unread", [b"", b"never read"])
async def test_a_client_that_ends_its_side_while_paused_is_found_at_once(pair: Pair, unread: bytes) -> None:
    pair.transport.pause_reading()
    pair.client.send(unread)
    pair.client.shutdown(socket.SHUT_WR)
    await pair.until("eof", "lost")
    assert pair.kept.lost == [None]


async def test_where_half_closed_clients_are_answered_the_end_comes_behind_what_is_unread(pair: Pair) -> None:
    pair.watch.heeds_end = False
    pair.transport.pause_reading()
    pair.client.send(b"read in the end")
    pair.client.shutdown(socket.SHUT_WR)
    for _ in range(5):
        await asyncio.sleep(0.001)
    assert pair.kept.told == ["made"]
    pair.transport.resume_reading()
    await pair.until("eof", "lost")
    assert pair.kept.received == b"read in the end"


@pytest.mark.parametrize("stays_open", [False, True])
@pytest.mark.parametrize("paused", [False, True])
async def test_the_end_is_told_once_while_an_answer_is_unsent(pair: Pair, stays_open: bool, paused: bool) -> None:
    """A client that ends its side while an answer is unsent is told to the protocol once, and costs no further events."""
    pair.kept.stays_open = stays_open
    if paused:
        pair.transport.pause_reading()
        pair.client.send(b"not wanted")
        await asyncio.sleep(0.001)
    pair.transport.write(LARGE)
    pair.client.shutdown(socket.SHUT_WR)
    while "eof" not in pair.kept.told:
        await asyncio.sleep(0.001)
    for _ in range(5):
        await asyncio.sleep(0.001)
    assert pair.kept.told == ["made", "pause", "eof"]
    assert await pair.receive(len(LARGE)) == LARGE
    await pair.until("pause", "eof", "resume", *([] if stays_open else ["lost"]))


async def test_half_closed(pair: Pair) -> None:
    """The protocol may stay, and answer; the end is told once, whatever it asks for then."""
    pair.kept.stays_open = True
    pair.client.shutdown(socket.SHUT_WR)
    await pair.until("eof")
    pair.transport.resume_reading()
    for _ in range(5):
        await asyncio.sleep(0.001)
    pair.transport.write(b"answer")
    assert await pair.receive(6) == b"answer"
    pair.transport.close()
    await pair.until("eof", "lost")


async def test_write_eof_follows_what_is_kept(pair: Pair) -> None:
    assert pair.transport.can_write_eof()
    pair.transport.write(LARGE)
    pair.transport.write_eof()
    assert await pair.receive(len(LARGE)) == LARGE
    assert await asyncio.get_running_loop().sock_recv(pair.client, 1) == b""
    pair.client.send(b"still read")
    while pair.kept.received != b"still read":
        await asyncio.sleep(0)


async def test_a_protocol_that_gives_buffers(pair: Pair) -> None:
    buffers = Buffers(4)
    pair.transport.set_protocol(buffers)
    assert pair.transport.get_protocol() is buffers
    pair.client.send(b"123456")
    while sum(buffers.sizes) < 6:
        await asyncio.sleep(0)
    assert (buffers.sizes, bytes(buffers.room)) == ([4, 2], b"5634")
    pair.transport.set_protocol(pair.kept)
    pair.client.send(b"as bytes")
    while pair.kept.received != b"as bytes":
        await asyncio.sleep(0)


@pytest.mark.parametrize("writes", [False, True])
async def test_a_reset(writes: bool) -> None:
    """The next read or write reports the reset, and the protocol is told the reason."""
    watch, kept = SocketWatch(), Kept()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        connection, _ = listener.accept()
    watch.open(connection, kept)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if writes:
        kept.transport.pause_reading()
    client.close()
    while not kept.lost:
        if writes:
            kept.transport.write(b"hello?")
        await asyncio.sleep(0.001)
    assert isinstance(kept.lost[0], ConnectionResetError | BrokenPipeError)
    assert kept.told == ["made", "lost"]
    watch.close()


async def test_a_defect_of_the_protocol_ends_its_connection_alone(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Kept):
        def data_received(self, data: bytes) -> None:
            raise ZeroDivisionError

    ours, client = socket.socketpair()
    broken = Broken()
    pair.watch.open(ours, broken)
    client.send(b"x")
    pair.client.send(b"x")
    while not (broken.lost and pair.kept.received):
        await asyncio.sleep(0.001)
    assert caplog.text.count("a connection met a defect of the server") == 1
    assert client.recv(1) == b""
    client.close()
    caplog.clear()


async def test_one_ends_another_that_was_ready_as_well(pair: Pair) -> None:
    class Ends(Kept):
        def data_received(self, data: bytes) -> None:
            pair.transport.abort()

    ours, client = socket.socketpair()
    ends = Ends()
    pair.watch.open(ours, ends)
    client.send(b"x")
    pair.client.send(b"x")
    await pair.until("lost")
    client.close()
    while not ends.lost:
        await asyncio.sleep(0.001)


async def test_nothing_is_left_for_the_garbage_collector() -> None:
    made = Pair()
    transport = weakref.ref(made.kept)
    made.client.close()
    await made.until("eof", "lost")
    gc.disable()
    try:
        del made.kept.transport
        made.kept = Kept()
        assert transport() is None
    finally:
        gc.enable()
    made.watch.close()


async def test_what_it_says_of_itself(pair: Pair) -> None:
    assert pair.transport.get_extra_info("socket").fileno() == pair.transport.fd
    assert pair.transport.get_extra_info("sslcontext", 7) == 7
    assert repr(pair.transport) == f"<SocketTransport {pair.transport.fd} reading, 0 bytes unsent>"
    assert repr(pair.watch) == "<SocketWatch of 1 connections>"
