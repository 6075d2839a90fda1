"""Makes pools of requests that differ from each other, each with its right answer.

    id      ids count up; values, as in all pools, are random     models  three models in turn
    trace   a trace header that never repeats, over gRPC          new     like "trace"; the client connects for each request
            a deadline too
    shape   one to eight rows                                     all     id, trace header and values differ, and four clients'
                                                                          ways of writing a request come in turn
    rnn     sequences of one to forty steps of a recurrent network, with random ids

A pool is made from a seed, so two servers of a comparison are asked the same.
"""

from __future__ import annotations

import functools
import random
import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

import jax
import numpy as np

from bench.server import ROOT
from bench.vary import grpc_headers, grpc_requests, http_requests
from bench.vary.step import Step

_HTTP_WRITERS = (http_requests.tritonclient, http_requests.requests, http_requests.go, http_requests.curl)
_GRPC_WRITERS = (
    grpc_requests.tritonclient,
    grpc_requests.all_outputs,
    grpc_requests.versioned,
    grpc_requests.reordered,
)
_MOST_ROWS = 8
_MOST_STEPS = 40
#: Calls whose header blocks are of one table: it is full after seventy of them.
_CALLS_OF_A_TABLE = 120
_SEED = 17


@dataclass(frozen=True, slots=True)
class Asked:
    """The contents of a request, and of the right answer to it."""

    model: str
    id: str
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    #: The outputs are computed together with other requests', so their last bits may differ.
    rounded: bool = False


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

    def identity(self, id: str = "") -> Asked:
        values = self._operand(32)
        return Asked("identity", id, {"INPUT0": values}, {"OUTPUT0": values})

    def post(self, id: str = "") -> Asked:
        logits = self._values.standard_normal((1, 10)).astype(np.float32)
        powers = np.exp(logits.astype(np.float64))
        probabilities = (powers / powers.sum()).astype(np.float32)
        return Asked("post", id, {"logits": logits}, {"probabilities": probabilities}, rounded=True)

    def sequence(self) -> Iterator[tuple[Asked, Step]]:
        """Yields the steps of a new sequence."""
        who, length = self._texts.getrandbits(48) + 1, self._texts.randint(1, _MOST_STEPS)
        h = np.zeros((1, 256), np.float32)
        for number in range(length):
            x = self._values.standard_normal((1, 64)).astype(np.float32)
            h = np.tanh(x @ _weights()["wx"] + h @ _weights()["wh"])
            asked = Asked("rnn", "", {"x": x}, {"y": h @ _weights()["wo"]}, rounded=True)
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
def _weights() -> dict[str, np.ndarray]:
    """Returns the weights of the recurrent network, from its model.py."""
    module = runpy.run_path(str(ROOT / "bench" / "models" / "rnn" / "1" / "model.py"))
    _, params = module["create"](None, None, jax.devices("cpu")[0])
    return {name: np.asarray(array) for name, array in params.items()}


def pool(protocol: str, kind: str, count: int) -> Pool:
    """Makes a pool of ``count`` requests of a kind. Raises KeyError: the protocol has no such kind."""
    make = KINDS[protocol][kind]
    opening = b"" if protocol == "http" else grpc_requests.opening(protocol == "stream")
    exchanges = list(islice(make(Numbers()), count))
    # The last sequence may be cut off; its id begins anew in the next round. So does the last table.
    exchanges[-1] = replace(exchanges[-1], goes_on=False)
    return Pool(protocol, opening, exchanges)


def _http(asked: Asked, trace: str = "", write: http_requests.Writer = http_requests.tritonclient) -> Exchange:
    return Exchange(write(asked.model, asked.id, trace, asked.inputs, tuple(asked.outputs)), asked)


def _http_id(numbers: Numbers) -> Iterator[Exchange]:
    number = 0
    while number := number + 1:
        yield _http(numbers.addsub(str(number)))


def _http_trace(numbers: Numbers) -> Iterator[Exchange]:
    while True:
        yield _http(numbers.addsub(), numbers.trace())


def _http_shape(numbers: Numbers) -> Iterator[Exchange]:
    while True:
        yield _http(numbers.addsub(rows=numbers.rows()))


def _http_models(numbers: Numbers) -> Iterator[Exchange]:
    while True:
        yield _http(numbers.addsub())
        yield _http(numbers.identity())
        yield _http(numbers.post())


def _http_all(numbers: Numbers) -> Iterator[Exchange]:
    number = 0
    while True:
        for write in _HTTP_WRITERS:
            number += 1
            yield _http(numbers.addsub(str(number)), numbers.trace(), write)


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


def _grpc(asked: Asked, write: grpc_requests.Writer = grpc_requests.tritonclient) -> bytes:
    return write(asked.model, asked.id, asked.inputs, tuple(asked.outputs))


def _grpc_id(numbers: Numbers) -> Iterator[Exchange]:
    number = 0
    while number := number + 1:
        asked = numbers.addsub(str(number))
        yield Exchange(grpc_requests.unary(_grpc(asked)), asked)


def _grpc_trace(numbers: Numbers) -> Iterator[Exchange]:
    """Yields calls whose header blocks use one HPACK table for 120 calls; the first of them empties the table.

    A block can only be read after those before it, so the calls of one table must be sent in order on one connection.
    """
    while True:
        encoder, before = grpc_headers.Encoder(), grpc_headers.EMPTIED
        for left in reversed(range(_CALLS_OF_A_TABLE)):
            asked = numbers.addsub()
            block = before + encoder.encode(*grpc_headers.fields("ModelInfer", numbers.timeout(), numbers.trace()))
            yield Exchange(grpc_requests.unary_with(block, _grpc(asked)), asked, left > 0)
            before = b""


def _grpc_shape(numbers: Numbers) -> Iterator[Exchange]:
    while True:
        asked = numbers.addsub(rows=numbers.rows())
        yield Exchange(grpc_requests.unary(_grpc(asked)), asked)


def _grpc_models(numbers: Numbers) -> Iterator[Exchange]:
    """Yields calls to three models in turn, with messages of equal length: the length does not tell the model."""
    models = (numbers.addsub, numbers.identity, numbers.post)
    sizes = [len(_grpc(make("-"))) for make in models]
    ids = ["-" * (1 + max(sizes) - size) for size in sizes]
    while True:
        for make, id in zip(models, ids, strict=True):
            asked = make(id)
            yield Exchange(grpc_requests.unary(_grpc(asked)), asked)


def _stream_all(numbers: Numbers) -> Iterator[Exchange]:
    number = 0
    while True:
        for write in _GRPC_WRITERS:
            number += 1
            asked = numbers.addsub(str(number))
            yield Exchange(grpc_requests.on_stream(_grpc(asked, write)), asked)


KINDS: dict[str, dict[str, Callable[[Numbers], Iterator[Exchange]]]] = {
    "http": {
        "id": _http_id,
        "trace": _http_trace,
        "all": _http_all,
        "shape": _http_shape,
        "models": _http_models,
        "new": _http_trace,
        "rnn": _http_rnn,
    },
    "grpc": {"id": _grpc_id, "trace": _grpc_trace, "models": _grpc_models, "shape": _grpc_shape},
    "stream": {"all": _stream_all, "rnn": _stream_rnn},
}
