"""Attacks on lanes: records and descriptors that no client library would send."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import socket
from collections.abc import Callable, Iterator

import numpy as np
import tritonclient.http as httpclient

from bench.attackers.target import Target, hold, pile_up
from tensord.shm.messages import (
    WIRE_VERSION,
    AnswerRecord,
    Cancel,
    Parameter,
    Prepare,
    PreparedRequest,
    PreparedTensor,
    RegionSlice,
    Release,
    RequestRecord,
    SegmentClosed,
    SegmentOpened,
    Slice,
    Taken,
    ToSubmitter,
    WireVersion,
)
from tensord.shm.record import Record, decoder, encoder

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: Room for one datagram with its descriptors.
_RECEIVE, _FDS = 2 << 20, 64
#: Floats of a tensor that travels in its record and is answered in the worker's memory.
_LARGE = 15_000
_SMALL = PreparedRequest("addsub", 0, tuple(PreparedTensor(f"INPUT{i}", "FP32", (1, 16)) for i in (0, 1)))
_SLOW = PreparedRequest("slow", 0, (PreparedTensor("INPUT0", "FP32", (1,)),))
_ONE = np.ones(1, np.float32)
_SMALL_CONTENTS = (np.ones((1, 16), np.float32).tobytes(),) * 2
_LARGE_CONTENTS = (np.ones(_LARGE, np.float32).tobytes(),)
#: Of a record that is larger than a datagram.
_PART = 60_000
_PARAMETERS: dict[str, Parameter] = {f"{number:x}": 1 for number in range(35_000)}
#: As many requests as may be in flight on a lane by default.
_IN_FLIGHT = 256
_IDENTITY = PreparedRequest("identity", 0, (PreparedTensor("INPUT0", "FP32", (_LARGE,)),))


class Lane:
    """A client's connection to the daemon, with one lane to a worker."""

    def __init__(self, path: str, model: str = "addsub") -> None:
        """Connects to the daemon and opens the lane. Raises OSError: the daemon refuses it."""
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._decoder = decoder(ToSubmitter)
        self.last = 0
        try:
            self._connection.settimeout(30)
            self._connection.connect(path)
            self._connection.send(json.dumps({"open": {"model": model}}).encode())
            answer, fds, _, _ = socket.recv_fds(self._connection, 128 << 10, _FDS)
            if not fds:
                raise ConnectionRefusedError(answer.decode())
        except BaseException:
            self._connection.close()
            raise
        first, *others = fds
        for fd in others:
            os.close(fd)
        self._sock = socket.socket(fileno=first)
        self._sock.settimeout(5)
        self.send(WireVersion(WIRE_VERSION))

    def send(self, *records: Record, fd: int = -1) -> None:
        """Sends records as one datagram. Raises OSError: the worker takes nothing within five seconds, or has ended the lane."""
        content = b"\x01\xdc" + len(records).to_bytes(2, "big") + b"".join(map(encoder.encode, records))
        self.send_bytes(content, fd)

    def send_bytes(self, content: bytes, fd: int = -1) -> None:
        """Sends any bytes as one datagram. Raises OSError as ``send`` does."""
        socket.send_fds(self._sock, [content], [] if fd < 0 else [fd])

    def send_parts(self, record: Record, whole: bool = True) -> None:
        """Sends a record that is larger than a datagram. Raises OSError as ``send`` does. ``whole``: with its last part."""
        content = b"\x91" + encoder.encode(record)
        parts = [content[at : at + _PART] for at in range(0, len(content), _PART)]
        for part in parts[:-1]:
            self.send_bytes(b"\x02" + part)
        if whole:
            self.send_bytes(b"\x03" + parts[-1])

    def ask(self, *prepared: PreparedRequest | int, contents: tuple[bytes, ...]) -> None:
        """Sends a request for each of the prepared requests, all with the same contents. Raises OSError as ``send`` does."""
        self.last += len(prepared)
        first = self.last - len(prepared) + 1
        self.send(*[RequestRecord(first + number, one, contents) for number, one in enumerate(prepared)])

    def answers(self) -> Iterator[AnswerRecord]:
        """Yields the answers that have arrived, without waiting. Raises ConnectionError: the worker has ended the lane."""
        # A socket with a timeout waits before it receives, whatever the flags say.
        while select.select([self._sock], [], [], 0)[0]:
            content, fds, _, _ = socket.recv_fds(self._sock, _RECEIVE, _FDS)
            for fd in fds:
                os.close(fd)
            if not content:
                raise ConnectionError("the worker has ended the lane")
            yield from (each for each in self._decoder.decode(content[1:]) if isinstance(each, AnswerRecord))

    def open_segment(self, number: int, byte_size: int) -> None:
        """Sends the worker sealed shared memory of zeros. Raises OSError as ``send`` does."""
        fd = os.memfd_create("tensord-bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, byte_size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self.send(SegmentOpened(number, byte_size), fd=fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Closes the lane and the connection."""
        self._sock.close()
        self._connection.close()


@contextlib.contextmanager
def _lane(target: Target, model: str = "addsub") -> Iterator[Lane]:
    with contextlib.closing(Lane(target.clients, model)) as lane:
        yield lane


def never_reads(target: Target) -> None:
    """Asks on sixteen lanes for large answers as long as the worker takes requests, and reads no answer."""

    def ask(lane: Lane) -> None:
        try:
            lane.ask(_IDENTITY, contents=_LARGE_CONTENTS)
            target.count("requests")
        except TimeoutError:
            target.count("not taken")

    hold(target, 16, lambda: Lane(target.clients, "identity"), ask)


def holds_leases(target: Target) -> None:
    """Reads every answer on four lanes, and gives none of the leased memory back."""

    def ask(lane: Lane) -> None:
        lane.ask(_IDENTITY, contents=_LARGE_CONTENTS)
        for answer in lane.answers():
            target.count("held" if answer.lease else f"refused {answer.code}" if answer.code else "answers")

    hold(target, 4, lambda: Lane(target.clients, "identity"), ask, pause=0.001)


def flood(target: Target) -> None:
    """Sends small requests, 200 to a datagram, as fast as the worker takes them, more than may be in flight."""
    while target.going_on():
        with target.refusals(), _lane(target) as lane:
            lane.send(Prepare(0, _SMALL))
            while target.going_on():
                lane.ask(*[0] * 200, contents=_SMALL_CONTENTS)
                target.count("requests", 200)
                for answer in lane.answers():
                    target.count("refused" if answer.code else "answers")


def fills_queue(target: Target) -> None:
    """Keeps a slow model's queue full on seventeen lanes, and asks it over HTTP as another user, who is to be answered."""
    flights: dict[Lane, int] = {}
    with contextlib.ExitStack() as stack:
        while target.going_on():
            with target.refusals():
                if len(flights) < 17:
                    flights[stack.enter_context(_lane(target, "slow"))] = 0
                    continue
                for lane, count in flights.items():
                    count -= len(list(lane.answers()))
                    lane.ask(*[_SLOW] * (_IN_FLIGHT - count), contents=(bytes(4),))
                    flights[lane] = _IN_FLIGHT
                with httpclient.InferenceServerClient(target.http, network_timeout=60) as client:
                    client.infer("slow", [httpclient.InferInput("INPUT0", [1], "FP32").set_data_from_numpy(_ONE)])
                target.count("others' answers")


def many_parameters(target: Target) -> None:
    """Prepares requests of 35,000 small parameters each on twelve lanes, as many as the worker keeps; then it ends a lane."""

    def prepare(lane: Lane) -> None:
        lane.last += 1
        lane.send_parts(Prepare(lane.last % 4, PreparedRequest("addsub", 0, (), (), _PARAMETERS)))
        target.count("prepared")

    hold(target, 12, lambda: Lane(target.clients), prepare)


def half_records(target: Target) -> None:
    """Sends the first megabyte of a record on each of six hundred lanes, never its end."""
    record = RequestRecord(1, _IDENTITY, (bytes(15 * _PART),))

    def begin() -> Lane:
        lane = Lane(target.clients)
        lane.send_parts(record, whole=False)
        target.count("halves")
        return lane

    pile_up(target, begin, 600)


def waiting_megabytes(target: Target) -> None:
    """Sends requests of nearly a megabyte to a slow model on ten lanes, as many as may be in flight."""
    slow = PreparedRequest("slow", 0, (PreparedTensor("INPUT0", "FP32", (4 * _PART,)),))

    def ask(lane: Lane) -> None:
        lane.last += 1
        lane.send_parts(RequestRecord(lane.last, slow, (bytes(16 * _PART),)))
        target.count("requests")
        for answer in lane.answers():
            target.count("refused" if answer.code else "answers")

    hold(target, 10, lambda: Lane(target.clients, "slow"), ask)


def forged(target: Target) -> None:
    """Sends false records: leases never granted, unknown numbers, ranges outside of a segment, wrong sizes, random bytes."""
    chance = random.Random(0)
    outside = PreparedTensor("INPUT0", "FP32", (_LARGE,), RegionSlice("@1", 1 << 40, 4 * _LARGE))
    nowhere = PreparedTensor("INPUT0", "FP32", (_LARGE,), RegionSlice("@9", 0, 4 * _LARGE))
    lies: list[Record] = [
        Release(((0, 0, 1),)),
        Release(((1 << 40, -64, 3),)),
        Taken(5, 1 << 62),
        Cancel(-1),
        RequestRecord(1, 77, _SMALL_CONTENTS),
        RequestRecord(1, PreparedRequest("identity", 0, (outside,)), ()),
        RequestRecord(1, PreparedRequest("identity", 0, (nowhere,)), ()),
        RequestRecord(1, _SMALL, (Slice(0, 0, 64), Slice(1, 0, 64))),
        RequestRecord(
            1, PreparedRequest("identity", 0, (PreparedTensor("INPUT0", "FP32", (1 << 62,)),)), _LARGE_CONTENTS
        ),
        SegmentOpened(1, 1 << 62),
        SegmentClosed(-5),
    ]
    while target.going_on():
        with target.refusals(), _lane(target) as lane:
            for _ in range(8):
                if chance.random() < 0.2:
                    lane.send_bytes(b"\x01" + chance.randbytes(chance.randrange(1, 4000)))
                else:
                    lane.send(chance.choice(lies))
                target.count("lies")
                for _answer in lane.answers():
                    target.count("answers")


def connects_and_ends(target: Target) -> None:
    """Opens a lane, sends a request and closes the lane before the answer, again and again."""
    while target.going_on():
        with target.refusals(), _lane(target, "identity") as lane:
            lane.open_segment(1, 1 << 20)
            lane.ask(_IDENTITY, contents=_LARGE_CONTENTS)
            target.count("connections")


def growing_segments(target: Target) -> None:
    """Hands over larger and larger shared memory until it is refused, asks for answers from all of it, and begins again."""
    while target.going_on():
        with target.refusals(), _lane(target, "identity") as lane:
            for number in range(100):
                byte_size = min(1 << 30, 4096 << number)
                lane.open_segment(number, byte_size)
                count = min(_LARGE, byte_size // 4)
                tensor = PreparedTensor("INPUT0", "FP32", (count,), RegionSlice(f"@{number}", 0, 4 * count))
                lane.ask(PreparedRequest("identity", 0, (tensor,)), contents=())
                target.count("segments")
                leases = []
                for answer in lane.answers():
                    target.count("refused" if answer.code else "answers")
                    leases += [answer.lease] if answer.lease else []
                if leases:
                    lane.send(Release(tuple(leases)))
                if not target.going_on():
                    break


ATTACKS: dict[str, Callable[[Target], None]] = {
    "lanes-never-read": never_reads,
    "lanes-hold-leases": holds_leases,
    "lanes-flood": flood,
    "lanes-fill-queue": fills_queue,
    "lanes-many-parameters": many_parameters,
    "lanes-half-records": half_records,
    "lanes-waiting-megabytes": waiting_megabytes,
    "lanes-forged": forged,
    "lanes-connect-and-end": connects_and_ends,
    "lanes-growing-segments": growing_segments,
}
