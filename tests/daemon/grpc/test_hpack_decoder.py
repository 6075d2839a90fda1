"""HPACK's decoders, in C and of the hpack library: the same on what clients write and on what none writes, and their bounds."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Sequence
from typing import Any

import hpack
import pytest
from hpack.hpack import encode_integer
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import example, given
from hypothesis import strategies as st

from tensord.daemon.grpc import hpack_decoder
from tensord.daemon.grpc.hpack_decoder import COMMON, LibraryDecoder, fields, parted
from tests.daemon.grpc.recorded_blocks import recorded

REQUESTS = [
    ("828684418cf1e3c2e5f23a6ba0ab90f4ff", [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/")], 1),
    ("828684be5886a8eb10649cbf", [(b"cache-control", b"no-cache")], 2),
    ("828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf", [(b"custom-key", b"custom-value")], 3),
]
RESPONSES = [
    (
        "3fe101488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff"
        "6e919d29ad171863c78f0b97c8e9ae82ae43d3",
        b"302",
    ),
    ("4883640effc1c0bf", b"307"),
    (
        "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335dfdfcd5b3960"
        "d5af27087f3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007",
        b"200",
    ),
]

_hpack = pytest.importorskip("tensord.daemon.grpc._hpack", reason="no compiler was there")
LIMIT = 65536
_coded = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode
decoders = pytest.mark.parametrize("make", [_hpack.Decoder, LibraryDecoder], ids=["c", "library"])


# ---------------------------------------------------------------------------------------------------- what is written


def integer(value: int, prefix: int, first: int, longer: int = 0) -> bytes:
    """Encodes an integer; if its prefix is full, ``longer`` needless bytes follow."""
    written = encode_integer(value, prefix)
    written[0] |= first
    if longer and len(written) > 1:
        written[-1] |= 0x80
        written += b"\x80" * (longer - 1) + b"\x00"
    return bytes(written)


def text(content: bytes, coded: bool = False, longer: int = 0) -> bytes:
    return integer(len(content := _coded(content) if coded else content), 7, 0x80 if coded else 0, longer) + content


#: Names of both kinds, one that is nearly common, and anything.
NAMES = st.one_of(st.sampled_from(sorted(COMMON)), st.sampled_from([b"x-a", b"te-", b":", b""]), st.binary(max_size=20))
VALUES = st.one_of(
    st.binary(max_size=30), st.sampled_from([b"POST", b"trailers"]), st.integers(0, 5000).map(lambda size: b"v" * size)
)
#: Of the static table, of the dynamic one, and of none.
INDICES = st.one_of(st.integers(0, 70), st.integers(60, 200), st.sampled_from([2**31, 2**34]))
LONGER = st.sampled_from([0, 0, 0, 0, 1, 3, 4, 5])


@st.composite
def texts(draw: st.DrawFn, contents: st.SearchStrategy[bytes]) -> bytes:
    if draw(st.integers(0, 9)) == 0:
        # Bytes that may be no code at all.
        content = draw(st.binary(max_size=8)) + draw(st.sampled_from([b"", b"\xff", b"\xff" * 4, b"\xff\xff\xff\xfc"]))
        return integer(len(content), 7, 0x80) + content
    return text(draw(contents), draw(st.booleans()), draw(LONGER))


@st.composite
def representations(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(["indexed", "literal", "literal", "literal", "size"]))
    if kind == "indexed":
        return integer(draw(INDICES), 7, 0x80, draw(LONGER))
    if kind == "size":
        return integer(draw(st.sampled_from([0, 31, 32, 100, 200, 4095, 4096, 4097, 2**33])), 5, 0x20, draw(LONGER))
    # Indexed, not indexed, and never indexed.
    prefix, first = draw(st.sampled_from([(6, 0x40), (6, 0x40), (4, 0x00), (4, 0x10)]))
    index = draw(st.one_of(st.just(0), INDICES))
    name = b"" if index else draw(texts(NAMES))
    return integer(index, prefix, first, draw(LONGER) if index else 0) + name + draw(texts(VALUES))


@st.composite
def blocks(draw: st.DrawFn) -> bytes:
    """Draws a header block of any representations, mostly a complete one."""
    sizes = draw(st.lists(st.sampled_from([0, 70, 4096]), max_size=2))
    parts = [integer(size, 5, 0x20) for size in sizes] + draw(st.lists(representations(), max_size=12))
    whole = b"".join(parts)
    if draw(st.integers(0, 5)):
        return whole
    at = draw(st.integers(0, len(whole)))
    return whole[:at] + draw(st.binary(max_size=2)) + whole[at + draw(st.integers(0, 3)) :]


def told(decoder: Any, block: bytes) -> Any:
    """Decodes a block; returns the fields, or the type of the error."""
    try:
        return decoder.decode(block)
    except (ValueError, OverflowError) as error:
        return type(error)


def compared(sent: Sequence[bytes], limit: int = LIMIT) -> list[Any]:
    """Decodes the blocks of one connection with both decoders up to the first error; they must agree."""
    ours, library, found = _hpack.Decoder(limit), LibraryDecoder(limit), []
    for block in sent:
        found.append(told(library, block))
        assert told(ours, block) == found[-1]
        if isinstance(found[-1], type):
            break
    return found


# ------------------------------------------------------------------------------------------------------ both are one


@given(st.lists(blocks(), max_size=12), st.sampled_from([100, 1000, LIMIT]))
@example([b"\x40\x02x\x00" + text(b"v" * 4000), b"\xbe" * 17], LIMIT)
def test_both_decoders_are_one(sent: list[bytes], limit: int) -> None:
    compared(sent, limit)


@given(st.lists(st.lists(st.tuples(NAMES, VALUES, st.booleans()), max_size=8), max_size=8), st.booleans(), st.data())
def test_whatever_an_encoder_writes(
    sent: list[list[tuple[bytes, bytes, bool]]], coded: bool, data: st.DataObject
) -> None:
    """Sensitive fields among them; also where its table shrinks and grows."""
    encoder, ours = hpack.Encoder(), _hpack.Decoder(1 << 20)
    for one in sent:
        encoder.header_table_size = data.draw(st.sampled_from([0, 100, 4096, 4096, 4096]))
        block = bytes(encoder.encode(one, huffman=coded))
        assert ours.decode(block) == parted([field[:2] for field in one])


def test_what_grpcio_writes() -> None:
    """The calls are so many that grpcio's table evicts what they repeat, and each has its own deadline."""
    calls = [
        (10 * 1.05 ** (n % 60), (("traceparent", f"00-{n:032x}-{n:016x}-01"), ("a-bin", b"\x00\xe9")))
        for n in range(150)
    ]
    sent = recorded(calls)
    assert len(sent) == len(calls)
    found = compared(sent)
    assert len({common for common, _ in found}) == 1
    assert dict(fields(found[0][0]))[b":path"] == b"/inference.GRPCInferenceService/ServerLive"
    assert [own[1] for _, own in found] == [(b"traceparent", metadata[0][1].encode()) for _, metadata in calls]
    assert max(map(len, sent[1:])) > 150 > min(map(len, sent))


