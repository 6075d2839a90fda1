"""Makes pools of requests that differ from each other, each with its right answer.

    id      ids count up; values, as in all pools, are random     models  three models in turn
    trace   a trace header that never repeats, over gRPC          new     like "trace"; the client connects for each request
            a deadline too
    shape   one to eight rows                                     all     id, trace header and values differ, and four clients'
    size    tensors of 6, 10 or 16 KiB                                    ways of writing a request come in turn
    rnn     sequences of one to forty steps of a recurrent network, with random ids
    mlp     pictures for a network of three layers

A pool is made from a seed, so two servers of a comparison are asked the same.
"""

from __future__ import annotations

import functools
import itertools
import random
import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import hpack
import jax
import numpy as np

from bench import grpc_frames
from bench.server import ROOT
from bench.vary import grpc_requests, http_requests
from bench.vary.http_requests import Step

_HTTP_WRITERS = (http_requests.tritonclient, http_requests.requests, http_requests.go, http_requests.curl)
_GRPC_WRITERS = (
    grpc_requests.tritonclient,
    grpc_requests.all_outputs,
    grpc_requests.versioned,
    grpc_requests.reordered,
)
_MOST_ROWS = 8
#: The numbers in a tensor of kind "size".
_COUNTS = (1536, 2560, 4096)
_MOST_STEPS = 40
#: Calls whose header blocks are of one table: it is full after seventy of them.
_CALLS_OF_A_TABLE = 120
_TABLE_SIZE = 4096
_AGENT = ("user-agent", "grpc-c++/1.54.3 grpc-c/31.0.0 (linux; chttp2)")
_SEED = 17
_ROUNDED = (1e-6, 1e-4)


@dataclass(frozen=True, slots=True)
class Asked:
    """The contents of a request, and of the right answer to it."""

    model: str
    id: str
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    #: Outputs that are computed together with other requests' may differ by so much, and by this part of a value.
    rounded: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request as the client in C sends it, and its contents."""

    request: bytes
    asked: Asked
    #: The next one is a step of the same sequence.
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Pool:
    """The requests of one measurement. ``protocol`` as the client in C names it: http, grpc or stream."""

    protocol: str
    #: Sent once on each connection.
    opening: bytes
    exchanges: list[Exchange]


class Numbers:
    """Draws values, ids and trace headers from a seed."""

    def __init__(self) -> None:
        self._values = np.random.default_rng(_SEED)
        self._texts = random.Random(_SEED)

    def addsub(self, id: str = "", rows: int = 1) -> Asked:
        a, b = self._operand(rows, 16), self._operand(rows, 16)
        return Asked("addsub", id, {"INPUT0": a, "INPUT1": b}, {"OUTPUT0": a + b, "OUTPUT1": a - b})

    def identity(self, id: str = "", count: int = 32) -> Asked:
        values = self._operand(count)
        return Asked("identity", id, {"INPUT0": values}, {"OUTPUT0": values})

    def post(self, id: str = "") -> Asked:
        logits = self._values.standard_normal((1, 10)).astype(np.float32)
        powers = np.exp(logits.astype(np.float64))
        probabilities = (powers / powers.sum()).astype(np.float32)
        return Asked("post", id, {"logits": logits}, {"probabilities": probabilities}, _ROUNDED)

    def mlp(self, id: str = "") -> Asked:
        """Returns a request whose products a GPU rounds to ten bits."""
        x = self._values.random((1, 784), np.float32)
        one, two, three = _weights("mlp")
        logits = np.maximum(np.maximum(x @ one, 0) @ two, 0) @ three
        return Asked("mlp", id, {"x": x}, {"logits": logits}, (1e-2, 1e-2))

    def sequence(self) -> Iterator[tuple[Asked, Step]]:
        """Yields the steps of a new sequence."""
        who, length = self._texts.getrandbits(48) + 1, self._texts.randint(1, _MOST_STEPS)
        h = np.zeros((1, 256), np.float32)
        for number in range(length):
            x = self._values.standard_normal((1, 64)).astype(np.float32)
            h = np.tanh(x @ _weights("rnn")["wx"] + h @ _weights("rnn")["wh"])
            asked = Asked("rnn", "", {"x": x}, {"y": h @ _weights("rnn")["wo"]}, _ROUNDED)
            yield asked, Step(who, number == 0, number == length - 1)

    def rows(self) -> int:
        return self._texts.randint(1, _MOST_ROWS)

    def trace(self) -> str:
        """Returns a `traceparent` header's value, as W3C Trace Context defines it."""
        return f"00-{self._texts.getrandbits(128):032x}-{self._texts.getrandbits(64):016x}-01"

    def timeout(self) -> str:
        """Returns a `grpc-timeout` as grpc-core writes it, long enough for any answer."""
        return f"{self._texts.randint(10_000, 99_999)}m"

    def _operand(self, *shape: int) -> np.ndarray:
        """Returns random multiples of 1/16, whose sums and differences are exact in FP32."""
        return (self._values.integers(-(1 << 16), 1 << 16, shape) / 16).astype(np.float32)


@functools.cache
def _weights(model: str) -> Any:
    """Returns a model's parameters, from its model.py."""
    module = runpy.run_path(str(ROOT / "bench" / "models" / model / "1" / "model.py"))
    _, params = module["create"](None, None, jax.devices("cpu")[0])
    return jax.tree.map(np.asarray, params)


def pool(protocol: str, kind: str, size: int) -> Pool:
    """Makes a pool of ``size`` requests of a kind. Raises KeyError: the protocol has no such kind."""
    make = KINDS[protocol][kind]
    opening = b"" if protocol == "http" else grpc_requests.opening(protocol == "stream")
    exchanges = list(islice(make(Numbers()), size))
    # The last sequence may be cut off; its id begins anew in the next round. So does the last table.
    exchanges[-1] = replace(exchanges[-1], goes_on=False)
    return Pool(protocol, opening, exchanges)


