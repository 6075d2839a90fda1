"""Requests from values to answers: where tensors are put, who waits for room, and that nothing stays on loan."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tensord.config.options import Arenas, Options
from tensord.daemon.submit.in_flight import InFlight
from tensord.daemon.submit.model_states import ModelStates
from tensord.daemon.submit.placement import UnsentRequest, begin
from tensord.shm.channel import pair
from tensord.shm.control_records import LaneOpened, ModelState
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, PreparedAnswer, PreparedRequest, PreparedTensor, RegionSlice, Slice
from tests.fakes import EchoWorker, submitter
from tests.records import WholeRequest

MIB = 1 << 20


class Setting:
    """A submitter with one worker, on the running loop."""

    def __init__(self, **arenas: Any) -> None:
        self.submitter = submitter(Options(arenas=Arenas(inline_byte_size=4096, **arenas)), ModelStates())
        ours, theirs = pair()
        self.worker = EchoWorker(ours, 1)
        pages = [os.dup(self.worker.page.fd), os.dup(self.worker.sequences.fd)]
        self.submitter.open_lane(LaneOpened(1, "cpu:0"), [theirs.detach(), *pages])
        self.submitter.model_changed(ModelState("m", 1, "READY", workers=(1,)))

    async def next(self) -> WholeRequest:
        """Runs the loop until a request reaches the worker; returns it."""
        while self.worker.idle(0):
            await asyncio.sleep(0.001)
        return self.worker.next()

    def close(self) -> None:
        self.submitter.close()
        self.worker.close()
        # What is in flight still has views of the arena, which keep its mapping.
        del self.submitter
        gc.collect()

    @property
    def on_loan(self) -> int:
        return self.submitter.statistics()["leased_byte_size"]


@pytest.fixture
async def setting() -> AsyncIterator[Setting]:
    setting = Setting(byte_size=MIB, max_byte_size=2 * MIB, wait=600)
    yield setting
    setting.close()


def request(*contents: bytes | RegionSlice) -> UnsentRequest:
    regions = [content if isinstance(content, RegionSlice) else None for content in contents]
    inputs = tuple([PreparedTensor(f"x{n}", "UINT8", (1,), region) for n, region in enumerate(regions)])
    return UnsentRequest(PreparedRequest("m", 0, inputs), contents)


class Told(InFlight):
    """A request that keeps its answers."""

    setting: Setting
    contents: list[bytes] = msgspec.field(default_factory=list)
    errors: list[tuple[str, str]] = msgspec.field(default_factory=list)
    #: It waited for room, and does so no longer.
    left: bool = False

    def completed(self, prepared: PreparedAnswer, record: AnswerRecord, lane: SubmitterLane | None) -> None:
        if record.code:
            self.errors.append((record.code, record.message))
        for content in record.contents:
            assert lane is not None
            self.contents.append(bytes(lane.view(content)) if isinstance(content, Slice) else content)
        if record.lease is not None:
            assert lane is not None
            assert self.setting.worker.lane.arena.statistics()["leased_byte_size"]
            self.setting.submitter.release(lane, record.lease)

    def left_line(self) -> None:
        self.left = True

    def begin(self, *contents: bytes | RegionSlice) -> None:
        begin(self.setting.submitter, self, request(*contents))

    async def until(self, count: int = 1) -> None:
        """Returns once so much has come."""
        while len(self.contents) + len(self.errors) < count:
            await asyncio.sleep(0.001)


async def test_small_tensors_travel_inside_and_large_ones_in_the_arena(setting: Setting) -> None:
    region, told = RegionSlice("r", 0, 1), Told(setting)
    told.begin(b"s", bytes(5000), region, b"l" * 7000)
    sent = await setting.next()
    places = [tensor.place for tensor in sent.inputs]
    assert [type(place) for place in places] == [bytes, Slice, RegionSlice, Slice]
    assert setting.worker.content(sent, 3) == b"l" * 7000
    assert all(place.offset % 64 == 0 for place in places if isinstance(place, Slice))
    setting.worker.echo(sent)
    await told.until()
    assert told.contents == [b"s"]
    assert setting.on_loan == 0


async def test_an_answer_in_the_arena_is_given_back(setting: Setting) -> None:
    told = Told(setting)
    told.begin(bytes(3))
    setting.worker.answer(await setting.next(), b"a" * 9000)
    await told.until()
    assert told.contents == [b"a" * 9000]
    while setting.worker.lane.arena.statistics()["leased_byte_size"]:
        setting.worker.poll()
        await asyncio.sleep(0.001)


async def test_an_error_is_an_answer(setting: Setting) -> None:
    told = Told(setting)
    told.begin(bytes(3))
    setting.worker.complete((await setting.next()).request_id, code="INTERNAL", message="it broke")
    await told.until()
    assert told.errors == [("INTERNAL", "it broke")]


async def test_who_leaves_cancels(setting: Setting) -> None:
    told = Told(setting)
    told.begin(bytes(9000))
    sent = await setting.next()
    setting.submitter.cancel(told)
    while not setting.worker.cancelled:
        setting.worker.poll()
        await asyncio.sleep(0.001)
    assert setting.worker.cancelled == [sent.request_id]
    setting.worker.echo(sent)
    while setting.on_loan:
        await asyncio.sleep(0.001)
    assert not told.contents + told.errors
