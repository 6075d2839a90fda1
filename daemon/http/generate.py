"""generate and generate_stream: a model's answer to one plain JSON object, as one object or as events.

    body ─▶ generate_codec ─▶ daemon.inference ─▶ answers, any number ─▶ generate: exactly one as JSON
                                                                      ╰▶ generate_stream: each as an event, when it comes

A client that leaves cancels its request. Source: Triton docs/protocol/extension_generate.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from daemon import inference
from daemon.http import generate_codec
from daemon.http.event_stream import EventStream, while_connected
from daemon.http.serving import Serving
from daemon.http.whole_body import read_body
from daemon.inference import Answer, InferenceRequest
from shm.errors import Internal, InvalidArgument, ServingError, Unavailable, Unsupported

_NOT_ONE = (
    "generate expects model to produce exactly 1 response, "
    "use generate stream for model that generates various number of responses"
)


class Generation:
    """The two endpoints, over what a front serves with."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def generate(self, request: Request, model: str, version: int) -> Response:
        """One JSON object. Whatever the model says is wrong is the request's fault: 400."""
        asked = await self._read(request, model, version)
        body = await while_connected(request.receive, self._one(asked))
        return Response(body, media_type="application/json")

    async def generate_stream(self, request: Request, model: str, version: int) -> Response:
        """Events. An error is an event as well, once something was sent."""
        return _Stream(self._serving, await self._read(request, model, version))

    async def _read(self, request: Request, model: str, version: int) -> InferenceRequest:
        state = self._serving.table.find(model, version)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
        body = await read_body(request, self._serving.options.http.max_body_byte_size)
        return generate_codec.decode(body, model, version, state.metadata)

    async def _one(self, asked: InferenceRequest) -> bytes:
        found: list[bytes] = []
        async with inference.answers(self._serving.submitter, asked) as each:
            try:
                async for answer in each:
                    if found:
                        raise InvalidArgument(_NOT_ONE)
                    found.append(generate_codec.encode(answer, asked.model, asked.id))
            except (Unavailable, Unsupported):
                raise
            except ServingError as error:
                raise InvalidArgument(error.message) from error
        if not found:
            raise InvalidArgument(_NOT_ONE)
        return found[0]


class _Stream(Response):
    """Runs the inference while its answers are sent."""

    def __init__(self, serving: Serving, asked: InferenceRequest) -> None:
        super().__init__()
        self._serving = serving
        self._asked = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with inference.answers(self._serving.submitter, self._asked) as each:
            status, first = 200, None
            try:
                answer = await anext(each, None)
                first = None if answer is None else self._event(answer)
            except Internal as error:
                # The model's own; what was wrong with the request before it ran is no event.
                status, first = 400, _error(error)
            await EventStream(self._events(first, each), status)(scope, receive, send)

    async def _events(self, first: bytes | None, each: AsyncIterator[Answer]) -> AsyncIterator[bytes]:
        if first is not None:
            yield first
        try:
            async for answer in each:
                yield self._event(answer)
        except ServingError as error:
            yield _error(error)

    def _event(self, answer: Answer) -> bytes:
        return generate_codec.encode(answer, self._asked.model, self._asked.id)


def _error(error: ServingError) -> bytes:
    return msgspec.json.encode({"error": error.message})
