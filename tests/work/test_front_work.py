"""Tests what one inference request costs the HTTP front, counted in its own code: instructions, system calls, memory, garbage."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tensord.daemon.front.bounded_cache import BoundedCache
from tensord.daemon.http import request_codec
from tensord.daemon.http.exchange import Exchange
from tensord.daemon.http.message_head import InferHead, TextKey
from tensord.daemon.http.prepared import ParsedRequest, PreparedRequests
from tensord.daemon.http.reception import Reception
from tensord.shm.lane import WorkerLane
from tensord.shm.messages import RegionSlice, Slice
from tests.records import Tensor, WholeAnswer, WholeRequest
from tests.work.baseline import Baseline, counts
from tests.work.connection import FIRST_SEQUENCE, MIB, OPTIONS, SEQUENCES, Bench, KeptTransport
from tests.work.counter import Work, without_collector

#: Requests before counting begins: what came twice is known.
WARM = 3
COUNT = 20


def head(model: str, text: bytes, tail: int, extra: bytes = b"") -> bytes:
    """Builds the request line and header fields as perf_analyzer sends them."""
    return (
        b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nUser-Agent: libcurl-agent/1.0\r\nAccept: */*\r\n"
        b"Inference-Header-Content-Length: %d\r\nContent-Type: application/octet-stream\r\n%bContent-Length: %d\r\n\r\n"
    ) % (model.encode(), len(text), extra, len(text) + tail)


def said(inputs: list[tuple[str, list[int], dict[str, Any]]], outputs: list[tuple[str, dict[str, Any]]]) -> bytes:
    return json.dumps(
        {
            "id": "",
            "inputs": [
                {"name": name, "datatype": "FP32", "shape": shape, "parameters": parameters}
                for name, shape, parameters in inputs
            ],
            "outputs": [{"name": name, "parameters": parameters} for name, parameters in outputs],
        }
    ).encode()


_BINARY = {"binary_data_size": 64}
_REGION = {"shared_memory_region": "region", "shared_memory_byte_size": 64}
_SMALL = said(
    [("INPUT0", [1, 16], _BINARY), ("INPUT1", [1, 16], _BINARY)],
    [("OUTPUT0", {"binary_data": True}), ("OUTPUT1", {"binary_data": True})],
)
_SHARED = said(
    [("INPUT0", [1, 16], _REGION), ("INPUT1", [1, 16], _REGION)], [("OUTPUT0", _REGION), ("OUTPUT1", _REGION)]
)
_LARGE = said([("INPUT0", [MIB // 4], {"binary_data_size": MIB})], [("OUTPUT0", {"binary_data": True})])
_TWO_LARGE = said(
    [(name, [MIB // 8], {"binary_data_size": MIB // 2}) for name in ("INPUT0", "INPUT1")],
    [("OUTPUT0", {"binary_data": True}), ("OUTPUT1", {"binary_data": True})],
)
_VALUES = json.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": list(range(16))}]}
).encode()


def binary(model: str, text: bytes, tail: int) -> bytes:
    return head(model, text, tail) + text + bytes(tail)


def with_id(number: int) -> bytes:
    """Builds a request with an id of its own: the head repeats, the JSON does not."""
    return binary("addsub", _SMALL.replace(b'"id": ""', b'"id": "%08d"' % number), 128)


def with_trace(number: int) -> bytes:
    """Builds a request with a trace header of its own, as behind a proxy: the JSON repeats, the head does not."""
    line = b"traceparent: 00-%032x-%016x-01\r\n" % (number + 1, number + 1)
    return head("addsub", _SMALL, 128, line) + _SMALL + bytes(128)


def with_id_and_trace(number: int) -> bytes:
    text = _SMALL.replace(b'"id": ""', b'"id": "%08d"' % number)
    return head("addsub", text, 128, b"traceparent: 00-%032x-%016x-01\r\n" % (number, number)) + text + bytes(128)


def with_scheduling(number: int) -> bytes:
    """Builds a request with a priority, timeout and sequence of its own."""
    said = b'"parameters": {"priority": %d, "timeout": %d, "sequence_id": %d, "sequence_start": true}'
    text = _SMALL.replace(b'"id": ""', said % (number % 9 + 1, 10000 + number, 10000 + number))
    return binary("addsub", text, 128)


def with_priority_and_timeout(number: int) -> bytes:
    said = b'"parameters": {"priority": %d, "timeout": %d}' % (number % 9 + 1, 10000 + number)
    return binary("addsub", _SMALL.replace(b'"id": ""', said), 128)


def of_sequences_in_turn(number: int, model: str = "sumseq") -> bytes:
    """Builds the next step of one of the worker's sequences, in turn."""
    said = b'"parameters": {"sequence_id": %d, "sequence_start": false, "sequence_end": false}'
    return binary(model, _SMALL.replace(b'"id": ""', said % (FIRST_SEQUENCE + number % SEQUENCES)), 128)


