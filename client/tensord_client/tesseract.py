"""A gateway for programs that use ``tesseract-core`` or ``tesseract-jax``: each served model is a Tesseract.

    python -m tensord_client.tesseract --address 127.0.0.1:8910               (pip install 'tensord-client[tesseract]')

A program opens a model by ``Tesseract.from_url("http://127.0.0.1:8910/MODEL")``. Requests and answers are JSON over HTTP. An
array is {"shape": [3], "dtype": "float32", "data": {"encoding": "base64", "buffer": "..."}}. If a model has a batch
dimension, a client may send an input with this dimension, or one row without it. A single row is used for all rows of the other
inputs.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import math
import re
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import numpy as np
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from tensord_client import gateway
from tensord_client import tesseract_wire as wire
from tensord_client.asynchronous import AsyncClient, AsyncModel
from tensord_client.common.arrays import Array
from tensord_client.common.derivatives import PULL_BACK, PUSH_FORWARD, Names
from tensord_client.common.tensors import Tensor, cast, flat
from tensord_client.errors import InvalidArgument, NotFound, ServingError

#: The program's flags besides those of all gateways.
FLAGS: gateway.Flags = {
    "--address": ("127.0.0.1:8910", "HOST:PORT where clients connect; a model is at /MODEL and /MODEL/versions/N"),
    "--max-body-bytes": (64 << 20, "bytes of a request, and of the arrays of an answer"),
    "--max-held-bytes": (256 << 20, "bytes of all requests under way, and of their answers"),
    "--max-products": (4096, "products for a Jacobian: elements of outputs or inputs, the fewer ones, by rows"),
    "--body-timeout": (30, "seconds for a request to come"),
    "--idle-timeout": (60, "seconds from connecting, or from an answer's first byte, to the next request"),
}
#: Bytes of an answer that may wait to be sent.
_PIECE = 1 << 16
#: Matches a request's path: a model's name, its version if one is asked for, and what is asked of it.
_PATH = re.compile(r"/([^/]+)(?:/versions/([0-9]{1,18}))?/([^/]+)")
_ENDPOINTS = ("apply", "abstract_eval", "jacobian", "jacobian_vector_product", "vector_jacobian_product")
_METHODS = {**dict.fromkeys(_ENDPOINTS, "POST"), "health": "GET", "openapi.json": "GET"}
#: The products by endpoint: the kind of derivative, the field with vectors, and what the names of further fields begin with.
_PRODUCTS = {
    "jacobian_vector_product": (PUSH_FORWARD, "tangent_vector", "jvp"),
    "vector_jacobian_product": (PULL_BACK, "cotangent_vector", "vjp"),
}
_Hold = Callable[[int], None]
_Part = Callable[[Any], dict[str, Array]]
_Paths = Mapping[str, str]
_Tensors = Mapping[str, Tensor]
_STATUS = {"INVALID_ARGUMENT": 422, "NOT_FOUND": 404, "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504}


class TesseractModel:
    """A served model and its derivatives, for clients of the library ``tesseract-core``.

    The shapes in ``inputs`` and ``outputs`` lack the batch dimension.
    """

    def __init__(self, model: AsyncModel, derivatives: Mapping[str, AsyncModel], bounds: Namespace) -> None:
        """Makes a Tesseract of ``model``.

        ``derivatives``: "pull_back" or "push_forward" -> the model that computes this derivative of ``model``.
        ``bounds``: an object with the limits ``max_body_bytes`` and ``max_products`` of requests to the Tesseract.
        """
        self._model, self._bounds, self._batched = model, bounds, model.max_batch_size > 0
        self.inputs, self.outputs = gateway.rows(model)
        names, taken, given = Names(model.name), wire.floating(self.inputs), wire.floating(self.outputs)
        #: The model under "", and each of its derivatives under the derivative's kind.
        self._models = {"": model, **derivatives}
        #: For the model and each kind of derivative, a prefix and two groups of tensors: the vectors that it takes besides the
        #: model's inputs, and its results. The names of both begin with the prefix on the daemon's side.
        self._kinds: dict[str, tuple[str, _Tensors, _Tensors]] = {
            "": ("", {}, self.outputs),
            PULL_BACK: (names.cotangent, given, taken),
            PUSH_FORWARD: (names.tangent, taken, given),
        }

    def schema(self) -> dict[str, Any]:
        """Returns the model's OpenAPI document."""
        has = {name: each[0] in self._models for name, each in _PRODUCTS.items()} | {"jacobian": len(self._models) > 1}
        title = {"title": self._model.name, "version": str(self._model.version)}
        return wire.openapi(title, [each for each in _ENDPOINTS if has.get(each, True)], self.inputs, self.outputs)

    async def answer(self, endpoint: str, body: Mapping[str, Any], hold: _Hold) -> dict[str, Any]:
        """Runs the model for a request to a Tesseract endpoint, such as "apply". Returns the endpoint's JSON answer as a dict.

        ``body``: the request's JSON object. ``hold``: counts bytes of the model's answers, and raises an error above a limit.
        Raises: InvalidArgument: the request does not fit the model or exceeds a limit.  ServingError: any error of the daemon.
        """
        values = wire.by_name(flat(body.get("inputs"), self.inputs), self.inputs, "inputs")
        apply, abstract = endpoint == "apply", endpoint == "abstract_eval"
        point = wire.Point(values, self.inputs, self._batched, self._bounds.max_body_bytes, abstract)
        if not apply and (lacking := sorted(self.inputs.keys() - values.keys())):
            raise InvalidArgument(f"inputs lack {lacking}")
        shapes = {name: each.shape for name, each in self.outputs.items()}
        if apply or any(-1 in shape for shape in shapes.values()):  # only the model knows
            found = await self._rows("", wire.slices(point.arrays), point.rows, hold)
            if apply:
                return {name: point.output(each) for name, each in found.items()}
            shapes = {name: each.shape[1:] for name, each in found.items()}
        if abstract:
            if texts := [name for name, each in self.outputs.items() if each.datatype == "BYTES"]:
                raise InvalidArgument(f"output '{texts[0]}' has texts, for which {endpoint} has no words: use apply")
            rows = (point.rows,) * point.has_rows
            return {name: wire.described(rows + shapes[name], each) for name, each in self.outputs.items()}
        kind, field, begins = _PRODUCTS.get(endpoint, ("", "", "jac"))
        by = wire.by_name(body.get(f"{begins}_inputs"), wire.floating(self.inputs), f"{begins}_inputs")
        of = wire.by_name(body.get(f"{begins}_outputs"), wire.floating(self.outputs), f"{begins}_outputs")
        if not kind:
            return await self._jacobian(point, shapes, by, of, hold)
        (prefix, vectors, _), forward = self._kinds[kind], kind == PUSH_FORWARD
        came, listed, given = wire.by_name(body.get(field), vectors, field), by if forward else of, dict(point.arrays)
        if came.keys() != listed.keys():
            raise InvalidArgument(f"{field} has {sorted(came)}, and {sorted(listed)} were listed")
        for name, tensor in vectors.items():
            row = point.arrays[name].shape[1:] if forward else shapes[name]
            array = wire.read(name, came[name], tensor) if name in came else np.zeros(row, tensor.dtype)
            given[prefix + name] = array = point.in_rows(prefix + name, array, len(row))
            if array.shape[1:] != row:
                raise InvalidArgument(f"{field} has '{name}' with rows {[*array.shape[1:]]}, {[*row]} is expected")
        found = await self._rows(kind, wire.slices(given), point.rows, hold)
        if forward:
            return {path: point.output(found[name]) for name, path in of.items()}
        return {path: point.gradient(name, found[name]) for name, path in by.items()}

    async def _jacobian(self, point: wire.Point, shapes: Any, by: _Paths, of: _Paths, hold: _Hold) -> dict[str, Any]:
        taken, given = {name: point.arrays[name].shape[1:] for name in by}, {name: shapes[name] for name in of}
        inputs, outputs = (sum(map(math.prod, each.values())) for each in (taken, given))
        back = PULL_BACK in self._models and (PUSH_FORWARD not in self._models or outputs <= inputs)
        kind, units, count = (PULL_BACK, given, outputs) if back else (PUSH_FORWARD, taken, inputs)
        (prefix, vectors, _), rows = self._kinds[kind], point.rows
        gateway.bound("the Jacobian takes", count * rows, "products", self._bounds.max_products)
        gateway.bound("the Jacobian takes", 8 * inputs * outputs * rows * rows, "bytes", self._bounds.max_body_bytes)
        starts = dict(zip(units, np.cumsum([0, *map(math.prod, units.values())]).tolist()))
        unit, row = np.divmod(np.arange(count * rows), rows)

        def part(at: Any) -> dict[str, Array]:
            made = {name: array[row[at]] for name, array in point.arrays.items()}
            for name, tensor in vectors.items():
                shape = shapes[name] if back else point.arrays[name].shape[1:]
                ones = unit[at, None] - starts.get(name, count) == np.arange(math.prod(shape))
                array = ones.astype(wire.dtype_for(tensor)).reshape(len(ones), *shape)
                made[prefix + name] = cast(name, array, tensor.datatype)
            return made

        found = await self._rows(kind, part, count * rows, hold)

        def block(output: str, name: str) -> Array:
            unit, other = (output, name) if back else (name, output)
            array = found[other].reshape(count, rows, *found[other].shape[1:])
            array = np.moveaxis(array[starts[unit] : starts[unit] + math.prod(units[unit])], 0, 1 if back else -1)
            return point.block(name, array.reshape(rows, *given[output], *taken[name]))

        return {path: {to: block(output, name) for name, to in by.items()} for output, path in of.items()}

    async def _rows(self, kind: str, part: _Part, rows: int, hold: _Hold) -> dict[str, Array]:
        if kind not in self._models:  # the daemon says why, unless the model was replaced meanwhile
            self._models[kind] = await self._model.derivative(kind)
        model, (prefix, _, given) = self._models[kind], self._kinds[kind]
        parts, size, most = list[dict[str, Array]](), 0, self._bounds.max_body_bytes
        # A row of a Jacobian may be all that a request may have.
        row = sum(each.nbytes for each in part(slice(0, 1)).values())
        step = max(1, min(model.max_batch_size, most // max(row, 1)))
        for at in range(0, max(rows, 1), step):
            # A model without a batch dimension has one row, which is taken away and put back.
            taken, lift = (slice(at, at + step), ...) if model.max_batch_size else (0, None)
            with await gateway.ask(model, part(taken), outputs=[prefix + name for name in given]) as got:
                found = {name: gateway.for_client(got[prefix + name], each) for name, each in given.items()}
                parts.append({name: np.array(each)[lift] for name, each in found.items()})
            came = sum(each.nbytes for each in parts[-1].values())
            size = gateway.bound("the answer has", size + came, "bytes", most)
            hold(came)
        return {name: np.concatenate([each[name] for each in parts]) for name in given}


class TesseractGateway(gateway.Gateway):
    """Serves models to ``tesseract-core`` as an ASGI application. Limits the total bytes of requests and answers in progress."""

    def __init__(self, client: AsyncClient, options: Namespace) -> None:
        super().__init__(client, options, lambda key: b"Basic " + base64.b64encode(b"api-key:" + key))
        #: Bytes of requests under way, and of their answers until these are sent.
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request with JSON. If the request fails, the answer has an error status and a sentence that says why."""
        own, most = 0, self.options.max_held_bytes

        def hold(count: int) -> None:
            nonlocal own
            own, self._held = own + count, self._held + count
            if self._held > most:
                raise HTTPException(503, f"requests and their answers have {self._held} bytes, at most {most} may be")

        try:
            status, kind, content = await self._answer(Request(scope, receive), hold)
            headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            # Each piece waits until the client has read most of those before, or has left.
            for end in range(_PIECE, len(content) + _PIECE, _PIECE):
                more = {"more_body": end < len(content)}
                await send({"type": "http.response.body", "body": content[end - _PIECE : end], **more})
        finally:
            self._held -= own

    async def _answer(self, request: Request, hold: _Hold) -> tuple[int, bytes, bytes]:
        try:
            kind, told = await self._respond(request, hold)
            content = json.dumps(told, default=wire.written).encode()
            hold(len(content))
            return 200, kind, content
        except HTTPException as error:
            status, text = error.status_code, error.detail
        except ServingError as error:
            status, text = _STATUS.get(error.code, 500), gateway.told(error)
        except RecursionError:
            status, text = 422, "the request has too many lists and maps in each other"
        except ClientDisconnect:
            status, text = 400, "the client has left"
        except Exception:
            logging.getLogger("tensord_client.tesseract").exception("a request has no answer")
            status, text = 500, "the gateway has failed with this request; its log says why"
        # Clients make an error of pydantic's of a list, and show the text of others.
        detail: Any = [{"type": "value_error", "loc": ["body"], "msg": text}] if status == 422 else text
        return status, b"application/json", json.dumps({"detail": detail}).encode()

    async def _respond(self, request: Request, hold: _Hold) -> tuple[bytes, dict[str, Any]]:
        if not self.is_known(request.headers.getlist("authorization")):
            raise HTTPException(401, "the API key is none of the gateway's: use http://api-key:KEY@HOST:PORT/MODEL")
        path = _PATH.fullmatch(request.scope["path"])
        if path is None:
            raise HTTPException(404, "a model is at /MODEL or /MODEL/versions/N")
        endpoint, asked = path[3], (path[1], int(path[2] or 0))
        if _METHODS.get(endpoint) != request.method:
            raise HTTPException(405 if endpoint in _METHODS else 404, f"no {request.method} is at {endpoint}")
        if endpoint not in _ENDPOINTS:
            found = await self.model(asked)
            return b"application/json", {"status": "ok"} if endpoint == "health" else found.schema()
        if not wire.is_accepted(request.headers.get("accept", "*/*")):
            raise HTTPException(406, "this server answers with json+base64, neither compressed nor in memory of CUDA")
        body, found = await self._read(request, hold), await self.model(asked, math.inf)
        try:
            answer = await found.answer(endpoint, body, hold)
        except (InvalidArgument, NotFound):
            # Perhaps the model was loaded anew, and takes something else now.
            again = await self.model(asked)
            if again is found:
                raise
            answer = await again.answer(endpoint, body, hold)
        return b"application/json+base64", answer

    async def _read(self, request: Request, hold: _Hold) -> dict[str, Any]:
        content = bytearray()
        most, seconds = self.options.max_body_bytes, self.options.body_timeout

        async def receive() -> None:
            async for chunk in request.stream():
                content.extend(chunk)
                hold(len(chunk))
                if len(content) > most:
                    raise HTTPException(413, f"a request has {len(content)} bytes or more, at most {most} may be")

        try:
            await asyncio.wait_for(receive(), seconds)
        except asyncio.TimeoutError:
            raise HTTPException(408, f"{len(content)} bytes came in {seconds} s, and no end of a request") from None
        return wire.parsed(content)

    async def make(self, name: str, version: int) -> TesseractModel:
        model = await self.client.model(name, version, timeout=self.options.timeout)
        kinds = {}
        for kind in (PULL_BACK, PUSH_FORWARD):
            with contextlib.suppress(InvalidArgument):
                kinds[kind] = await model.derivative(kind)
        return TesseractModel(model, kinds, self.options)


class _Server(uvicorn.Server):  # uvicorn's own limit on idle connections begins anew with each byte
    #: The connections without a request: the time since when each has none, by connection and its last request.
    _idle: Mapping[Any, float] = {}

    async def on_tick(self, counter: int) -> bool:
        now, connections = time.monotonic(), list[Any](self.server_state.connections)
        idle = [(each, each.cycle) for each in connections if each.cycle is None or each.cycle.response_started]
        self._idle = {each: self._idle.get(each, now) for each in idle}
        for (connection, _), since in self._idle.items():
            if now - since > self.config.timeout_keep_alive:
                connection.transport.abort()
        return await super().on_tick(counter)


@contextlib.asynccontextmanager
async def serving(client: AsyncClient, options: Namespace, listening: gateway.Listening) -> AsyncIterator[None]:
    """Runs the gateway while the caller is in the ``async with`` block. ``options``: the options of the command line.

    Raises OSError or InvalidArgument if a file that the options name cannot be used.
    """
    # Of the parsers only that of h11 has a limit for headers. Whoever connects could fill the log.
    own: Any = {"http": "h11", "lifespan": "off", "ws": "none", "log_config": None, "log_level": "error"}
    own.update(access_log=False, server_header=False, timeout_graceful_shutdown=options.stop_timeout)
    own.update(limit_concurrency=options.max_connections, timeout_keep_alive=options.idle_timeout)
    own.update(ssl_certfile=options.certificate, ssl_keyfile=options.key)
    server = _Server(uvicorn.Config(TesseractGateway(client, options), **own))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup([listening])
    ticks = asyncio.ensure_future(server.main_loop())
    yield
    server.should_exit = True
    await ticks
    await server.shutdown([listening])


if __name__ == "__main__":
    module = "tensord_client.tesseract"
    gateway.main(module, gateway.options(module, __doc__, FLAGS), "models", serving)
