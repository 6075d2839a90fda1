"""Generates what a good client says on its lane, and random changes of it. A seed is always the same lane's life."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tensord.shm.messages import (
    TIMING,
    WIRE_VERSION,
    Cancel,
    EndSequence,
    Prepare,
    PreparedRequest,
    PreparedTensor,
    RegionSlice,
    Release,
    RequestedOutput,
    RequestRecord,
    SegmentClosed,
    SegmentOpened,
    Taken,
    WireVersion,
)
from tests.raw_lane import addsub, packed

#: Bytes of the segments that are opened.
SEGMENT = 1 << 16
#: Integers that readers stumble over.
NUMBERS = (
    0,
    1,
    -1,
    2,
    63,
    64,
    255,
    1024,
    1 << 16,
    SEGMENT,
    SEGMENT - 64,
    1 << 31,
    1 << 32,
    (1 << 63) - 1,
    (1 << 64) - 1,
    -(1 << 63),
)
TEXTS = (
    "",
    "@",
    "@0",
    "@1",
    "@99",
    "@-1",
    "@00",
    "INPUT0",
    "INPUT1",
    "FP32",
    "BYTES",
    "BOOL",
    "q",
    "Q+",
    "a",
    "r",
    "\n\0",
    "x" * 999,
)


class Said(NamedTuple):
    """One datagram, and how many bytes of memory are sent with it; -1: none."""

    content: bytes
    memory: int = -1


def vector(value: float, rows: int = 1) -> bytes:
    return np.full((rows, 16), value, np.float32).tobytes()


def conversation(chance: random.Random) -> list[Said]:
    """Returns a good client's datagrams.

    They have segments, prepared and inline requests, tensors in records and in segments, and all else that a client may say.
    """
    at = RegionSlice("@1", 64 * chance.randrange(8), 64)
    to = RegionSlice(chance.choice(["@1", "@2"]), 4096, 64)
    large = RegionSlice("@2", 0, 64 * 256)
    repeat = PreparedRequest(
        "repeat", 0, (PreparedTensor("base", "FP32", (16,)), PreparedTensor("count", "INT32", (1,)))
    )
    said = [
        Said(packed(WireVersion(WIRE_VERSION))),
        Said(packed(SegmentOpened(1, SEGMENT)), SEGMENT),
        Said(packed(SegmentOpened(2, SEGMENT)), SEGMENT),
        Said(
            packed(Prepare(0, addsub()), Prepare(1, addsub(places=(at, at), outputs=(RequestedOutput("OUTPUT0", to),))))
        ),
        Said(packed(Prepare(2, addsub(256, (large, large))), Prepare(3, repeat))),
    ]
    ids = iter(range(1, 1000))
    requests = [
        lambda: RequestRecord(next(ids), 0, (vector(1), vector(2)), trace=chance.choice([0, TIMING])),
        lambda: RequestRecord(next(ids), 1, (), "client", priority=1, timeout_us=10_000_000),
        lambda: RequestRecord(next(ids), 2),
        lambda: RequestRecord(next(ids), 3, (vector(1), np.int32(5).tobytes())),
        lambda: RequestRecord(next(ids), addsub(), (vector(3), vector(4)), sequence_id="s"),
        lambda: RequestRecord(next(ids), addsub(places=(at, None)), (vector(5),)),
    ]
    others = [
        Cancel(chance.randrange(1, 20)),
        EndSequence("total", chance.randrange(1, 20)),
        Taken(chance.randrange(1, 20), 320),
        Release(()),
    ]
    for _ in range(chance.randrange(2, 8)):
        records: list[Any] = [chance.choice(requests)() for _ in range(chance.randrange(1, 6))]
        if chance.random() < 0.3:
            records.append(chance.choice(others))
        said.append(Said(packed(*records)))
    if chance.random() < 0.5:
        said.append(Said(packed(SegmentClosed(chance.choice([1, 2])), RequestRecord(next(ids), 1))))
    return said


def changed(content: bytes, chance: random.Random) -> bytes:
    """Returns a datagram in which some bytes were changed, added or removed."""
    made = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 4, 16])):
        at = chance.randrange(len(made) + 1)
        what = chance.randrange(6)
        if what == 0 and at < len(made):
            made[at] = chance.randrange(256)
        elif what == 1 and at < len(made):
            made[at] ^= 1 << chance.randrange(8)
        elif what == 2:
            del made[at:]
        elif what == 3:
            del made[at : at + chance.randrange(1, 9)]
        elif what == 4:
            made[at:at] = chance.randbytes(chance.randrange(1, 9))
        else:
            made[at:at] = made[at : at + chance.randrange(1, 99)]
    return bytes(made)


def altered(content: bytes, chance: random.Random) -> bytes:
    """Returns a datagram of valid records in which some values were replaced: the decoder takes them, but they make no sense."""
    try:
        records = msgspec.msgpack.decode(content[1:])
    except (msgspec.DecodeError, ValueError, TypeError):  # it was changed before
        return content
    for _ in range(chance.choice([1, 1, 2, 5])):
        if isinstance(records, list):
            _alter(records, chance)
    return b"\x01" + msgspec.msgpack.encode(records)


def _alter(value: list[Any], chance: random.Random) -> None:
    """Replaces a value somewhere inside a nested list."""
    if not value:
        return
    at = chance.randrange(len(value))
    inner = value[at]
    if isinstance(inner, list) and inner and chance.random() < 0.85:
        _alter(inner, chance)
        return
    choices: list[Callable[[], Any]] = [
        lambda: chance.choice(NUMBERS),
        lambda: chance.choice(TEXTS),
        lambda: chance.randbytes(chance.choice([0, 1, 63, 64, 65])),
        lambda: None,
        list,
        dict,
        lambda: [inner] * chance.choice([2, 17, 300]),
        lambda: chance.random() - 0.5,
    ]
    same = {int: 0, str: 1, bytes: 2}.get(type(inner))
    # Mostly of the same type: what is of another is refused before anybody looks at it.
    value[at] = choices[same]() if same is not None and chance.random() < 0.8 else chance.choice(choices)()


def life(seed: int) -> list[Said]:
    """Returns all datagrams of one hostile client, which depend only on the seed."""
    chance = random.Random(seed)
    said = conversation(chance)
    for _ in range(chance.choice([1, 1, 2, 3])):
        at = chance.randrange(len(said))
        one, what = said[at], chance.random()
        if what < 0.4:
            said[at] = Said(changed(one.content, chance), one.memory)
        elif what < 0.75:
            said[at] = Said(altered(one.content, chance), one.memory) if one.content[:1] == b"\x01" else one
        elif what < 0.8:
            said[at] = Said(one.content, chance.choice([-1, 0, 4096, SEGMENT, 2 * SEGMENT]))
        elif what < 0.85:
            said[at : at + 1] = [
                Said(b"\x02" + one.content[1:]),
                Said(chance.choice([b"\x03", b"\x02", b"\x01"]) + one.content[1:]),
            ]
        elif what < 0.9:
            del said[at]
        elif what < 0.95:
            said.insert(at, chance.choice(said))
        else:
            chance.shuffle(said)
    return said[: chance.randrange(1, len(said) + 1)] if said and chance.random() < 0.2 else said
