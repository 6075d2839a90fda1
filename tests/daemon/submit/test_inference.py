"""Requests from values to answers: where tensors are put, who waits for room, and that nothing stays on loan."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator

import pytest

from tensord.config.options import Arenas, Options
from tensord.daemon.submit.inference import InferenceRequest, begin
from tensord.daemon.submit.model_table import ModelTable
from tensord.daemon.submit.submitter import Submitter
from tensord.shm.channel import pair
from tensord.shm.control_records import LaneOpened, ModelState
from tensord.shm.errors import Internal, InvalidArgument, Unavailable
from tensord.shm.messages import AnswerRecord, RegionSlice, Slice
from tests.daemon.submit.awaited import answers
from tests.fakes import INCARNATION, EchoWorker
from tests.records import WholeRequest

MIB = 1 << 20


class Setting:
    """A submitter with one worker, on the running loop."""

    def __init__(self, **arenas: float) -> None:
        self.submitter = Submitter(INCARNATION, Options(arenas=Arenas(**arenas)), ModelTable())
        ours, theirs = pair()
        self.worker = EchoWorker(ours, 1)
        pages = [os.dup(self.worker.page.fd), os.dup(self.worker.sequences.fd)]
        self.submitter.open_lane(LaneOpened(1, "cpu:0"), [theirs.detach(), *pages])
        self.submitter.model_changed(ModelState("m", 1, "READY", workers=(1,)))

    async def next(self) -> WholeRequest:
        """The next request at the worker; the loop turns meanwhile."""
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


def request(*contents: bytes | RegionSlice) -> InferenceRequest:
    inputs = [(f"x{n}", "UINT8", (1,), content) for n, content in enumerate(contents)]
    return InferenceRequest("m", 0, inputs)


async def test_small_tensors_travel_inside_and_large_ones_in_the_arena(setting: Setting) -> None:
    region = RegionSlice("r", 0, 1)
    async with answers(setting.submitter, request(b"s", bytes(5000), region, b"l" * 7000)) as each:
        sent = await setting.next()
        places = [tensor.place for tensor in sent.inputs]
        assert [type(place) for place in places] == [bytes, Slice, RegionSlice, Slice]
        assert setting.worker.content(sent, 3) == b"l" * 7000
        assert all(place.offset % 64 == 0 for place in places if isinstance(place, Slice))
        setting.worker.echo(sent)
        got = [answer.content(answer.contents[0]) async for answer in each]
    assert got == [b"s"]
    assert setting.on_loan == 0


async def test_an_answer_in_the_arena_is_given_back_after_its_turn(setting: Setting) -> None:
    async with answers(setting.submitter, request(bytes(3))) as each:
        setting.worker.answer(await setting.next(), b"a" * 9000)
        async for answer in each:
            assert bytes(answer.content(answer.contents[0])) == b"a" * 9000
            assert setting.worker.lane.arena.statistics()["leased_byte_size"]
    while setting.worker.lane.arena.statistics()["leased_byte_size"]:
        setting.worker.poll()
        await asyncio.sleep(0.001)


async def test_an_error_is_raised(setting: Setting) -> None:
    async with answers(setting.submitter, request(bytes(3))) as each:
        setting.worker.complete((await setting.next()).request_id, code="INTERNAL", message="it broke")
        with pytest.raises(Internal, match="it broke"):
            await anext(each)


async def test_leaving_early_cancels(setting: Setting) -> None:
    async with answers(setting.submitter, request(bytes(9000))):
        sent = await setting.next()
    while not setting.worker.cancelled:
        setting.worker.poll()
        await asyncio.sleep(0.001)
    assert setting.worker.cancelled == [sent.request_id]
    setting.worker.echo(sent)
    while setting.on_loan:
        await asyncio.sleep(0.001)


async def test_waiting_for_room(setting: Setting) -> None:
    """
    1. One request fills the arena; a second waits, a third waits and is cancelled.
    2. The first is answered.
    Result: the second is sent, the third never, nothing stays on loan.
    """
    told: list[AnswerRecord] = []
    begin(setting.submitter, request(bytes(900_000)), lambda _, own, __: told.append(own))
    begin(setting.submitter, request(b"2" * 900_000), lambda _, own, __: told.append(own))
    third = begin(setting.submitter, request(b"3" * 900_000), lambda _, own, __: told.append(own))
    third.cancel()
    first = await setting.next()
    setting.worker.complete(first.request_id)
    second = await setting.next()
    assert setting.worker.content(second)[:1] == b"2"
    setting.worker.complete(second.request_id)
    while setting.on_loan:
        await asyncio.sleep(0.001)
    assert [completion.code for completion in told] == ["", ""]
    assert setting.worker.idle(0)


async def test_no_room_in_time_is_an_answer() -> None:
    setting = Setting(byte_size=MIB, max_byte_size=2 * MIB, wait=0.2)
    begin(setting.submitter, request(bytes(900_000)), lambda *_: None)
    with pytest.raises(Unavailable, match="none came free"):
        async with answers(setting.submitter, request(bytes(900_000))) as each:
            await anext(each)
    setting.close()


async def test_what_can_never_fit_is_refused_at_once(setting: Setting) -> None:
    with pytest.raises(InvalidArgument):
        begin(setting.submitter, request(bytes(3 * MIB)), lambda *_: None)
