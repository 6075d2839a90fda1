"""What one message costs the gRPC front, counted in its own code: instructions, system calls, memory, garbage."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import tracemalloc
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from daemon.grpc import frames
from shm.lane import WorkerLane
from shm.messages import Completion, Submit
from tests.daemon.grpc.frame_client import STREAM
from tests.work.connection import MIB
from tests.work.counter import Work
from tests.work.grpc_connection import GrpcBench, call, message, opened, payloads
from tests.work.test_front_work import one_large, two_in_regions, two_small

Infer = service_pb2.ModelInferRequest
Parameter = service_pb2.InferParameter
#: Messages before counting begins: after two a client repeats itself.
WARM = 3
COUNT = 20
_FP32 = {"datatype": "FP32", "shape": [1, 16]}
_REGION = {
    "shared_memory_region": Parameter(string_param="region"),
    "shared_memory_byte_size": Parameter(int64_param=64),
}
_WANTS_FINAL = {"triton_enable_empty_final_response": Parameter(bool_param=True)}


def small(client_id: str, **fields: Any) -> bytes:
    """As perf_analyzer asks, with its tensors in the message."""
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
    """The same with its tensors in regions."""
    asked = Infer(
        model_name="addsub",
        id=client_id,
        inputs=[Infer.InferInputTensor(name=name, parameters=_REGION, **_FP32) for name in ("INPUT0", "INPUT1")],
        outputs=[Infer.InferRequestedOutputTensor(name=name, parameters=_REGION) for name in ("OUTPUT0", "OUTPUT1")],
        **fields,
    )
    return bytes(asked.SerializeToString())


def large(client_id: str, **fields: Any) -> bytes:
    """As perf_analyzer asks with 1 MiB."""
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
    """A kind of message and what it may cost. Limits are what was counted when they were set, and a tenth more."""

    name: str
    content: Callable[..., bytes]
    complete: Callable[[WorkerLane, Submit], Completion]
    #: Bytecodes of CPython 3.11 in our own modules.
    instructions: int
    #: Calls of their own, or all of as many streams of one connection, with a message of each in one chunk.
    streams: int = 0
    #: Python's memory at its highest above where it was, bytes.
    peak: int = 21_000
    #: On the lane: the record out, its answer in. Each answer in a lease is given back in a datagram of its own.
    lane_calls: int = 2
    #: What the client grants again with each message.
    granted: int = 240


ROWS = [
    Row("stream", small, two_small, 1353, streams=1),
    Row("stream-shm", shared, two_in_regions, 1353, streams=1),
    Row("streams-together", small, two_small, 1097, streams=4),
    Row("unary", small, two_small, 1718),
    Row("unary-shm", shared, two_in_regions, 1718),
    Row("stream-large", large, one_large, 3318, streams=1, peak=27_500, lane_calls=3, granted=MIB + 240),
    Row("unary-large", large, one_large, 3574, peak=27_500, lane_calls=3, granted=MIB + 240),
]
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


class Asking:
    """A client of a bench: one chunk after the other, each with as many messages as a row says, each answered well."""

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


def on_a_bench(row: Row, test: Callable[[Asking], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        bench = GrpcBench()
        try:
            asking = Asking(bench, row)
            await asking.warm()
            await test(asking)
        finally:
            bench.close()

    asyncio.run(run())


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of Python have other instructions")
@rows
def test_instructions(row: Row) -> None:
    async def test(asking: Asking) -> None:
        work = Work()
        for _ in range(COUNT):
            await asking.ask(work, asking.chunk())
        assert 0 < work.instructions / COUNT / max(1, row.streams) <= row.instructions

    on_a_bench(row, test)


@rows
def test_system_calls_on_the_lane(row: Row) -> None:
    """What comes together is two datagrams: an idle worker begins with the first."""

    async def test(asking: Asking) -> None:
        work = Work()
        for _ in range(COUNT):
            await asking.ask(work, asking.chunk())
        assert work.system_calls.total() <= (4 if row.streams > 1 else row.lane_calls) * COUNT, work.system_calls

    on_a_bench(row, test)


@rows
def test_memory_at_its_highest(row: Row) -> None:
    async def test(asking: Asking) -> None:
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

    on_a_bench(row, test)


@rows
def test_nothing_is_left_for_the_garbage_collector(row: Row) -> None:
    """A message that leaves a cycle makes the collector run every few dozen messages, in the middle of others."""

    async def test(asking: Asking) -> None:
        contents = [asking.chunk() for _ in range(COUNT)]
        gc.collect()
        gc.disable()
        try:
            for content in contents:
                await asking.ask(Work(), content)
            garbage = gc.collect()
        finally:
            gc.enable()
        assert garbage == 0

    on_a_bench(row, test)
