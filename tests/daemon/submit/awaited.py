"""Answers of a request for tests that await them, in place of a callback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from tensord.daemon.submit.inference import InferenceRequest, begin
from tensord.daemon.submit.submitter import Submitter
from tensord.shm.errors import ServingError, from_code
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import (
    AnswerRecord,
    Content,
    Place,
    PreparedAnswer,
    PreparedTensor,
    RegionSlice,
    is_mark,
    placed,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One good answer; its content is there until the next one is asked for."""

    prepared: PreparedAnswer
    contents: tuple[Content, ...]
    #: None: nothing of it lies in an arena.
    lane: SubmitterLane | None

    @property
    def outputs(self) -> list[tuple[PreparedTensor, Place]]:
        """Its tensors, each with where its bytes are."""
        return placed(self.prepared.outputs, self.contents)

    def content(self, place: Place) -> bytes | memoryview:
        """The bytes of an output that did not go to a region."""
        assert not isinstance(place, RegionSlice)
        if isinstance(place, bytes):
            return place
        assert self.lane is not None
        return self.lane.view(place)


@contextlib.asynccontextmanager
async def answers(
    submitter: Submitter, request: InferenceRequest
) -> AsyncIterator[AsyncIterator[Answer | ServingError]]:
    """``async with answers(...) as each: async for answer in each``; one answer, or for a decoupled model any number.

    An error among several answers is an answer, and others may follow. Leaving the block early, by an error or a cancellation
    too, cancels the request.
    Raises, also while iterating: the ServingError the request was refused with, or that is its last answer.
    """
    arrived: asyncio.Queue[_Arrived] = asyncio.Queue()
    inference = begin(submitter, request, lambda prepared, own, lane: arrived.put_nowait((prepared, own, lane)))
    each = _iterate(submitter, arrived)
    try:
        yield each
    finally:
        inference.cancel()
        await each.aclose()
        while not arrived.empty():
            _release(submitter, *arrived.get_nowait())


_Arrived = tuple[PreparedAnswer, AnswerRecord, SubmitterLane | None]


async def _iterate(
    submitter: Submitter, arrived: asyncio.Queue[_Arrived]
) -> AsyncGenerator[Answer | ServingError, None]:
    while True:
        prepared, own, lane = await arrived.get()
        try:
            if own.code:
                error = from_code(own.code, own.message)
                if prepared.final:
                    raise error
                yield error
            elif lane is not None and not is_mark(prepared, own):
                yield Answer(prepared, own.contents, lane)
        finally:
            _release(submitter, prepared, own, lane)
        if prepared.final:
            return


def _release(submitter: Submitter, prepared: PreparedAnswer, own: AnswerRecord, lane: SubmitterLane | None) -> None:
    if lane is None:
        return
    if not prepared.final:
        submitter.taken(lane, own)
    elif own.lease is not None:
        submitter.release(lane, own.lease)
