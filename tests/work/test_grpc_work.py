"""Tests what one message costs the gRPC front, counted in its own code: instructions, system calls, memory, garbage."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from tensord.daemon.grpc import frames
from tensord.daemon.grpc.arriving_message import ArrivingMessage
from tensord.daemon.grpc.prepared import PreparedMessages
from tensord.daemon.grpc.unary_infer import UnaryInfer
from tensord.daemon.grpc.walk import walk
from tensord.shm.common.scheduling import UNSCHEDULED
from tensord.shm.lane import WorkerLane
from tests.daemon.grpc.frame_client import INFER, STREAM
from tests.records import WholeAnswer, WholeRequest
from tests.work.baseline import Baseline, counts
from tests.work.connection import FIRST_SEQUENCE, MIB, SEQUENCES
from tests.work.counter import Work, without_collector
from tests.work.grpc_connection import GrpcBench, call, head_of, message, opened, payloads
from tests.work.test_front_work import one_large, two_in_regions, two_small

Infer = service_pb2.ModelInferRequest
Parameter = service_pb2.InferParameter
#: Messages before counting begins: after the first a client repeats itself, and its second is the first of a form.
WARM = 3
#: What a message may cost that differs from the last one in what is its own, and one of a client that has just come.
MAX_MORE = 1.5
#: What a deadline and a trace header cost, times what a call without them does.
MAX_METADATA = 1.15
#: What a step of a sequence costs, times what another request does.
MAX_STEP = 1.2
COUNT = 20
_FP32 = {"datatype": "FP32", "shape": [1, 16]}
_REGION = {
    "shared_memory_region": Parameter(string_param="region"),
    "shared_memory_byte_size": Parameter(int64_param=64),
}
_WANTS_FINAL = {"triton_enable_empty_final_response": Parameter(bool_param=True)}


def small(client_id: str, **fields: Any) -> bytes:
    """Builds a message as perf_analyzer does, with its tensors inside."""
    asked = Infer(
        model_name="addsub",
        id=client_id,
        inputs=[Infer.InferInputTensor(name=name, **_FP32) for name in ("INPUT0", "INPUT1")],
        outputs=[Infer.InferRequestedOutputTensor(name=name) for name in ("OUTPUT0", "OUTPUT1")],
        raw_input_contents=[bytes(64), bytes(64)],
        **fields,
    )
    return bytes(asked.SerializeToString())


def shared(client_id: str, **fields: Any) -> bytes:
    """Builds a message as perf_analyzer does, with its tensors in regions."""
    asked = Infer(
        model_name="addsub",
        id=client_id,
        inputs=[Infer.InferInputTensor(name=name, parameters=_REGION, **_FP32) for name in ("INPUT0", "INPUT1")],
        outputs=[Infer.InferRequestedOutputTensor(name=name, parameters=_REGION) for name in ("OUTPUT0", "OUTPUT1")],
        **fields,
    )
    return bytes(asked.SerializeToString())


def large(client_id: str, **fields: Any) -> bytes:
    """Builds a message as perf_analyzer does, with 1 MiB."""
    asked = Infer(
        model_name="identity",
        id=client_id,
        inputs=[Infer.InferInputTensor(name="INPUT0", datatype="FP32", shape=[MIB // 4])],
        outputs=[Infer.InferRequestedOutputTensor(name="OUTPUT0")],
        raw_input_contents=[bytes(MIB)],
        **fields,
    )
    return bytes(asked.SerializeToString())


@dataclass(frozen=True)
class Row:
    """A kind of message, and what it may cost besides bytecodes."""

    name: str
    content: Callable[..., bytes]
    complete: Callable[[WorkerLane, WholeRequest], WholeAnswer]
    #: Calls of their own, or all of as many streams of one connection, with a message of each in one chunk.
    streams: int = 0
    #: Python's memory at its highest above where it was, bytes.
    peak: int = 21_000
    #: On the lane: the record out, its answer in. Each answer in a lease is given back in a datagram of its own.
    lane_calls: int = 2
    #: What the client grants again with each message.
    granted: int = 240


ROWS = [
    Row("stream", small, two_small, streams=1),
    Row("stream-shm", shared, two_in_regions, streams=1),
    Row("streams-together", small, two_small, streams=4),
    Row("unary", small, two_small),
    Row("unary-shm", shared, two_in_regions),
    Row("stream-large", large, one_large, streams=1, peak=27_500, lane_calls=3, granted=MIB + 240),
    Row("unary-large", large, one_large, peak=27_500, lane_calls=3, granted=MIB + 240),
]
in_c = pytest.mark.skipif(walk.__name__ != "walk", reason="the walk was not compiled")
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


class Asking:
    """A client of a bench that sends chunks, each with as many messages as a row says, and checks the answers."""

    def __init__(self, bench: GrpcBench, row: Row) -> None:
        self._bench = bench
        self._row = row
        self.transport = bench.connect()
        self._numbers = itertools.count(1, 2)
        self._streams = [next(self._numbers) for _ in range(row.streams)]
        self._ids = itertools.count(281474976710656)
        if self._streams:
            self.transport.arrive(b"".join(opened(number, STREAM) for number in self._streams))

    def chunk(self) -> bytes:
        row = self._row
        if not row.streams:
            return call(next(self._numbers), row.content(""), row.granted)
        return b"".join(
            message(number, row.content(str(next(self._ids)), parameters=_WANTS_FINAL), row.granted)
            for number in self._streams
        )

    async def ask(self, work: Work, content: bytes) -> list[bytes | memoryview]:
        """Returns what was written, as it lay."""
        await self._bench.answer(work, [(self.transport, content)], self._row.complete, max(1, len(self._streams)))
        return self.transport.writes.pop()

    async def warm(self) -> None:
        await asyncio.sleep(0)
        self.transport.writes.clear()
        for _ in range(WARM):
            written = b"".join(await self.ask(Work(), self.chunk()))
            assert len(payloads(written, frames.DATA)) == max(1, len(self._streams))


@contextlib.asynccontextmanager
async def client_of(row: Row) -> AsyncIterator[Asking]:
    """Yields a client that repeats itself already."""
    with contextlib.closing(GrpcBench()) as bench:
        made = Asking(bench, row)
        await made.warm()
        yield made


@pytest.fixture
async def asking(row: Row) -> AsyncIterator[Asking]:
    async with client_of(row) as made:
        yield made


@counts
@in_c
@rows
async def test_instructions(row: Row, baseline: Baseline, asking: Asking) -> None:
    work = Work()
    for _ in range(COUNT):
        await asking.ask(work, asking.chunk())
    baseline.check(f"grpc {row.name}", work.instructions / COUNT / max(1, row.streams))


@rows
async def test_system_calls_on_the_lane(row: Row, asking: Asking) -> None:
    """Requests that come together take two datagrams: an idle worker begins with the first."""
    work = Work()
    for _ in range(COUNT):
        await asking.ask(work, asking.chunk())
    assert work.system_calls.total() <= (4 if row.streams > 1 else row.lane_calls) * COUNT, work.system_calls


@rows
async def test_memory_at_its_highest(row: Row, asking: Asking) -> None:
    tracemalloc.start()
    try:
        peak = 0
        for _ in range(2):  # the second, so that what tracing itself takes is there before
            content = asking.chunk()
            gc.collect()
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            await asking.ask(Work(), content)
            peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert 0 < peak <= row.peak


@rows
async def test_nothing_is_left_for_the_garbage_collector(row: Row, asking: Asking) -> None:
    """A message that leaves a cycle makes the collector run every few dozen messages, in the middle of others."""
    contents = [asking.chunk() for _ in range(COUNT)]
    with without_collector():
        for content in contents:
            await asking.ask(Work(), content)
        assert gc.collect() == 0


async def test_a_connection_leaves_nothing_for_the_garbage_collector() -> None:
    """Its parts refer to each other; where each call has a connection of its own the collector would run all the time."""
    with contextlib.closing(GrpcBench()) as bench:
        for _ in range(2):
            with without_collector():
                await bench.come_and_go()
                garbage = gc.collect()
        assert garbage == 0


def missing(content: bytes) -> bytes:
    """Builds the same message for a model that is not there."""
    asked = Infer.FromString(content)
    asked.model_name = "missing"
    return bytes(asked.SerializeToString())


def broken(content: bytes) -> bytes:
    """Builds the same message with something that is no field behind its tensors."""
    return content + b"\x0f"


@pytest.mark.parametrize("sent", [1.0, 0.3], ids=["whole", "left midway"])
@pytest.mark.parametrize("make", [missing, broken])
async def test_a_refused_message_leaves_nothing_for_the_garbage_collector(
    make: Callable[[bytes], bytes], sent: float
) -> None:
    """The error that refuses a message must not keep what it was raised through, which holds some of the message's bytes."""
    content = call(1, make(large("")), 240)
    with contextlib.closing(GrpcBench()) as bench, without_collector():
        for _ in range(3):
            written = await bench.come_and_go(content[: int(sent * len(content))])
            assert sent < 1 or b"grpc-message" in written
            assert [each for each in gc.get_objects() if type(each) in (ArrivingMessage, UnaryInfer)] == []


