"""Counts in a front's own code what it costs requests that some of them are traced: those that are not, and those that are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tensord.daemon.grpc.walk import walk
from tensord.shm.control_records import EndedTrace, TraceChanged, TracesEnded
from tensord.shm.trace_counters import SampleCounter
from tensord.shm.trace_file import TraceFiles
from tensord.shm.tracer import Tracer
from tests.work.baseline import counts
from tests.work.connection import Bench, LaneBench
from tests.work.counter import Work
from tests.work.grpc_connection import GrpcBench, call
from tests.work.test_front_work import ROWS, two_small
from tests.work.test_grpc_work import small

#: What a request costs that is not traced while others are, and what a traced one costs: times what one costs where none is.
MAX_PASSED, MAX_TRACED = 1.02, 2.6
WARM, COUNT = 4, 20
#: One request in so many is traced.
NEVER, ALWAYS = 1 << 30, 1
_HTTP = ROWS[0].request(0)
protocols = pytest.mark.parametrize(
    "protocol",
    ["http", pytest.param("grpc", marks=pytest.mark.skipif(walk.__name__ != "walk", reason="the walk is not in C"))],
)


class Asked:
    """What requests of a front have cost, and the traces that ended."""

    def __init__(self, protocol: str, rate: int) -> None:
        """``rate``: one request in so many is traced; 0: none ever."""
        self.traces: list[EndedTrace] = []
        self.by_number: list[bool] = []
        self.work = Work()
        self._rate = rate
        asyncio.run(self._ask(protocol))

    async def _ask(self, protocol: str) -> None:
        with self._tracer() as tracer:
            bench: LaneBench = Bench(tracer=tracer) if protocol == "http" else GrpcBench(tracer)
            try:
                transport, request = bench.connect(), _requests(protocol)
                for number in range(WARM + COUNT):
                    if number == WARM:
                        bench.by_number.clear()
                    work = self.work if number >= WARM else Work()
                    # Those before it say what there is to settle.
                    transport.writes.clear()
                    await bench.answer(work, [(transport, request(number))], two_small)
                self.by_number = bench.by_number
            finally:
                bench.close()

    @contextmanager
    def _tracer(self) -> Iterator[Tracer]:
        def take(record: TracesEnded) -> bool:
            self.traces += record.traces
            return True

        tracer = Tracer(1, TraceFiles(), (), take if self._rate else None)
        if self._rate:
            tracer.changed(TraceChanged("", 1, self._rate, 0, ""), [SampleCounter.create(self._rate).fd])
        try:
            yield tracer
        finally:
            tracer.close()


def _requests(protocol: str) -> Callable[[int], bytes]:
    """Returns what makes the numbered request of a client that repeats itself."""
    return (lambda _: _HTTP) if protocol == "http" else lambda number: call(2 * number + 1, small(""), 240)


@counts
@protocols
def test_instructions(protocol: str) -> None:
    off, passed, traced = (Asked(protocol, rate) for rate in (0, NEVER, ALWAYS))
    assert (len(off.traces), len(passed.traces), len(traced.traces)) == (0, 0, WARM + COUNT)
    each = [asked.work.instructions / COUNT for asked in (off, passed, traced)]
    print(protocol, each)
    assert 0 < each[1] <= MAX_PASSED * each[0]
    assert each[2] <= MAX_TRACED * each[0]


@protocols
def test_traced_requests_go_by_their_number(protocol: str) -> None:
    """A record that says all itself makes the worker's C part hand everything that came with it to Python."""
    traced = Asked(protocol, ALWAYS)
    assert traced.by_number == [True] * COUNT
    assert len(traced.traces) == WARM + COUNT
