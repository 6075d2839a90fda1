"""Pools: what they say is what tritonclient and a JSON reader find in them, and no two requests of one are the same."""

from __future__ import annotations

import json
from collections import Counter

import hpack
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from bench.vary.pools import KINDS, ROWS, Asked, Exchange, pool
from tensord.daemon.grpc import frames

_EVERY = [(protocol, kind) for protocol, kinds in KINDS.items() for kind in kinds]


def _http(request: bytes) -> tuple[dict[str, str], Asked]:
    """Parses an HTTP request: its header fields in lower case, and what it asks."""
    head, _, body = request.partition(b"\r\n\r\n")
    line, *lines = head.decode().split("\r\n")
    fields = {name.lower(): value for name, value in (one.split(": ", 1) for one in lines)}
    assert len(fields) == len(lines)
    assert int(fields["content-length"]) == len(body)
    size = int(fields["inference-header-content-length"])
    said, tensors = json.loads(body[:size]), body[size:]
    inputs = {}
    for one in said["inputs"]:
        taken = one["parameters"]["binary_data_size"]
        inputs[one["name"]] = np.frombuffer(tensors[:taken], np.float32).reshape(one["shape"])
        tensors = tensors[taken:]
    assert not tensors
    model = line.removeprefix("POST /v2/models/").removesuffix("/infer HTTP/1.1")
    return fields, Asked(model, said.get("id", ""), inputs, {})


def _grpc(exchange: Exchange) -> tuple[service_pb2.ModelInferRequest, Asked]:
    request = exchange.request
    high, low, kind, *_ = frames.read_head(request)
    if kind == frames.HEADERS:
        request = request[frames.HEAD_SIZE + (high << 16 | low) :]
    high, low, kind, *_ = frames.read_head(request)
    assert kind == frames.DATA
    message = request[frames.HEAD_SIZE :]
    assert len(message) == high << 16 | low == 5 + int.from_bytes(message[1:5], "big")
    said = service_pb2.ModelInferRequest.FromString(message[5:])
    inputs = {
        one.name: np.frombuffer(content, np.float32).reshape(one.shape)
        for one, content in zip(said.inputs, said.raw_input_contents, strict=True)
    }
    return said, Asked(said.model_name, said.id, inputs, {})


@pytest.mark.parametrize(("protocol", "kind"), _EVERY, ids=map("-".join, _EVERY))
def test_requests_say_what_is_asked_and_differ(protocol: str, kind: str) -> None:
    exchanges = pool(protocol, kind, 300).exchanges
    assert len({one.request for one in exchanges}) == 300
    for exchange in exchanges:
        said = _http(exchange.request)[1] if protocol == "http" else _grpc(exchange)[1]
        assert (said.model, said.id) == (exchange.asked.model, exchange.asked.id)
        assert said.inputs.keys() == exchange.asked.inputs.keys()
        for name, values in exchange.asked.inputs.items():
            np.testing.assert_array_equal(said.inputs[name], values, strict=True)


def test_a_pool_is_the_same_each_time() -> None:
    requests = [one.request for one in pool("http", "all", 50).exchanges]
    assert requests == [one.request for one in pool("http", "all", 50).exchanges]


def test_ids_and_traces() -> None:
    ids = [one.asked.id for one in pool("http", "id", 2000).exchanges]
    assert ids == [str(number) for number in range(1, 2001)]
    for kind in ("trace", "new", "all"):
        traces = {_http(one.request)[0]["traceparent"] for one in pool("http", kind, 2000).exchanges}
        assert len(traces) == 2000
        assert {len(trace) for trace in traces} == {55}


def test_traces_and_deadlines_of_calls() -> None:
    """The calls of one table are so many that they evict what they repeat, and the next table begins empty."""
    exchanges, decoder = pool("grpc", "trace", 1000).exchanges, hpack.Decoder()
    calls = [dict(decoder.decode(_block(one), raw=True)) for one in exchanges]
    assert len({call[b"traceparent"] for call in calls}) == 1000
    assert len({call[b"grpc-timeout"] for call in calls}) > 950
    assert {call[b":path"] for call in calls} == {b"/inference.GRPCInferenceService/ModelInfer"}
    assert not exchanges[-1].goes_on
    firsts = [number + 1 for number, one in enumerate(exchanges[:-1]) if not one.goes_on]
    assert firsts == list(range(120, 1000, 120))
    assert all(_block(exchanges[number]).startswith(b"\x20\x3f\xe1\x1f") for number in (0, *firsts))
    assert sum(b"ModelInfer" in _block(one) for one in exchanges) > 1 + len(firsts)


