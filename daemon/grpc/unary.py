"""Answers unary calls other than inference: one request message, and one response message that a coroutine returns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import DecodeError, Message

from tensord.daemon.front.status import INTERNAL, INVALID_ARGUMENT, grpc_number
from tensord.daemon.grpc import counts
from tensord.daemon.grpc.call import Call, kept
from tensord.daemon.grpc.stream import Stream
from tensord.shm.errors import DEFECT, InvalidArgument, ServingError
from tensord.shm.messages import Buffer

_log = logging.getLogger(__name__)

#: A function that turns a request message into an answer message. It raises ServingError.
Answer = Callable[[Any], Awaitable[Message]]


class Unary(Call):
    """A unary gRPC call other than inference. A coroutine makes the response message from the request message."""

    def __init__(self, stream: Stream, request: type[Message], answer: Answer) -> None:
        self._stream = stream
        self._request = request
        self._answer = answer
        self._message: Buffer | None = None
        self._task: asyncio.Task[None] | None = None

    def message(self, content: Buffer, start: int, end: int) -> None:
        if self._message is not None:
            self._stream.refuse(INTERNAL, "a unary call has one request message")
        else:
            self._message = kept(content, start, end)

    def half_closed(self) -> None:
        if self._message is None:
            self._stream.finish(INTERNAL, "a unary call has one request message")
            return
        try:
            counts.check(self._message, self._request.DESCRIPTOR)
            request = self._request.FromString(bytes(self._message))
        except DecodeError:
            self._stream.finish(INVALID_ARGUMENT, "failed to parse the request message")
            return
        except InvalidArgument as error:
            self._stream.finish(INVALID_ARGUMENT, error.message)
            return
        self._task = asyncio.get_running_loop().create_task(self._run(request))

    @property
    def idle(self) -> bool:
        return self._message is None

    @property
    def answers(self) -> bool:
        return self._task is not None

    def abandoned(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, request: Message) -> None:
        try:
            answer = await self._answer(request)
            self._stream.http2.serving.answered.managed("OK")
            self._stream.answer([answer.SerializeToString()])
        except ServingError as error:
            self._stream.finish(grpc_number(error), error.message)
        except Exception:
            _log.exception("%s failed", self._stream.head.path)
            self._stream.finish(INTERNAL, DEFECT)