def of_sets_in_turn(number: int) -> bytes:
    """Builds a request that names one of eight parameter sets."""
    return binary("addsub", _SMALL.replace(b'"id": ""', b'"parameters": {"parameter_set": "s%d"}' % (number % 8)), 128)


def of_models_in_turn(number: int) -> bytes:
    return binary(("addsub", "identity")[number % 2], _SMALL, 128)


def of_shapes_in_turn(number: int) -> bytes:
    rows = number % 8 + 1
    inputs = [(name, [rows, 16], {"binary_data_size": 64 * rows}) for name in ("INPUT0", "INPUT1")]
    outputs = [(name, {"binary_data": True}) for name in ("OUTPUT0", "OUTPUT1")]
    return binary("addsub", said(inputs, outputs), 128 * rows)


def that_never_repeats(number: int) -> bytes:
    """Builds a request with an id in a parameter, so that no two requests are of one kind."""
    text = _SMALL.replace(b'"id": ""', b'"parameters": {"request": %d}' % (number + 1000))
    return binary("addsub", text, 128)


def as_json(number: int) -> bytes:
    return (
        b"POST /v2/models/addsub/infer HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nContent-Length: %d\r\n\r\n" % len(_VALUES)
    ) + _VALUES


def two_small(lane: WorkerLane, record: WholeRequest) -> WholeAnswer:
    content = np.zeros((1, 16), np.float32).tobytes()
    outputs = tuple(Tensor(name, "FP32", (1, 16), content) for name in ("OUTPUT0", "OUTPUT1"))
    return WholeAnswer(record.request_id, version=1, outputs=outputs)


def two_in_regions(lane: WorkerLane, record: WholeRequest) -> WholeAnswer:
    place = RegionSlice("region", 0, 64)
    outputs = tuple(Tensor(name, "FP32", (1, 16), place) for name in ("OUTPUT0", "OUTPUT1"))
    return WholeAnswer(record.request_id, version=1, outputs=outputs)