def _http(asked: Asked, trace: str = "", write: http_requests.Writer = http_requests.tritonclient) -> Exchange:
    return Exchange(write(asked.model, asked.id, trace, asked.inputs, tuple(asked.outputs)), asked)


def _message(asked: Asked, write: grpc_requests.Writer = grpc_requests.tritonclient) -> bytes:
    return write(asked.model, asked.id, asked.inputs, tuple(asked.outputs))


def _grpc(asked: Asked) -> Exchange:
    return Exchange(grpc_requests.unary(_message(asked)), asked)


def _ids(numbers: Numbers) -> Iterator[Asked]:
    return (numbers.addsub(str(number)) for number in count(1))


def _shapes(numbers: Numbers) -> Iterator[Asked]:
    return (numbers.addsub(rows=numbers.rows()) for _ in count())


def _sizes(numbers: Numbers) -> Iterator[Asked]:
    return (numbers.identity(count=count) for count in itertools.cycle(_COUNTS))


def _mlps(numbers: Numbers) -> Iterator[Asked]:
    return (numbers.mlp() for _ in count())


def _models(numbers: Numbers) -> Iterator[Asked]:
    """Yields requests to three models in turn, as gRPC messages of equal length: the length does not tell the model."""
    models = (numbers.addsub, numbers.identity, numbers.post)
    sizes = [len(_message(make("-"))) for make in models]
    while True:
        for make, size in zip(models, sizes, strict=True):
            yield make("-" * (1 + max(sizes) - size))


def _http_trace(numbers: Numbers) -> Iterator[Exchange]:
    return (_http(numbers.addsub(), numbers.trace()) for _ in count())


def _http_all(numbers: Numbers) -> Iterator[Exchange]:
    for write, asked in zip(itertools.cycle(_HTTP_WRITERS), _ids(numbers)):
        yield _http(asked, numbers.trace(), write)


def _stream_all(numbers: Numbers) -> Iterator[Exchange]:
    for write, asked in zip(itertools.cycle(_GRPC_WRITERS), _ids(numbers)):
        yield Exchange(grpc_requests.on_stream(_message(asked, write)), asked)


def _http_rnn(numbers: Numbers) -> Iterator[Exchange]:
    while True:
        for asked, step in numbers.sequence():
            request = http_requests.tritonclient(asked.model, "", "", asked.inputs, ("y",), step)
            yield Exchange(request, asked, not step.end)


def _stream_rnn(numbers: Numbers) -> Iterator[Exchange]:
    while True:
        for asked, step in numbers.sequence():
            message = grpc_requests.tritonclient(asked.model, "", asked.inputs, ("y",), step)
            yield Exchange(grpc_requests.on_stream(message), asked, not step.end)


def _grpc_trace(numbers: Numbers) -> Iterator[Exchange]:
    """Yields calls whose header blocks use one HPACK table for 120 calls; the first of them empties the table.

    A block can only be read after those before it, so the calls of one table must be sent in order on one connection.
    """
    said = [*grpc_frames.fields("ModelInfer"), ("grpc-accept-encoding", "identity, deflate, gzip")]
    while True:
        encoder = hpack.Encoder()
        encoder.header_table_size = 0
        encoder.header_table_size = _TABLE_SIZE
        for left in reversed(range(_CALLS_OF_A_TABLE)):
            asked, timeout = numbers.addsub(), ("grpc-timeout", numbers.timeout())
            trace = hpack.NeverIndexedHeaderTuple("traceparent", numbers.trace())
            block = encoder.encode([*said, timeout, _AGENT, trace], huffman=False)
            yield Exchange(grpc_requests.unary_with(block, _message(asked)), asked, left > 0)


KINDS: dict[str, dict[str, Callable[[Numbers], Iterator[Exchange]]]] = {
    "http": {
        "id": lambda numbers: map(_http, _ids(numbers)),
        "trace": _http_trace,
        "all": _http_all,
        "shape": lambda numbers: map(_http, _shapes(numbers)),
        "size": lambda numbers: map(_http, _sizes(numbers)),
        "models": lambda numbers: (_http(replace(asked, id="")) for asked in _models(numbers)),
        "new": _http_trace,
        "rnn": _http_rnn,
    },
    "grpc": {
        "id": lambda numbers: map(_grpc, _ids(numbers)),
        "trace": _grpc_trace,
        "models": lambda numbers: map(_grpc, _models(numbers)),
        "shape": lambda numbers: map(_grpc, _shapes(numbers)),
        "size": lambda numbers: map(_grpc, _sizes(numbers)),
        "mlp": lambda numbers: map(_grpc, _mlps(numbers)),
    },
    "stream": {"all": _stream_all, "rnn": _stream_rnn},
}

_CONNECTIONS = (4, 16)
#: Rows that have more of them besides.
_MANY = {("http", "all"): (64, 256, 3000), ("stream", "rnn"): (64,)}


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of load, a row of the table."""

    protocol: str
    kind: str
    connections: int

    @property
    def name(self) -> str:
        """Returns the name that ``--rows`` uses."""
        return f"vary-{self.protocol}-{self.kind}-c{self.connections}"

    @property
    def renews(self) -> bool:
        """Returns whether each request has a connection of its own."""
        return self.kind == "new"


ROWS = {
    row.name: row
    for protocol, kinds in KINDS.items()
    for kind in kinds
    for connections in (*_CONNECTIONS, *_MANY.get((protocol, kind), ()))
    for row in (Row(protocol, kind, connections),)
}
