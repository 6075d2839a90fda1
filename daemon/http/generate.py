"""generate and generate_stream: a model's answer to one plain JSON object, as one object or as events.

    body ─▶ generate_codec ─▶ submit.inference ─▶ answers, any number ─▶ generate: exactly one as JSON, or all joined
                                                       ╰▶ generate_stream: each as an event, when it comes

A client that leaves cancels its request. Source: Triton docs/protocol/extension_generate.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tensord.daemon.front import request_id
from tensord.daemon.http import generate_codec
from tensord.daemon.http.event_stream import EventStream, while_connected
from tensord.daemon.http.joined_answers import JoinedAnswers
from tensord.daemon.http.serving import Serving
from tensord.daemon.http.whole_body import read_body
from tensord.daemon.submit import inference
from tensord.daemon.submit.inference import Answer, InferenceRequest
from tensord.daemon.tracing.tracer import Trace
from tensord.shm.errors import Internal, InvalidArgument, ServingError, Unavailable, Unsupported

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
        await self._serving.submitter.loaded(model, version)
        trace = self._sampled(model, version)
        with _ended_if_refused(trace):
            asked = await self._read(request, model, version, trace)
            state = self._serving.table.find(model, version)
            joined = JoinedAnswers(state, self._serving.options.http.max_body_byte_size) if state.joins else None
            body = await while_connected(request.receive, self._one(asked, joined))
        return _Object(body, None if body is None else trace)

    async def generate_stream(self, request: Request, model: str, version: int) -> Response:
        """Events. An error is an event as well, once something was sent."""
        await self._serving.submitter.loaded(model, version)
        trace = self._sampled(model, version)
        with _ended_if_refused(trace):
            return _Stream(self._serving, await self._read(request, model, version, trace))

    def _sampled(self, model: str, version: int) -> Trace | None:
        tracer = self._serving.tracer
        if tracer is None or not tracer.on:
            return None
        self._serving.table.find(model, version)
        trace = tracer.sample(model)
        if trace is not None:
            trace.stamp("HTTP_RECV_START")
        return trace

    async def _read(self, request: Request, model: str, version: int, trace: Trace | None) -> InferenceRequest:
        forwarded: dict[str, str] = {}
        if self._serving.forwarding is not None:
            forwarded = self._serving.forwarding.parameters(request.scope["tensord.forwarded"])
        state = self._serving.table.find(model, version)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
        body = await read_body(request, self._serving.options.http.max_body_byte_size)
        if trace is not None:
            trace.stamp("HTTP_RECV_END")
        asked = generate_codec.decode(body, model, version, state.metadata)
        asked.parameters.update(forwarded)
        if self._serving.options.requests.make_ids and not asked.id:
            asked.id = request_id.made()
        asked.trace = trace
        asked.account = request.scope["tensord.account"]
        return asked

    async def _one(self, asked: InferenceRequest, joined: JoinedAnswers | None) -> bytes:
        found: list[bytes] = []
        async with inference.answers(self._serving.submitter, asked) as each:
            try:
                async for answer in each:
                    if isinstance(answer, ServingError):
                        raise answer
                    if joined is not None:
                        joined.add(answer)
                        continue
                    if found:
                        raise InvalidArgument(_NOT_ONE)
                    found.append(generate_codec.encode(answer, asked.model, asked.id))
            except (Unavailable, Unsupported):
                raise
            except ServingError as error:
                raise InvalidArgument(error.message) from error
        if joined is not None:
            return generate_codec.encode(joined.whole(), asked.model, asked.id)
        if not found:
            raise InvalidArgument(_NOT_ONE)
        return found[0]


class _Object(Response):
    """A whole answer."""

    def __init__(self, body: bytes | None, trace: Trace | None) -> None:
        super().__init__(body, media_type="application/json")
        self._trace = trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with _sending(self._trace):
            await super().__call__(scope, receive, send)


class _Stream(Response):
    """Runs the inference while its answers are sent."""

    def __init__(self, serving: Serving, asked: InferenceRequest) -> None:
        super().__init__()
        self._serving = serving
        self._asked = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with _ended_if_refused(self._asked.trace):
            await while_connected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with inference.answers(self._serving.submitter, self._asked) as each:
            status, first = 200, None
            try:
                answer = await anext(each, None)
                if isinstance(answer, ServingError):
                    status = 400
                first = None if answer is None else self._event(answer)
            except Internal as error:
                # The model's own; what was wrong with the request before it ran is no event.
                status, first = 400, _error(error)
            with _sending(self._asked.trace):
                await EventStream(self._events(first, each), self._serving.options.http.max_body_byte_size, status)(
                    scope, receive, send
                )

    async def _events(self, first: bytes | None, each: AsyncIterator[Answer | ServingError]) -> AsyncIterator[bytes]:
        if first is not None:
            yield first
        try:
            async for answer in each:
                yield self._event(answer)
        except ServingError as error:
            yield _error(error)

    def _event(self, answer: Answer | ServingError) -> bytes:
        if isinstance(answer, ServingError):
            return _error(answer)
        return generate_codec.encode(answer, self._asked.model, self._asked.id)


@contextlib.contextmanager
def _ended_if_refused(trace: Trace | None) -> Iterator[None]:
    """A refusal is written by whoever catches it: the trace ends where it is raised."""
    try:
        yield
    except (ServingError, HTTPException):
        if trace is not None:
            trace.end()
        raise


@contextlib.contextmanager
def _sending(trace: Trace | None) -> Iterator[None]:
    """While the answer is written; a client that leaves meanwhile leaves no trace."""
    if trace is not None:
        trace.stamp("HTTP_SEND_START")
    yield
    if trace is not None:
        trace.stamp("HTTP_SEND_END")
        trace.end()


def _error(error: ServingError) -> bytes:
    return msgspec.json.encode({"error": error.message})
