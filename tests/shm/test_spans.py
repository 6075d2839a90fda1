"""Ids of spans, and how ended traces leave a front: several at a time, and none where the supervisor does not take them."""

from __future__ import annotations

import asyncio

import pytest

from tensord.shm.common.scheduling import sampled
from tensord.shm.control_records import EndedTrace, TracesEnded
from tensord.shm.messages import Timeline, TracedTensor
from tensord.shm.tracer import SpanIds, Spans, without_tensors

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
KNOWN = SpanIds(TRACE, SPAN)


@pytest.mark.parametrize(
    ("traceparent", "wanted"),
    [
        (f"00-{TRACE}-{SPAN}-01", KNOWN),
        (f" 00-{TRACE}-{SPAN}-03\t", KNOWN),
        # A later version may say more.
        (f"cc-{TRACE}-{SPAN}-01-more", KNOWN),
        (f"00-{TRACE}-{SPAN}-00", None),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        ("", None),
    ],
)
def test_what_a_traceparent_refers_to(traceparent: str, wanted: SpanIds | None) -> None:
    assert sampled(traceparent) == wanted


def test_ids_of_spans() -> None:
    inside, alone = SpanIds.within(KNOWN), SpanIds.within(None)
    assert inside.trace_id == TRACE
    assert len({inside.span_id, SPAN, alone.span_id}) == 3
    assert (len(alone.trace_id), len(alone.span_id), alone.trace_id != TRACE) == (32, 16, True)


def ended(number: int) -> EndedTrace:
    return EndedTrace(TRACE, f"{number:016x}", "", 1, (("QUEUE_START", 2),), "m", {"model": "m"})


def test_traces_are_handed_over_together() -> None:
    """Many at once, few after a moment, and the rest when asked."""
    taken: list[TracesEnded] = []

    def take(traces: TracesEnded) -> bool:
        taken.append(traces)
        return True

    async def run() -> None:
        spans = Spans(take)
        for number in range(70):
            spans.ended(ended(number))
        assert [len(each.traces) for each in taken] == [64]
        while len(taken) < 2:
            await asyncio.sleep(0.01)
        spans.ended(ended(70))
        spans.flush()
        spans.flush()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert [trace.span_id for each in taken for trace in each.traces] == [f"{number:016x}" for number in range(71)]


def test_what_nobody_takes_is_dropped_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> int:
        spans = Spans(lambda _: False)
        for number in range(200):
            spans.ended(ended(number))
        spans.flush()
        return spans.dropped

    assert asyncio.run(run()) == 200
    assert [record.getMessage() for record in caplog.records] == [
        "the supervisor does not take traces: 64 were dropped so far"
    ]


def test_no_span_shows_tensors() -> None:
    tensor = TracedTensor("TENSOR_QUEUE_INPUT", "x", "FP32", (1,), "1.0", False)
    child = Timeline((("QUEUE_START", 1),), (tensor,), model="n")
    told = without_tensors(Timeline((("QUEUE_START", 1),), (tensor,), children=(child,)))
    assert told == Timeline((("QUEUE_START", 1),), children=(Timeline((("QUEUE_START", 1),), model="n"),))
    assert without_tensors(told) == told
