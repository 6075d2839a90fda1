"""Tests when a client is read: only while nothing holds it up; and who waits for what is written to leave."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.http.answer_order import Flow


class Reading:
    """A transport that notes whether reading is paused."""

    def __init__(self) -> None:
        self.reads = True
        self.closing = False

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        assert not self.closing
        self.reads = True

    def is_closing(self) -> bool:
        return self.closing


STEPS = {
    "pause": lambda flow: flow.pause_reading(),
    "resume": lambda flow: flow.resume_reading(),
    "rest": lambda flow: flow.rest(True),
    "go on": lambda flow: flow.rest(False),
}


@given(st.lists(st.sampled_from(sorted(STEPS))))
def test_it_is_read_while_it_is_neither_paused_nor_rests(steps: list[str]) -> None:
    transport = Reading()
    flow = Flow(cast(Any, transport))
    paused = resting = False
    for step in steps:
        STEPS[step](flow)
        paused = step == "pause" or (paused and step != "resume")
        resting = step == "rest" or (resting and step != "go on")
        assert (flow.read_paused, flow.resting) == (paused, resting)
        assert transport.reads == (not (paused or resting))


def test_one_that_closes_is_not_read_again() -> None:
    transport = Reading()
    flow = Flow(cast(Any, transport))
    flow.pause_reading()
    transport.closing = True
    flow.resume_reading()
    assert not transport.reads


async def test_all_who_wait_go_on_when_everything_has_left() -> None:
    flow = Flow(cast(Any, Reading()))
    await flow.drain()
    flow.write_paused = True
    waiting = [asyncio.create_task(flow.drain()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    flow.resume_writing()
    await asyncio.gather(*waiting)
    await flow.drain()