def one_large(lane: WorkerLane, record: WholeRequest) -> WholeAnswer:
    lease = lane.loan(MIB)
    assert lease is not None
    return WholeAnswer(
        record.request_id, version=1, outputs=(Tensor("OUTPUT0", "FP32", (MIB // 4,), lease.place),), lease=lease.key
    )


def two_large(lane: WorkerLane, record: WholeRequest) -> WholeAnswer:
    lease = lane.loan(MIB)
    assert lease is not None
    segment, offset, half = lease.place.segment, lease.place.offset, MIB // 2
    outputs = tuple(
        Tensor(name, "FP32", (MIB // 8,), Slice(segment, offset + at, half))
        for name, at in (("OUTPUT0", 0), ("OUTPUT1", half))
    )
    return WholeAnswer(record.request_id, version=1, outputs=outputs, lease=lease.key)


@dataclass(frozen=True)
class Row:
    """A kind of request, and what it may cost besides bytecodes."""

    name: str
    request: Callable[[int], bytes]
    complete: Callable[[WorkerLane, WholeRequest], WholeAnswer]
    #: Python's memory at its highest above where it was, bytes.
    peak: int = 21_000
    #: On the lane: the record out, its answer in. Each answer in a lease is given back in a datagram of its own.
    lane_calls: int = 2
    #: Sent one after the other on a connection, or on a new one each.
    fresh: bool = False
    #: Requests before counting begins.
    warm: int = WARM


ROWS = [
    Row("small", lambda _: binary("addsub", _SMALL, 128), two_small),
    Row("small-shm", lambda _: binary("addsub", _SHARED, 0), two_in_regions),
    Row("small-ids", with_id, two_small),
    Row("small-trace", with_trace, two_small),
    Row("small-all", with_id_and_trace, two_small),
    Row("small-priority", with_priority_and_timeout, two_small),
    Row("small-sequences", with_scheduling, two_small),
    Row("small-steps", of_sequences_in_turn, two_small, warm=2 * SEQUENCES),
    Row("small-sets", of_sets_in_turn, two_small, warm=24),
    Row("small-models", of_models_in_turn, two_small, warm=4),
    Row("small-shapes", of_shapes_in_turn, two_small, warm=24),
    # As on a connection that is used once.
    Row("small-new", lambda _: binary("addsub", _SMALL, 128), two_small, fresh=True),
    # Forms that never come again travel whole.
    Row("small-forms", that_never_repeats, two_small),
    Row("small-json", as_json, two_small),
    Row("two-large", lambda _: binary("addsub", _TWO_LARGE, MIB), two_large, peak=45_000, lane_calls=3),
    Row("1MiB", lambda _: binary("identity", _LARGE, MIB), one_large, peak=45_000, lane_calls=3),
]
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    made.close()


async def ask(bench: Bench, row: Row, count: int, work: Work, transport: KeptTransport | None = None) -> KeptTransport:
    """Sends requests one after the other; each answer must be good and one write."""
    transport = transport or bench.connect()
    for number in range(count):
        if row.fresh:
            transport = bench.connect()
        before = len(transport.writes)
        assert await bench.answer(work, [(transport, row.request(number))], row.complete) == 1
        assert len(transport.writes) == before + 1
        assert bytes(transport.writes.pop()[0]).startswith(b"HTTP/1.1 200 OK\r\n")
    return transport


@counts
@rows
async def test_instructions(row: Row, baseline: Baseline, bench: Bench) -> None:
    transport = await ask(bench, row, row.warm, Work())
    work = Work()
    await ask(bench, row, COUNT, work, transport)
    baseline.check(f"http {row.name}", work.instructions / COUNT)


_UNREMEMBERED = PreparedRequests(0, OPTIONS.arenas.inline_byte_size)


class Unremembering:
    """Reads every request as if it were the first: the ordinary way, with nothing beside it."""

    texts: BoundedCache[Any, ParsedRequest] = BoundedCache(0)

    @staticmethod
    def read(head: InferHead, text: bytes, tail_size: int, apart: None = None) -> ParsedRequest:
        return _UNREMEMBERED.prepare(head, request_codec.decode(text, tail_size, head.model, apart))

    @classmethod
    def meet(cls, head: InferHead, key: tuple[TextKey, bytes]) -> ParsedRequest:
        return cls.read(head, key[1], key[0][2])


@counts
async def test_what_is_never_seen_again_costs_little_more_than_the_ordinary_way(bench: Bench) -> None:
    """A request that never repeats pays for the lookup of a prepared request, and for being remembered for a while."""
    row = next(row for row in ROWS if row.name == "small-forms")

    async def count() -> float:
        work = Work()
        transport = await ask(bench, row, row.warm, Work())
        for number in range(row.warm, row.warm + COUNT):
            await bench.answer(work, [(transport, row.request(number))], row.complete)
            transport.writes.clear()
        assert bench.submitter.numbers.assigned == 0
        return work.instructions / COUNT

    never_again = await count()
    bench.serving.prepared = Unremembering()  # type: ignore[assignment]
    bench.submitter.numbers.number_again = lambda prepared: None  # type: ignore[method-assign]
    assert 0 < never_again <= 1.3 * await count()


@counts
async def test_instructions_of_small_requests_that_come_together(baseline: Baseline, bench: Bench) -> None:
    """Requests that arrive together share the cost of one iteration of the event loop."""
    row, together = ROWS[0], 8
    transports = [await ask(bench, row, WARM, Work()) for _ in range(together)]
    work = Work()
    for _ in range(COUNT):
        requests = [(transport, row.request(0)) for transport in transports]
        await bench.answer(work, requests, row.complete)
    baseline.check("http small-together", work.instructions / COUNT / together)


@rows
async def test_system_calls_on_the_lane(row: Row, bench: Bench) -> None:
    transport = await ask(bench, row, row.warm, Work())
    work = Work()
    await ask(bench, row, COUNT, work, transport)
    assert work.system_calls.total() <= row.lane_calls * COUNT, work.system_calls


@rows
async def test_memory_at_its_highest(row: Row, bench: Bench) -> None:
    """A large tensor is never in Python's memory: it goes from the socket to the arena, and from an arena to the socket."""
    content = row.request(0)
    transport = await ask(bench, row, row.warm, Work())
    if row.fresh:
        transport = bench.connect()
    tracemalloc.start()
    try:
        peak = await peak_of(bench, row, transport, content)
    finally:
        tracemalloc.stop()
    assert 0 < peak <= row.peak


async def peak_of(bench: Bench, row: Row, transport: KeptTransport, content: bytes) -> int:
    """Returns the peak of memory of a request; a first one is not counted, because tracing itself takes memory."""
    for _ in range(2):
        gc.collect()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        await bench.answer(Work(), [(transport, content)], row.complete)
        peak = tracemalloc.get_traced_memory()[1] - before
    return peak


@rows
async def test_nothing_is_left_for_the_garbage_collector(row: Row, bench: Bench) -> None:
    """A request that leaves a cycle makes the collector run every few dozen requests, in the middle of others."""
    transport = await ask(bench, row, row.warm, Work())
    contents = [row.request(number) for number in range(COUNT)]
    with without_collector():
        for content in contents:
            await bench.answer(Work(), [(transport, content)], row.complete)
            transport.writes.clear()
        assert gc.collect() == 0


_REFUSED_TEXT = _LARGE + b" " * (64 << 10)


@pytest.mark.parametrize("sent", [1.0, 0.3], ids=["whole", "left midway"])
@pytest.mark.parametrize(
    "request_",
    [
        head("missing", _LARGE, MIB) + _LARGE + bytes(MIB),
        head("missing", _REFUSED_TEXT, 0) + _REFUSED_TEXT,
        head("addsub", _LARGE, 4 * MIB) + _LARGE + bytes(4 * MIB),
        head("missing", _LARGE, MIB, b"Content-Encoding: gzip\r\n") + _LARGE + bytes(MIB),
        head("addsub", _LARGE, MIB, b"Content-Encoding: gzip\r\n") + _LARGE + bytes(MIB),
    ],
    ids=["missing model", "missing model, JSON", "no room ever", "missing model, gzip", "no gzip"],
)
async def test_a_refused_body_leaves_nothing_for_the_garbage_collector(request_: bytes, sent: float) -> None:
    """The error that refuses a body must not keep what it was raised through: that holds up to 256 KiB of the body."""
    with contextlib.closing(Bench()) as bench, without_collector():
        for _ in range(3):
            written = await bench.come_and_go(request_[: int(sent * len(request_))])
            assert sent < 1 or written.startswith(b"HTTP/1.1 40"), written
            assert [each for each in gc.get_objects() if type(each) in (Exchange, Reception)] == []


@pytest.mark.parametrize("count", [2, 16])
async def test_small_requests_that_come_together_are_one_datagram(count: int, bench: Bench) -> None:
    """One datagram is one wake-up of a busy worker, and mostly one batch."""
    row = ROWS[0]
    transports = [await ask(bench, row, WARM, Work()) for _ in range(count)]
    work = Work()
    requests = [(transport, row.request(0)) for transport in transports]
    await bench.occupy()
    assert await bench.answer(work, requests, row.complete) == 1
    assert work.system_calls.total() <= 2, work.system_calls


@pytest.mark.parametrize("count", [2, 16])
async def test_an_idle_worker_begins_with_the_first_of_small_requests_that_come_together(
    count: int, bench: Bench
) -> None:
    """The others are one datagram all the same."""
    row = ROWS[0]
    transports = [await ask(bench, row, WARM, Work()) for _ in range(count)]
    work = Work()
    requests = [(transport, row.request(0)) for transport in transports]
    assert await bench.answer(work, requests, row.complete) == 2
    assert work.system_calls.total() <= 4, work.system_calls


async def test_a_large_request_does_not_wait_for_others(bench: Bench) -> None:
    """A large request is sent before the rest of the iteration's reads, which may be megabytes."""
    row = ROWS[-1]
    transports = [await ask(bench, row, WARM, Work()) for _ in range(2)]
    requests = [(transport, row.request(0)) for transport in transports]
    assert await bench.answer(Work(), requests, row.complete) == 2


@pytest.mark.parametrize("content", [b"\n", b"\nA", b"\r\n\r"])
def test_the_bytes_of_a_body_cost_the_same_whatever_they_are(content: bytes) -> None:
    """A body whose length the head gives is not searched for lines; a model that nobody serves gets no place for it."""

    async def refuse(body: bytes) -> int:
        bench, work = Bench(), Work()
        transport = bench.connect()
        with work.counting():
            transport.arrive(
                b"POST /v2/models/nothing/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size + body
            )
        assert len(transport.writes) == 1
        bench.close()
        return work.instructions

    size = MIB + 5
    zeros, lines = asyncio.run(refuse(bytes(size))), asyncio.run(refuse((content * size)[:size]))
    assert lines <= 1.1 * zeros


async def test_a_refusal_that_is_remembered_keeps_no_request() -> None:
    """A target's mistake is found once, and raised for each request that names it."""
    refused = b"POST /v2/models/addsub/versions/0/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    with contextlib.closing(Bench()) as bench:
        transport, kept = bench.connect(), []
        for _ in range(10):
            transport.arrive(refused)
            await asyncio.sleep(0)
            kept.append(sum(type(each) is Exchange for each in gc.get_objects()))
        assert [bytes(answer).startswith(b"HTTP/1.1 404 ") for (answer,) in transport.writes] == [True] * 10
        assert len(set(kept)) == 1