def other_shape(client_id: str, **fields: Any) -> bytes:
    """Builds a message like ``small`` with one more dimension and as many values."""
    asked = Infer.FromString(small(client_id, **fields))
    for each in asked.inputs:
        each.shape[:] = [1, 1, 16]
    return bytes(asked.SerializeToString())


def other_model(client_id: str, **fields: Any) -> bytes:
    """Builds a message to another model that is as long."""
    asked = Infer.FromString(small(client_id, **fields))
    asked.model_name = "subadd"
    return bytes(asked.SerializeToString())


async def instructions(
    row: Row,
    contents: list[bytes],
    heads: list[bytes] | None = None,
    warm: int = 1,
    connections: int = 1,
    others: Iterator[bytes] | None = None,
) -> float:
    """Returns the mean bytecodes of a message when these come in turn.

    Args:
      heads: header blocks of the calls, in turn.
      warm: how often, times two, each message is sent before; not counted.
      connections: above 1: each counted message comes on a new connection, of which it is the first.
      others: messages that are counted instead.
    """
    async with client_of(row) as asking:
        transport, numbers = asking.transport, {}

        async def ask(content: bytes, work: Work, turn: int) -> None:
            number = numbers.get(transport, 1 if not row.streams else asking._streams[0])
            if row.streams:
                chunk = message(number, content, row.granted)
            else:
                number = next(asking._numbers) if transport is asking.transport else 1
                head = heads[turn % len(heads)] if heads else None
                chunk = call(number, content, row.granted, head)
            await asking._bench.answer(work, [(transport, chunk)], row.complete)
            transport.writes.clear()

        for turn in range(2 * max(warm, 1)):
            for content in contents:
                await ask(content, Work(), turn)
        work = Work()
        for turn in range(COUNT):
            if connections > 1:
                transport = asking._bench.connect()
                await asyncio.sleep(0)
                transport.writes.clear()
            await ask(contents[turn % len(contents)] if others is None else next(others), work, turn)
    return work.instructions / COUNT


