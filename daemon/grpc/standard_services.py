"""Answers grpc.health.v1 and server reflection, which general gRPC tools call."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError, Message

from tensord.daemon.front.endpoints import Endpoints
from tensord.daemon.front.status import INVALID_ARGUMENT, NOT_FOUND, OK
from tensord.daemon.grpc.call import Call
from tensord.daemon.grpc.management import SERVICE
from tensord.daemon.grpc.stream import Stream
from tensord.daemon.grpc.unary import Unary
from tensord.protocol import health_pb2, reflection_pb2, reflection_v1alpha_pb2
from tensord.protocol.pool import POOL
from tensord.shm.messages import Buffer

_HEALTH = "grpc.health.v1.Health"
#: Service -> its messages. The two differ in their package's name only.
_REFLECTIONS = {
    "grpc.reflection.v1.ServerReflection": reflection_pb2,
    "grpc.reflection.v1alpha.ServerReflection": reflection_v1alpha_pb2,
}
_WATCH_SECONDS = 0.5
#: Questions of one reflection stream that wait; a tool asks one after the other.
_MAX_QUESTIONS = 64


class StandardServices:
    """Answers the calls of the services grpc.health.v1 and server reflection."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    def methods(self) -> Iterator[tuple[str, Callable[[Stream], Call]]]:
        """Yields the path of each RPC, with the function that makes a ``Call`` for a stream."""
        yield f"/{_HEALTH}/Check", lambda stream: Unary(stream, health_pb2.HealthCheckRequest, self._check)
        yield f"/{_HEALTH}/Watch", lambda stream: _Conversation(stream, health_pb2.HealthCheckRequest, self._watch)
        for service, messages in _REFLECTIONS.items():
            reflection = Reflection(messages, (SERVICE, _HEALTH, *_REFLECTIONS))
            yield f"/{service}/ServerReflectionInfo", functools.partial(_reflecting, reflection, messages)

    async def _check(self, request: Any) -> Any:
        # As in Triton, the service that the request names is ignored.
        answer = health_pb2.HealthCheckResponse
        return answer(status=answer.NOT_SERVING if await self._endpoints.unreadiness() else answer.SERVING)

    async def _watch(self, requests: AsyncIterator[Any]) -> AsyncIterator[Message]:
        async for request in requests:
            last: Message | None = None
            while True:
                # Who stops has a last status to tell, whatever happens while it is found out.
                stopping = self._endpoints.stopping
                now = await self._check(request)
                if now != last:
                    yield now
                    last = now
                if stopping:
                    return
                await asyncio.sleep(_WATCH_SECONDS)


def _reflecting(reflection: Reflection, messages: Any, stream: Stream) -> Call:
    async def answers(questions: AsyncIterator[Any]) -> AsyncIterator[Message]:
        async for question in questions:
            yield reflection.answer(question)

    return _Conversation(stream, messages.ServerReflectionRequest, answers)


class _Conversation(Call):
    """Runs a streaming call whose responses come from an asynchronous generator."""

    def __init__(
        self, stream: Stream, request: type[Message], answers: Callable[[AsyncIterator[Any]], AsyncIterator[Message]]
    ) -> None:
        self._stream = stream
        self._request = request
        self._questions: asyncio.Queue[Any] = asyncio.Queue()
        self._is_new = True
        #: No question follows, and None is the last in the queue.
        self._ended = False
        self._task = asyncio.get_running_loop().create_task(self._run(answers))

    def message(self, content: Buffer, start: int, end: int) -> None:
        if self._ended:
            return
        self._is_new = False
        if self._questions.qsize() >= _MAX_QUESTIONS:
            self._stream.refuse(INVALID_ARGUMENT, f"more than {_MAX_QUESTIONS} questions are waiting")
            return
        try:
            self._questions.put_nowait(self._request.FromString(bytes(content[start:end])))
        except DecodeError:
            self._stream.refuse(INVALID_ARGUMENT, "failed to parse the request message")

    def half_closed(self) -> None:
        if not self._ended:
            self._ended = True
            self._questions.put_nowait(None)

    @property
    def idle(self) -> bool:
        # A watch has its answer, and never comes to read that nothing follows.
        return self._questions.qsize() <= self._ended

    @property
    def is_new(self) -> bool:
        return self._is_new

    def stop(self) -> None:
        self.half_closed()

    def abandoned(self) -> None:
        self._task.cancel()

    async def _run(self, answers: Callable[[AsyncIterator[Any]], AsyncIterator[Message]]) -> None:
        async for answer in answers(self._each()):
            self._stream.send([answer.SerializeToString()])
        self._stream.finish(OK)

    async def _each(self) -> AsyncIterator[Any]:
        while (question := await self._questions.get()) is not None:
            yield question


class Reflection:
    """Answers the requests of one version (v1, v1alpha) of server reflection. Sans-I/O.

    Args:
      messages: the module of the messages of that version.
      services: the names of the services that the server has.
    Source: grpc/reflection/v1/reflection.proto.
    """

    def __init__(self, messages: Any, services: tuple[str, ...]) -> None:
        self._messages = messages
        self._services = sorted(services)

    def answer(self, question: Any) -> Any:
        """Returns the response to ``question``, a reflection request. It holds an error if the file or symbol is unknown."""
        answer = self._messages.ServerReflectionResponse(valid_host=question.host, original_request=question)
        kind = question.WhichOneof("message_request")
        error = answer.error_response
        if kind is None:
            error.error_code, error.error_message = INVALID_ARGUMENT, "the request asks for nothing"
            return answer
        asked = getattr(question, kind)
        try:
            self._fill(answer, kind, asked)
        except KeyError:
            if kind == "file_containing_extension":
                asked = f"{asked.containing_type}, extension {asked.extension_number}"
            error.error_code, error.error_message = NOT_FOUND, f"{kind.replace('_', ' ')}: '{asked}' is not found"
        return answer

    def _fill(self, answer: Any, kind: str, asked: Any) -> None:
        # No message of the server has an extension, so a request for one by its number never finds it.
        if kind == "file_by_filename":
            _describe(answer, POOL.FindFileByName(asked))
        elif kind == "file_containing_symbol":
            _describe(answer, _file_of(asked))
        elif kind == "file_containing_extension":
            POOL.FindExtensionByNumber(POOL.FindMessageTypeByName(asked.containing_type), asked.extension_number)
        elif kind == "all_extension_numbers_of_type":
            answer.all_extension_numbers_response.base_type_name = POOL.FindMessageTypeByName(asked).full_name
        else:
            for service in self._services:
                answer.list_services_response.service.add(name=service)


def _file_of(symbol: str) -> FileDescriptor:
    try:
        return POOL.FindFileContainingSymbol(symbol)
    except KeyError:
        # Not every protobuf looks for methods there.
        return POOL.FindMethodByName(symbol).containing_service.file


def _describe(answer: Any, file: FileDescriptor) -> None:
    found = [file]
    for each in found:
        found += [imported for imported in each.dependencies if imported not in found]
    answer.file_descriptor_response.file_descriptor_proto.extend(each.serialized_pb for each in found)
