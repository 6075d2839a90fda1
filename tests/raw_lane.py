"""Provides a client's end of a lane without a client library: it sends the records it is given, right or wrong."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import select
import socket
from typing import Any

import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.channel import Channel
from tensord.shm.messages import (
    WIRE_VERSION,
    AnswerRecord,
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
    ToSubmitter,
    WireVersion,
)
from tensord.shm.record import Record, decoder, encoder
from tensord.shm.segment import Segment

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def packed(*records: Record) -> bytes:
    """Packs records into one datagram."""
    return b"\x01\xdc" + len(records).to_bytes(2, "big") + b"".join(map(encoder.encode, records))


def memory(byte_size: int, seals: int = SEALS) -> tuple[int, mmap.mmap]:
    """Makes a memfd of zeros with these seals; returns it, and its mapping for reading and writing."""
    fd = os.memfd_create("client", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, byte_size)
    mapping = mmap.mmap(fd, byte_size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd, mapping


class RawLane:
    """A client's end of a lane. It owns its socket and its segments."""

    def __init__(self, sock: socket.socket, agree: bool = True, buffer: bytearray | None = None) -> None:
        """Takes over the socket.

        ``agree``: sends the wire's version first. ``buffer``: for receiving, shared by the lanes of one thread.
        """
        self.sock = sock
        self._channel = Channel(sock, decoder(ToSubmitter), buffer=buffer)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self.segments: dict[int, mmap.mmap] = {}
        #: Of the worker's response arena.
        self.responses: dict[int, Segment] = {}
        self.prepared: dict[int, PreparedAnswer] = {}
        #: Everything that came, in its order.
        self.received: list[Any] = []
        self.last_id = 0
        if agree:
            self.send(WireVersion(WIRE_VERSION))

    def send(self, *records: Record, fds: tuple[int, ...] = ()) -> None:
        """Sends records as one datagram. Raises BlockingIOError: the worker takes nothing now."""
        self.send_bytes(packed(*records), *fds)

    def send_bytes(self, content: bytes, *fds: int) -> None:
        self.sock.sendmsg([content], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])

    def open_segment(self, number: int, byte_size: int) -> mmap.mmap:
        """Opens a segment of the client's memory and sends it to the worker; returns its mapping."""
        fd, self.segments[number] = memory(byte_size)
        self.send(SegmentOpened(number, byte_size), fds=(fd,))
        os.close(fd)
        return self.segments[number]

    def close_segment(self, number: int) -> None:
        self.send(SegmentClosed(number))
        self.segments.pop(number).close()

    def ask(self, prepared: PreparedRequest | int, *contents: bytes, **own: Any) -> int:
        """Sends a request; returns its id."""
        self.last_id += 1
        self.send(RequestRecord(self.last_id, prepared, contents, **own))
        return self.last_id

    def prepare(self, number: int, prepared: PreparedRequest) -> None:
        self.send(Prepare(number, prepared))

    def poll(self, timeout: float) -> bool:
        """Waits up to ``timeout`` seconds; returns whether a datagram is there, or the other end has closed."""
        return bool(self._readable.poll(timeout * 1000))

    def receive(self) -> list[AnswerRecord] | None:
        """Returns the answers of one datagram, in which numbers are replaced by what they stand for; None: there is none.

        Raises ChannelClosed: the worker has ended the lane.
        """
        received = self._channel.receive()
        if received is None:
            return None
        records, fds = received
        self.received += records
        answers: list[AnswerRecord] = []
        for record in records:
            if isinstance(record, SegmentOpened):
                self.responses[record.segment] = Segment.attach(fds.pop(), record.byte_size)
            elif isinstance(record, SegmentClosed):
                self.responses.pop(record.segment).close()
            elif isinstance(record, PrepareAnswer):
                self.prepared[record.number] = record.prepared
            elif isinstance(record, AnswerRecord):
                answers.append(record)
        assert not fds
        return answers

    def kind(self, answer: AnswerRecord) -> PreparedAnswer:
        """Returns the prepared part of an answer."""
        return self.prepared[answer.prepared] if isinstance(answer.prepared, int) else answer.prepared

    def outputs(self, answer: AnswerRecord) -> dict[str, bytes]:
        """Returns the bytes of an answer's outputs by name, wherever they are."""
        assert not answer.code, answer.message
        found: dict[str, bytes] = {}
        contents = iter(answer.contents)
        for tensor in self.kind(answer).outputs:
            if tensor.region is not None:
                memory = self.segments[int(tensor.region.region[1:])]
                count = int(np.prod(tensor.shape)) * 4
                found[tensor.name] = memory[tensor.region.offset : tensor.region.offset + count]
                continue
            content = next(contents)
            if not isinstance(content, bytes):
                view = self.responses[content.segment].view
                content = bytes(view[content.offset : content.offset + content.byte_size])
            found[tensor.name] = content
        return found

    def release(self, *leases: tuple[int, int, int]) -> None:
        self.send(Release(leases))

    def close(self) -> None:
        self._channel.close()
        for segment in self.responses.values():
            segment.close()
        for mapping in self.segments.values():
            mapping.close()


def tensor(name: str, value: Array, datatype: str = "FP32", place: RegionSlice | None = None) -> PreparedTensor:
    return PreparedTensor(name, datatype, value.shape, place)


def addsub(
    rows: int = 1,
    places: tuple[RegionSlice | None, ...] = (None, None),
    outputs: tuple[RequestedOutput, ...] = (),
    width: int = 16,
    model: str = "addsub",
) -> PreparedRequest:
    """Builds a request to bench/models/addsub, or to a model with the same inputs."""
    tensors = [
        PreparedTensor(name, "FP32", (rows, width), place)
        for name, place in zip(("INPUT0", "INPUT1"), places, strict=True)
    ]
    return PreparedRequest(model, 0, tuple(tensors), outputs)