def scheduled(number: int) -> bytes:
    """Builds a message with another priority, timeout and sequence for each number."""
    parameters = {
        "priority": Parameter(int64_param=number % 9 + 1),
        "timeout": Parameter(int64_param=10000 + number),
        "sequence_id": Parameter(string_param=f"sequence {number}"),
        "sequence_start": Parameter(bool_param=True),
    }
    return small("", parameters=parameters)


@counts
@in_c
@pytest.mark.parametrize("row", [row for row in ROWS if row.name in ("stream", "unary")], ids=lambda row: row.name)
async def test_scheduling_that_differs(row: Row) -> None:
    """Scheduling parameters seen before are recognized by their bytes; others are read by protobuf."""
    repeated = await instructions(row, [scheduled(number) for number in range(4)])
    assert repeated <= 1.1 * await instructions(row, [small("")])
    # None of those that are counted has come before.
    never_twice = (scheduled(number) for number in itertools.count())
    assert await instructions(row, [next(never_twice)], others=never_twice) <= MAX_MORE * await instructions(
        row, [small("")]
    )


def step(number: int) -> bytes:
    """Builds the next step of a sequence that the worker has."""
    parameters = {
        "sequence_id": Parameter(int64_param=FIRST_SEQUENCE + number),
        "sequence_start": Parameter(bool_param=False),
        "sequence_end": Parameter(bool_param=False),
    }
    asked = Infer.FromString(small("", parameters=parameters))
    asked.model_name = "sumseq"
    return bytes(asked.SerializeToString())