def test_random_bytes_and_changed_blocks() -> None:
    chance = random.Random(11)
    encoder = hpack.Encoder()
    good = [
        bytes(encoder.encode([(":path", "/a"), ("te", "trailers"), ("x", f"{n}"), (f"n{n % 7}", "y" * (n % 90))]))
        for n in range(60)
    ]
    refused = 0
    for _ in range(4000):
        sent = list(good[: chance.randrange(20)])
        changed = bytearray(good[chance.randrange(60)])
        for _ in range(chance.randrange(4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        sent += [bytes(changed), chance.randbytes(chance.randrange(40))]
        refused += isinstance(compared(sent)[-1], type)
    assert 1000 < refused < 4000


@given(st.lists(st.tuples(NAMES, st.binary(max_size=9)), max_size=9))
def test_parted_fields(decoded: list[tuple[bytes, bytes]]) -> None:
    common, own = parted(decoded)
    said = fields(common)
    assert sorted(said + own) == sorted(decoded)
    assert {name for name, _ in said} <= COMMON
    assert [field for field in decoded if field[0] in COMMON and field[0][:1] != b":"] == [
        field for field in said if field[0][:1] != b":"
    ]
    # In front of all others, or seen.
    assert all(name[:1] == b":" for name, _ in own if name in COMMON)


@decoders
def test_the_rfcs_examples(make: Any) -> None:
    decoder = make(LIMIT)
    for block, first, _ in REQUESTS:
        common, own = decoder.decode(bytes.fromhex(block))
        assert (b":authority", b"www.example.com") in fields(common)
        assert set(first) <= {*fields(common), *own}
    decoder = make(LIMIT)
    for block, status in RESPONSES:
        common, own = decoder.decode(bytes.fromhex(block))
        assert common == b""
        assert own[0] == (b":status", status)
        assert (b"location", b"https://www.example.com") in own
    assert own[-1] == (b"set-cookie", b"foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1")


# ---------------------------------------------------------------------------------------------------- the RFC's words


@decoders
def test_every_symbol_of_huffmans_code(make: Any) -> None:
    for symbol in range(256):
        for count in range(1, 9):
            content = bytes((symbol,)) * count
            assert make(LIMIT).decode(b"\x00" + text(b"x") + text(content, coded=True))[1] == [(b"x", content)]


@decoders
@pytest.mark.parametrize(
    ("block", "why"),
    [
        (b"\x80", "index 0"),
        (b"\xbe", "an entry that is not there"),
        (b"\x7f\x00\x01v", "the name of one"),
        (b"\xff", "an integer that is cut off"),
        (b"\xff\x80\x80\x80\x80\x80\x00", "one that is too long"),
        (b"\x00", "a name that is missing"),
        (b"\x00\x02x", "one that is cut off"),
        (b"\x00\x01x", "a value that is missing"),
        (b"\x00\x01x\x02v", "one that is cut off"),
        (b"\x00\x01x\x7f\xff\xff\xff\xff\x0f", "one of 4 GiB"),
        (b"\x00\x01x\x82\x1f\xff", "a padding of a byte"),
        (b"\x00\x01x\x81\x18", "a padding of zeros"),
        (b"\x00\x01x\x84\xff\xff\xff\xff", "the end of a string within it"),
        (b"\x00\x01x\x84\xff\xff\xff\xfc", "the same without padding"),
        (b"\x82\x20", "a size behind a field"),
        (b"\x3f\xe2\x1f", "a size larger than ours"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_block(make: Any, block: bytes, why: str) -> None:
    assert told(make(LIMIT), block) is ValueError


# ------------------------------------------------------------------------------------------------------------- bounds


@decoders
def test_entries_are_evicted_when_the_table_is_full(make: Any) -> None:
    """The oldest first; one that is larger than the table empties it; a size of nothing does too."""

    def held(decoder: Any) -> int:
        """Returns how many entries there are."""
        for count in range(200):
            if isinstance(told(decoder, integer(62 + count, 7, 0x80)), type):
                return count
        raise AssertionError("a table of 4096 bytes has 128 entries at most")

    decoder = make(LIMIT)
    for number in range(300):
        decoder.decode(b"\x40" + text(b"") + text(b""))
        assert held(decoder) == min(number + 1, 128)
    decoder.decode(b"\x40" + text(b"x") + text(b"v" * (4096 - 33)))
    assert held(decoder) == 1
    # Its name is the evicted entry's.
    assert decoder.decode(integer(62, 6, 0x40) + text(b"v"))[1] == [(b"x", b"v")]
    assert held(decoder) == 1
    assert decoder.decode(b"\x40" + text(b"y") + text(b"v" * (4096 - 32)))[1]
    assert held(decoder) == 0
    for size, count in ((4096, 5), (165, 5), (164, 4), (33, 1), (32, 0)):
        decoder = make(LIMIT)
        for _ in range(5):
            decoder.decode(b"\x40" + text(b"x") + text(b""))
        decoder.decode(integer(size, 5, 0x20))
        assert held(decoder) == count
        decoder.decode(b"\x20\x3f\xe1\x1f")
        assert held(decoder) == 0


@decoders
def test_what_is_not_indexed_is_not_in_the_table(make: Any) -> None:
    decoder = make(LIMIT)
    for first in (0x00, 0x10):
        assert decoder.decode(bytes((first,)) + text(b"x") + text(b"v"))[1] == [(b"x", b"v")]
        assert told(make(LIMIT), bytes((first,)) + text(b"x") + text(b"v") + b"\xbe") is ValueError


@decoders
def test_a_list_of_headers_within_its_limit(make: Any) -> None:
    """A byte of the block may stand for kilobytes."""
    put = b"\x40" + text(b"x") + text(b"v" * 967)
    assert len(make(3000).decode(put + b"\xbe" * 2)[1]) == 3
    for block in (put + b"\xbe" * 3, b"\x00" + text(b"x") + text(b"v" * 2968), b"\x83" * 80):
        assert told(make(3000), block) is OverflowError
    assert len(make(3000).decode(b"\x00" + text(b"x") + text(b"v" * 2967))[1]) == 1


def test_what_is_no_decoder_and_no_block() -> None:
    for arguments in ((), ("1",), (1, 2)):
        with pytest.raises(TypeError):
            _hpack.Decoder(*arguments)
    with pytest.raises(TypeError):
        _hpack.Decoder(max_list_size=1)
    with pytest.raises(ValueError, match="at most -1 bytes"):
        _hpack.Decoder(-1)
    with pytest.raises(TypeError):
        _hpack.Decoder(1).decode("x")


def test_nothing_is_left_behind() -> None:
    """No memory leaks from a block that is refused midway, or from a table whose connection ends."""
    chance = random.Random(7)
    block = b"".join(b"\x40" + text(b"name-%d" % n, n & 1) + text(b"v" * n, not n & 1) for n in range(60))
    before = 0
    for turn in range(2):
        for _ in range(2000):
            changed = bytearray(block)
            changed[chance.randrange(len(block))] = chance.randrange(256)
            decoder = _hpack.Decoder(LIMIT)
            told(decoder, bytes(changed))
            told(decoder, block)
        del decoder
        gc.collect()
        if turn:
            assert sys.getallocatedblocks() < before + 500
        before = sys.getallocatedblocks()


def test_the_fastest_one_is_used() -> None:
    assert type(hpack_decoder.decoder(LIMIT)) is _hpack.Decoder
