"""Header blocks of the client in C's calls: byte for byte what grpcio writes, and readable whatever came before."""

from __future__ import annotations

import hpack

from bench.vary.grpc_headers import EMPTIED, Encoder, fields
from tests.daemon.grpc.recorded_blocks import recorded


def test_blocks_are_those_of_grpcio() -> None:
    """The calls are so many that grpcio's table evicts what they repeat."""
    # No deadline comes twice, nor is it so near to one of the last that grpcio sends that again.
    calls = [(10 + 0.4 * (37 * n % 211), (("traceparent", f"00-{n:032x}-{n:016x}-01"),)) for n in range(211)]
    sent, decoder, encoder = recorded(calls), hpack.Decoder(), Encoder()
    assert len(sent) == len(calls)
    for block in sent:
        *said, trace = [(bytes(name), bytes(value)) for name, value in decoder.decode(block, raw=True)]
        assert encoder.encode(said, [trace]) == block
    expected, _ = fields("ServerLive", "1S", "")
    assert [name for name, _ in said] == [name for name, _ in expected]
    agent, authority = dict(said)[b"user-agent"], dict(said)[b":authority"]
    own = {b"grpc-timeout": b"1S", b":authority": b"bench", b"user-agent": dict(expected)[b"user-agent"]}
    assert [(name, own.get(name, value)) for name, value in said] == expected
    assert agent.startswith(b"grpc-python/")
    assert authority.startswith(b"127.0.0.1:")
    # More than once, because it was evicted.
    assert sum(agent in block for block in sent) > 1


def test_a_table_that_is_emptied() -> None:
    """The blocks of one table, on a connection that has sent others."""
    decoder = hpack.Decoder()
    for turn in range(3):
        encoder, before = Encoder(), EMPTIED
        for number in range(50):
            said, metadata = fields("ModelInfer", f"{turn}{number}m", f"{number}")
            found = decoder.decode(before + encoder.encode(said, metadata), raw=True)
            assert [(bytes(name), bytes(value)) for name, value in found] == said + metadata
            before = b""