@counts
@in_c
@pytest.mark.parametrize("row", [row for row in ROWS if row.name in ("stream", "unary")], ids=lambda row: row.name)
async def test_a_step_of_a_sequence_costs_little_more(row: Row) -> None:
    """It is looked for on the worker's page."""
    steps = [step(number) for number in range(SEQUENCES)]
    assert await instructions(row, steps) <= MAX_STEP * await instructions(row, [small("")])


@counts
@in_c
@pytest.mark.parametrize("row", [row for row in ROWS if row.name in ("stream", "unary")], ids=lambda row: row.name)
async def test_what_is_never_seen_again_costs_little_more_than_the_ordinary_way(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that never repeats pays for the lookup of a prepared request, and for being remembered for a while."""

    async def cost() -> float:
        # Ids of requests inside a parameter: no two of them mean the same.
        others = (small("", parameters={"request": Parameter(int64_param=number)}) for number in itertools.count())
        return await instructions(row, [small("")], others=others)

    never_again = await cost()
    for name, nothing in (("__missing__", None), ("put", None), ("scheduling", UNSCHEDULED)):
        monkeypatch.setattr(PreparedMessages, name, lambda *arguments, found=nothing: found)
    assert 0 < never_again <= 1.3 * await cost()


@counts
@in_c
@pytest.mark.parametrize("row", [row for row in ROWS if row.name in ("stream", "unary")], ids=lambda row: row.name)
@pytest.mark.parametrize(
    "contents",
    [
        [small(client_id) for client_id in ("", "7", "10", "281474976710656", "x" * 60)],
        [small("a"), other_model("a")],
        [small("a"), other_model("b"), other_shape("cc")],
    ],
    ids=["id", "models", "shapes"],
)
async def test_messages_that_differ(row: Row, contents: list[bytes]) -> None:
    """Another id, another model of as long a message, another shape: nothing of it makes a message unknown."""
    assert await instructions(row, contents) <= MAX_MORE * await instructions(row, [small("")])


@counts
@in_c
async def test_a_connection_that_is_new() -> None:
    """The first request of a connection is recognized too: all connections of a front share the prepared requests."""
    row = next(row for row in ROWS if row.name == "unary")
    assert await instructions(row, [small("")], connections=COUNT) <= MAX_MORE * await instructions(row, [small("")])


@counts
@in_c
async def test_metadata_that_differs() -> None:
    """A trace header and a deadline, each with another value each time."""
    row = next(row for row in ROWS if row.name == "unary")
    heads = [
        head_of(
            INFER,
            (b"grpc-timeout", b"%dm" % (10_000 + number)),
            (b"traceparent", b"00-%032d-%016d-01" % (number, number)),
        )
        for number in range(3 * COUNT)
    ]
    assert await instructions(row, [small("")], heads) <= MAX_METADATA * await instructions(row, [small("")])