def _block(exchange: Exchange) -> bytes:
    """Returns the header block of a call."""
    high, low, kind, *_ = frames.read_head(exchange.request)
    assert kind == frames.HEADERS
    return exchange.request[frames.HEAD_SIZE :][: high << 16 | low]


def test_shapes() -> None:
    for protocol in ("http", "grpc"):
        rows = [one.asked.inputs["INPUT0"].shape for one in pool(protocol, "shape", 500).exchanges]
        assert set(rows) == {(count, 16) for count in range(1, 9)}


def test_models_come_in_turn_and_over_grpc_are_equally_long() -> None:
    for protocol in ("http", "grpc"):
        exchanges = pool(protocol, "models", 30).exchanges
        assert [one.asked.model for one in exchanges] == ["addsub", "identity", "post"] * 10
    assert len({len(one.request) for one in exchanges}) == 1


def test_heads_of_four_clients_come_in_turn() -> None:
    exchanges = pool("http", "all", 40).exchanges
    agents = [_http(one.request)[0]["user-agent"].split("/")[0].split("-")[0] for one in exchanges]
    assert agents == ["python", "python", "Go", "curl"] * 10
    assert len({tuple(_http(one.request)[0]) for one in exchanges}) == 4


def test_a_streams_messages_come_in_four_ways() -> None:
    said = [_grpc(one)[0] for one in pool("stream", "all", 8).exchanges]
    assert [(one.model_version, len(one.outputs), one.inputs[0].name) for one in said] == [
        ("", 2, "INPUT0"),
        ("", 0, "INPUT0"),
        ("1", 2, "INPUT0"),
        ("", 2, "INPUT1"),
    ] * 2


def test_sequences_have_ids_of_their_own_and_end() -> None:
    for protocol in ("http", "stream"):
        exchanges = pool(protocol, "rnn", 2000).exchanges
        told = [_sequence(protocol, one) for one in exchanges]
        # A step, and whether the next one is of the same sequence.
        for (who, _, end), exchange, after in zip(told[:-1], exchanges[:-1], told[1:], strict=True):
            assert exchange.goes_on == (after[0] == who) == (not end)
            assert after[1] == end
        assert not exchanges[-1].goes_on
        lengths = Counter(who for who, _, _ in told)
        assert len(lengths) > 60
        assert 30 < max(lengths.values()) <= 40
        assert told[0][1]


def _sequence(protocol: str, exchange: Exchange) -> tuple[int, bool, bool]:
    if protocol == "http":
        fields = _http(exchange.request)[0]
        body = exchange.request.partition(b"\r\n\r\n")[2]
        said = json.loads(body[: int(fields["inference-header-content-length"])])["parameters"]
        return said["sequence_id"], said["sequence_start"], said["sequence_end"]
    parameters = _grpc(exchange)[0].parameters
    return (
        parameters["sequence_id"].int64_param,
        parameters["sequence_start"].bool_param,
        parameters["sequence_end"].bool_param,
    )


def test_rows() -> None:
    kinds = ("id", "trace", "all", "shape", "size", "models", "new")
    expected = {f"vary-http-{kind}-c{count}" for kind in kinds for count in (4, 16)}
    expected |= {f"vary-http-all-c{count}" for count in (64, 256, 3000)}
    expected |= {
        f"vary-grpc-{kind}-c{count}" for kind in ("id", "trace", "models", "shape", "size", "mlp") for count in (4, 16)
    }
    expected |= {f"vary-{protocol}-rnn-c{count}" for protocol in ("http", "stream") for count in (4, 16)}
    expected |= {"vary-stream-rnn-c64"} | {f"vary-stream-all-c{count}" for count in (4, 16)}
    assert set(ROWS) == expected
    assert ROWS["vary-http-new-c4"].renews
    assert not ROWS["vary-http-id-c4"].renews
